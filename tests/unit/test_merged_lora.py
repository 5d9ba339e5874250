"""Merged LoRA adapters are exported as PEFT merges them; the trainer's model is left as it is."""

import logging
import re
from contextlib import suppress
from functools import partial
from unittest import mock

import pytest
import torch

from unit.lora_rank import (
    CASES,
    Exports,
    adapted,
    compared,
    copied,
    engine_of,
    is_same,
    merged_by_peft,
    state_of,
)
from verl_sglang_sync.report import warn_once

WARNING = "verl's own export merges the LoRA adapters"
DTYPES = ["float32", "bfloat16"]
MAX_ERROR = {"float32": 0.01, "bfloat16": 0.04}
"""Of verl's own export on four ranks: it multiplies shards."""


def check(found, max_error):
    assert found["as PEFT"] == [True] * 3
    assert found["is unchanged"]
    assert found["moves"] == 0, "verl has moved the whole model"
    assert found["config"] is None
    assert found["as verl names it"]
    assert max_error is None or found["from verl's"] <= max_error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_one_rank_exports_what_peft_and_verl_merge(world_of_one, case, dtype):
    """Not for DoRA, where verl 0.9.1 exports the base weights, or fails, by release of torch."""
    with_verls = "dora" not in case
    check(compared(case, dtype, with_verls=with_verls), 0 if with_verls else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["linear", "lora-bias", "other", "dora"])
def test_ranks_export_what_peft_merges(pool, case, dtype):
    """verl's own fails with convolutions of which a rank has no row."""
    with_verls = case not in ("other", "dora")
    for found in pool.run(partial(compared, with_verls=with_verls), case, dtype):
        check(found, MAX_ERROR[dtype])


@pytest.fixture
def engine(world_of_one):
    """On one rank, in the dtype of the export: what is gathered is the parameters' own memory."""
    return engine_of(adapted(torch.bfloat16, **CASES["dora"]))


def test_nothing_changes_where_the_consumer_stops_or_fails(engine):
    exports, before = Exports(), state_of(engine.module)
    export, _ = exports.ours(engine)
    weights = iter(export)
    for _ in range(5):
        next(weights)
        assert state_of(engine.module) == before
    weights.close()
    with suppress(InterruptedError):
        for number, _ in enumerate(export):
            if number == 7:
                raise InterruptedError
    assert state_of(engine.module) == before


@pytest.mark.parametrize("fails", ["get_delta_weight", "_cache_store"])
def test_nothing_changes_where_a_merge_fails(engine, fails):
    exports, before = Exports(), state_of(engine.module)
    export, _ = exports.ours(engine)
    with (
        mock.patch(f"peft.tuners.lora.layer.Linear.{fails}", side_effect=MemoryError),
        pytest.raises(MemoryError),
    ):
        list(export)
    assert state_of(engine.module) == before
    assert not any(parameter.grad_fn for parameter in engine.module.parameters())


def _of_another_class(engine):
    from peft.tuners.lora.layer import Linear

    layer = engine.module.base_model.model.model.layers[1].self_attn.q_proj
    layer.__class__ = type("Quantised", (Linear,), {})
    return "self_attn.q_proj is a .*Quantised"


def _of_another_variant(engine):
    layer = engine.module.base_model.model.model.layers[0].self_attn.q_proj
    layer.lora_variant["default"] = object()
    return "self_attn.q_proj is a builtins.object"


def _merged_already(engine):
    layer = engine.module.base_model.model.model.layers[0].self_attn.k_proj
    layer.merged_adapters.append("default")
    return "self_attn.k_proj is merged already"


def _twice_in_the_state(engine):
    layers = engine.module.base_model.model.model.layers
    layers[1].again = layers[0].self_attn.q_proj.base_layer
    return "self_attn.q_proj has parameters that the model's state lacks, or has twice"


@pytest.mark.parametrize(
    "changed", [_of_another_class, _of_another_variant, _merged_already, _twice_in_the_state]
)
def test_what_we_do_not_know_verl_exports_and_one_warning_says_so(engine, changed, caplog):
    warn_once.cache_clear()
    exports, reason = Exports(), changed(engine)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            exports.ours(engine)
    assert len(exports.moves) == 2, "verl's own loads the model"
    [warning] = [r.getMessage() for r in caplog.records if WARNING in r.getMessage()]
    assert re.search(reason, warning), warning


def test_an_export_of_the_users_own_is_taken_as_it_is(engine):
    from verl_sglang_sync.verl.exports import _repeatable

    own = [("a", torch.ones(2))]
    export, _ = _repeatable(lambda engine, **_: (own, None))(engine)
    assert export is own


def test_adapters_that_are_not_merged_are_verls(engine):
    from verl_sglang_sync.verl.merged_lora import merged_export

    engine.model_config.lora = {}
    assert merged_export(engine) is None


def test_verls_own_export_of_a_layer_that_we_do_not_know_is_right(world_of_one):
    exports, model = Exports(), adapted(torch.bfloat16, **CASES["linear"])
    wanted = merged_by_peft(model)
    engine = engine_of(model)
    _of_another_class(engine)
    assert is_same(copied(exports.ours(engine)[0]), wanted)
    assert exports.moves


def test_a_buffer_is_exported_as_a_copy(engine):
    export, _ = Exports().ours(engine)
    buffer = engine.module.base_model.model.model.layers[0].count
    assert dict(export)["model.layers.0.count"].data_ptr() != buffer.data_ptr()
