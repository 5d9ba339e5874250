"""Merged LoRA adapters are exported as PEFT merges them; the trainer's model is left as it is."""

import copy
import dataclasses
import importlib
import inspect
import pkgutil
import re
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from unittest import mock

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from unit import lora_rank
from unit.lora_rank import (
    CASES,
    MOE_CASES,
    adapted,
    base_model,
    case_model,
    compared,
    copied,
    engine_of,
    exporting,
    is_same,
    merged_by_peft,
    state_of,
)
from unit.route_ranks import MODELS
from verl_sglang_sync.verl.merged_lora import (
    FUSED_EXPERTS,
    KNOWN,
    AdapterNotMergeable,
    merged_export,
)

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
@pytest.mark.parametrize("case", MOE_CASES)
def test_fused_experts_are_merged_and_exported_singly(world_of_one, case, dtype):
    """Not by verl 0.9.1, whose export of merged adapters leaves experts fused."""
    found = compared(case, dtype, with_verls=False)
    check(found, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["linear", "lora-bias", "other", "dora", "moe-experts"])
def test_ranks_export_what_peft_merges(pool, case, dtype):
    """verl's own fails with convolutions of which a rank has no row."""
    with_verls = case not in ("other", "dora", "moe-experts")
    for found in pool.run(partial(compared, with_verls=with_verls), case, dtype):
        check(found, MAX_ERROR[dtype])


@pytest.fixture
def exports():
    with exporting() as made:
        yield made


def test_merged_weights_have_the_names_of_the_checkpoint(world_of_one, exports):
    with mock.patch.object(lora_rank, "base_model", lambda **_: MODELS["mixtral"]()):
        model = adapted(torch.bfloat16, target_modules=["q_proj"])
    merged = copy.deepcopy(model).merge_and_unload()
    wanted = revert_weight_conversion(merged, merged.state_dict())
    engine = engine_of(model)
    export, _ = exports.ours(engine)
    assert is_same(dict(sorted(export)), dict(sorted(wanted.items())))
    assert sum(".block_sparse_moe.experts." in name for name in wanted) == 2 * 3 * 6


@pytest.fixture
def engine(world_of_one):
    """On one rank, in the dtype of the export: what is gathered is the parameters' own memory."""
    return engine_of(adapted(torch.bfloat16, **CASES["dora"]))


def test_nothing_changes_where_the_consumer_stops_or_fails(engine, exports):
    before = state_of(engine.module)
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
def test_nothing_changes_where_a_merge_fails(engine, exports, fails):
    before = state_of(engine.module)
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


def _disabled(engine):
    engine.module.base_model.model.model.layers[1].self_attn.k_proj.enable_adapters(False)
    return r"layers\.1\.self_attn\.k_proj has its adapters disabled"


def _twice_in_the_state(engine):
    layers = engine.module.base_model.model.model.layers
    layers[1].again = layers[0].self_attn.q_proj.base_layer
    return "self_attn.q_proj has parameters that the model's state lacks, or has twice"


@pytest.mark.parametrize(
    "changed",
    [_of_another_class, _of_another_variant, _merged_already, _disabled, _twice_in_the_state],
)
def test_what_may_merge_otherwise_is_refused_by_name(engine, exports, changed):
    reason = changed(engine)
    for _ in range(2):
        with pytest.raises(AdapterNotMergeable, match=reason):
            exports.ours(engine)
    assert not exports.moves, "verl's own has begun"


def refusal(model, lora=None):
    """Why an engine with this model exports nothing; None if it exports."""
    config = SimpleNamespace(lora={"merge": True} if lora is None else lora)
    try:
        merged_export(SimpleNamespace(module=model, model_config=config))
    except AdapterNotMergeable as refused:
        return str(refused)
    return None


def with_modules(kind):
    """All modules of PEFT's tuners that derive from a class, of whatever releases have."""
    for module in pkgutil.walk_packages(peft.tuners.__path__, "peft.tuners."):
        with suppress(ImportError):  # of what needs a library for quantised weights
            importlib.import_module(module.name)
    pending, found = [kind], set()
    while pending:
        for subclass in pending.pop().__subclasses__():
            pending.append(subclass)
            is_layer = issubclass(subclass, nn.Module) and not inspect.isabstract(subclass)
            if is_layer and subclass.__module__.startswith("peft."):
                found.add(subclass)
    assert len(found) > 1
    return found


def names_of(kinds):
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}


def test_every_peft_layer_is_merged_or_refused():
    merged = set()
    for case in [*CASES, *MOE_CASES]:
        model = case_model(case, torch.float32)
        layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
        merged |= names_of(map(type, layers))
        merged |= names_of(type(v) for m in layers for v in m.lora_variant.values())
        reason = refusal(model)  # without FSDP2
        fused = "ParamWrapper" in str(merged & names_of(map(type, layers)))
        assert ("is a peft.tuners.lora.layer.ParamWrapper" in reason) if fused else reason is None
    assert merged == KNOWN | FUSED_EXPERTS, "each that is exported is compared with PEFT's merge"
    model = adapted(torch.float32, target_modules=["q_proj"])
    for kind in with_modules(BaseTunerLayer) | with_modules(AuxiliaryTrainingWrapper):
        [name] = names_of([kind])
        if name.endswith("lora.layer.MultiheadAttention"):  # a bare one has no `named_modules`
            attention = base_model()
            attention.attention = nn.MultiheadAttention(24, 3)
            attention = peft.get_peft_model(
                attention, peft.LoraConfig(target_modules=["attention"])
            )
            assert f"attention is a {name}" in (refusal(attention) or "exported")
        elif name not in merged:
            probe = kind.__new__(kind)
            nn.Module.__init__(probe)
            model.base_model.model.probe = probe
            assert f"probe is a {name}" in (refusal(model) or "exported"), name


OPTIONS = {
    "ADALORA": {"total_step": 10},
    "CARTRIDGE": {"num_virtual_tokens": 2},
    "VBLORA": {"vector_length": 8, "num_vectors": 4, "topk": 2},
}


def test_every_peft_type_is_merged_or_refused():
    """Of those that need no more than a model of transformers."""
    refused, failed = set(), {}
    for peft_type, kind in PEFT_TYPE_TO_CONFIG_MAPPING.items():
        named = {each.name for each in dataclasses.fields(kind)}
        options = {"target_modules": ["o_proj"], "task_type": "CAUSAL_LM", "num_virtual_tokens": 2}
        options = {k: v for k, v in options.items() if k in named}
        try:
            model = peft.get_peft_model(
                base_model(), kind(**options | OPTIONS.get(peft_type.value, {}))
            )
        except Exception as error:
            failed[peft_type.value] = error
            continue
        if (reason := refusal(model)) is not None:
            refused.add(peft_type.value)
            assert "cannot be merged for the rollout: the model is a " in reason
        else:
            assert peft_type.value == "LORA"
    assert {"RANDLORA", "GRALORA", "DELORA", "LOHA", "OFT", "IA3"} <= refused, failed
    assert len(refused) > 2 * len(failed), failed


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"modules_to_save": ["lm_head"]}, "lm_head is a .*ModulesToSaveWrapper"),
        ({"trainable_token_indices": [3, 5]}, "embed_tokens is a .*TrainableTokensWrapper"),
        ({"alora_invocation_tokens": [1, 2]}, "q_proj is a .*ALoraLinearVariant"),
        ({"tied": True, "target_modules": ["embed_tokens"]}, "embeddings are tied"),
        ({"tied": True, "target_modules": ["lm_head"]}, "embeddings are tied"),
    ],
)
def test_weights_trained_beside_layers_are_refused(options, reason):
    options = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **options}
    model = adapted(torch.float32, **options)
    assert re.search(reason, refusal(model) or "exported")
    assert refusal(model, lora={}) is None, "it is not merged"


def test_experts_of_verls_own_export_are_taken_apart(world_of_one, exports):
    """verl's own merges with FSDP1, which does not run on a CPU: its FSDP2 export stands in."""
    model = case_model("moe", torch.bfloat16)
    wanted, engine = merged_by_peft(model), engine_of(model)
    with mock.patch("verl_sglang_sync.verl.merged_lora.merged_export", return_value=None):
        assert is_same(copied(exports.ours(engine)[0]), wanted)
    assert exports.moves


def test_a_users_own_export_stays_unchanged(engine):
    from verl_sglang_sync.verl.exports import _repeatable

    own = [("a", torch.ones(2))]
    export, _ = _repeatable(lambda engine, **_: (own, None))(engine)
    assert export is own


def test_adapters_that_are_not_merged_are_verls(engine):
    engine.model_config.lora = {}
    assert merged_export(engine) is None


@pytest.mark.parametrize("base_sync_done", [False, True])
def test_disabled_adapters_are_refused_unmerged(world_of_one, exports, base_sync_done):
    model = adapted(torch.float32, target_modules=["q_proj"])
    engine = engine_of(model)
    engine.model_config.lora = {}
    model.base_model.disable_adapter_layers()
    with pytest.raises(ValueError, match="q_proj has its adapters disabled"):
        exports.ours(engine, base_sync_done=base_sync_done)
    model.base_model.enable_adapter_layers()
    exports.ours(engine, base_sync_done=base_sync_done)


def test_a_buffer_is_exported_as_a_copy(engine, exports):
    export, _ = exports.ours(engine)
    buffer = engine.module.base_model.model.model.layers[0].count
    assert dict(export)["model.layers.0.count"].data_ptr() != buffer.data_ptr()
