"""What Megatron-Bridge exports is the checkpoint, and is found in the parameters where it lies.

Trainers of two ranks, without engines. `e2e.test_megatron_weights` has the engines, and more ranks.
"""

from importlib.metadata import version

import pytest
from packaging.version import Version
from safetensors.torch import load_file

from support.megatron_exports import build, export_of, make_checkpoint
from support.megatron_trainer import ENVIRONMENT, Layout
from support.trainer import Ranks

NO_ENGINES = ["http://127.0.0.1:9"] * 2
CASES = {
    "qwen3-tp": ({"architecture": "qwen3", "tied": True}, Layout(tp=2, offload=False)),
    "qwen3-pp": ({"architecture": "qwen3", "tied": True}, Layout(pp=2)),
    "qwen3-moe-ep": ({"architecture": "qwen3_moe", "layers": 2}, Layout(ep=2)),
    "deepseek-v3-ep": ("deepseek-v3", Layout(ep=2)),
    "qwen3-vl-tp": ("qwen3-vl", Layout(tp=2)),
    "qwen2_5-vl-tp": ("qwen2_5-vl", Layout(tp=2)),
    "qwen3-vl-moe-ep": ("qwen3-vl-moe", Layout(ep=2)),
    "qwen3-vl-moe-tp-etp": ("qwen3-vl-moe", Layout(tp=2, etp=2)),
    "qwen3-vl-moe-pp": ("qwen3-vl-moe", Layout(pp=2)),
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        Version(version("megatron-bridge")) < Version("0.5"),
        reason="of Megatron-Bridge 0.3.1 the e2e tests show as much, and it cannot do all cases",
    ),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with Ranks(folder, NO_ENGINES, environment=ENVIRONMENT) as started:
        yield started


@pytest.mark.parametrize(("model", "layout"), CASES.values(), ids=CASES)
def test_every_tensor_is_the_checkpoints_and_traced(ranks, model, layout, tmp_path):
    checkpoint = make_checkpoint(tmp_path, model)
    ranks.run(build, checkpoint, layout)
    for seen in ranks.run(export_of, checkpoint):
        assert sorted(seen["names"]) == sorted(load_file(checkpoint / "model.safetensors"))
        assert seen["different"] == []
        assert (seen["off"], seen["misplaced"]) == (None, [])
