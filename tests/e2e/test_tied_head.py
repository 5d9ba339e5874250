"""A model that ties its head serves no head that the trainer has trained on its own."""

import pytest
from tiny_assets import make_assets

from sglang_loader.common.engine_settings import STALE_REQUESTS_VARIABLE
from support.exports import KeptExport, store_tied_head
from support.http_requests import status_of_request
from support.served import served
from support.trainer import sync_error

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HEAD = "lm_head.weight"
modes = pytest.mark.parametrize("mode", ["flattened", "compiled"])


@pytest.fixture(params=["", "head in the checkpoint"])
def engine(request, tmp_path):
    make_assets(tmp_path, architecture="qwen3", tied=True)
    if request.param:
        store_tied_head(tmp_path / "model")
    with served(tmp_path, variables={STALE_REQUESTS_VARIABLE: "0"}) as engine:
        yield engine


@pytest.fixture
def trainer(engine):
    return engine.trainer()


def export_of(trainer):
    """The weights, with a head that is a tensor of its own and has the embedding's bytes."""
    export = KeptExport([(name, tensor.clone()) for name, tensor in trainer.weights()])
    assert HEAD in export.state
    return export


@modes
def test_what_was_refused_is_refused_again(engine, trainer, mode):
    manager, export = trainer.manager(mode), export_of(trainer)
    export.state[HEAD].mul_(2)
    for version in ("0", "1", "2"):
        assert f"1 unexpected: {HEAD}" in sync_error(manager, export.reexport(), version)
        assert status_of_request(engine.url) == 503


@modes
def test_a_head_trained_later_is_refused(engine, trainer, mode):
    manager, export = trainer.manager(mode), export_of(trainer)
    for version in ("0", "1", "2"):
        assert sync_error(manager, export.reexport(), version) is None
    assert status_of_request(engine.url) == 200
    export.state[HEAD].mul_(2)
    for version in ("3", "4"):
        assert f"1 unexpected: {HEAD}" in sync_error(manager, export.reexport(), version)
    assert status_of_request(engine.url) == 503
