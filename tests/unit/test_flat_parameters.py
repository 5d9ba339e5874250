"""FSDP1's flat parameters are found in the ranks' shards: real FSDP1, verl's export, gloo."""

from itertools import accumulate
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from support.assembled import misplaced
from unit.route_ranks import export_of, sharded
from unit.trainer_ranks import WORLD_SIZE, trainer_ranks
from verl_sglang_sync.sources.snapshot import SourcesChanged
from verl_sglang_sync.verl import exports, flat_parameters

CPU = torch.device("cpu")
BF16 = MixedPrecision(param_dtype=torch.bfloat16)


def traced(kind, device=CPU, change=lambda model: None, **options):
    """A model's export under FSDP1, its source map, and why it cannot be traced."""
    from verl_sglang_sync.sources.source_map import SourceMap

    model = sharded(kind, strategy="fsdp1", **options)
    change(model)
    export = export_of(model)
    source_map = SourceMap(trainer_ranks(2)[0], device)
    return export, source_map, source_map.trace(export)


def assemble(kind, rows, options):
    """On `rows` replicas of the parameters: names of exported tensors, of those that are not what
    the trace says, and who holds shards.
    """
    mesh = init_device_mesh("cpu", (rows, WORLD_SIZE // rows) if rows > 1 else (WORLD_SIZE,))
    with mock.patch("unit.route_ranks.init_device_mesh", lambda *_: mesh):
        export, source_map, reason = traced(kind, **options)
    assert reason is None
    holders = {ranks for owners in source_map.traced.owners for ranks in owners.holders}
    names = [name for name, _ in export]
    return names, misplaced(export, source_map, trainer_ranks(2)[0]), sorted(holders)


@pytest.mark.parametrize(
    ("kind", "rows", "options", "holders"),
    [
        ("tied", 1, {}, [(0,), (1,), (2,), (3,)]),
        ("moe", 1, {"mixed_precision": BF16}, [(0,), (1,), (2,), (3,)]),
        ("mixtral", 1, {}, [(0,), (1,), (2,), (3,)]),
        ("vl", 1, {}, [(0,), (1,), (2,), (3,)]),
        ("dense", 2, {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, [(0, 2), (1, 3)]),
        ("dense", 1, {"sharding_strategy": ShardingStrategy.NO_SHARD}, [(0, 1, 2, 3)]),
    ],
)
def test_exported_weights_are_runs_of_the_shards(pool, kind, rows, options, holders):
    for names, wrong, found in pool.run(assemble, kind, rows, options):
        assert len(names) > 20 and wrong == []
        assert found == holders


def refuse():
    """Why nothing is traced."""

    def shifted(sizes, initial):
        return accumulate(sizes, initial=8)

    with mock.patch.object(flat_parameters, "accumulate", shifted):
        _, _, elsewhere = traced("dense")
    others = (
        {"device": torch.device("cuda")},
        {"use_orig_params": True},
        {"change": lambda model: model.register_buffer("count", torch.ones(1))},
    )
    return [elsewhere, *(traced("dense", **other)[2] for other in others)]


REASONS = (
    "FSDP1 has model.embed_tokens.weight of the root module elsewhere, or in other order",
    "the parameters are offloaded (cpu)",
    "FSDP1 keeps the original parameters (use_orig_params=True)",
    "FSDP1 keeps count, a buffer, outside its flat parameters",
)


def test_what_lies_elsewhere_is_not_traced(pool):
    for found in pool.run(refuse):
        for reason, said in zip(REASONS, found, strict=True):
            assert reason in str(said)


def transpose():
    """Why a weight is not traced that FSDP1 has flattened column by column."""
    from unit import route_ranks

    def transposed():
        model = route_ranks._dense(False)
        weight = model.model.layers[0].mlp.up_proj.weight
        weight.data = weight.data.t().contiguous().t()
        return model

    with mock.patch.dict(route_ranks.MODELS, dense=transposed):
        return traced("dense")[2]


def test_a_sparse_layout_is_not_traced(pool):
    for reason in pool.run(transpose):
        assert "FSDP1 has mlp.up_proj.weight of model.layers.0 elsewhere" in str(reason)


def replace_data():
    """Whether it is noticed that parameters have other data than FSDP1 has noted."""
    models = []
    export, source_map, _ = traced("dense", change=models.append)
    list(export)  # FSDP1 notes them
    source_map.parameters(export, source_map.traced)
    for parameter in models[0].parameters():
        parameter.data = parameter.data.clone()
    try:
        source_map.parameters(export, source_map.traced)
    except SourcesChanged as error:
        return str(error)


def test_other_data_than_fsdp1_has_noted_are_noticed(pool):
    refusal = "a flat parameter has other data than FSDP1 has recorded"
    assert set(pool.run(replace_data)) == {refusal}


def another_norm(layer):
    layer.input_layernorm = type(layer.input_layernorm)(24)


def exchanged_norms(layer):
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    layer.input_layernorm, layer.post_attention_layernorm = second, first


def other_order(layer):
    layer._modules["self_attn"] = layer._modules.pop("self_attn")


def another_name(layer):
    layer.renamed = layer.input_layernorm
    del layer.input_layernorm


CHANGES = {
    "another module": (another_norm, "another module than model.layers.0.input_layernorm"),
    "modules exchanged": (exchanged_norms, "another module than model.layers.0.input_layernorm"),
    "another name": (another_name, "another module than model.layers.0.input_layernorm"),
    "another order": (other_order, "model.layers.0.mlp.gate_proj is in another place"),
    "a buffer more": (
        lambda layer: layer.mlp.register_buffer("count", torch.ones(1)),
        "FSDP1 keeps model.layers.0.mlp.count, a buffer,",
    ),
    "a parameter more": (
        lambda layer: layer.mlp.register_parameter("extra", torch.nn.Parameter(torch.ones(1))),
        "model.layers.0.mlp.extra, a parameter,",
    ),
    "a hook": (
        lambda layer: layer.mlp.register_state_dict_post_hook(lambda *_: None),
        "the state_dict of model.layers.0.mlp has a hook",
    ),
    "a hook before": (
        lambda layer: layer.mlp.register_state_dict_pre_hook(lambda *_: None),
        "the state_dict of model.layers.0.mlp has a hook",
    ),
    "a method": (
        lambda layer: setattr(layer.mlp, "_save_to_state_dict", lambda *_: None),
        "the state_dict of model.layers.0.mlp has a hook",
    ),
    "nothing that is saved": (
        lambda layer: layer.mlp.register_buffer("cache", torch.ones(1), persistent=False),
        None,
    ),
}


def restructure(change):
    """How it is noticed that a layer is not what FSDP1 has wrapped, and why that has no trace."""
    models = []
    export, source_map, _ = traced("dense", change=models.append)
    source_map.parameters(export, source_map.traced)
    layer = models[0].model.layers[0]._fsdp_wrapped_module
    CHANGES[change][0](layer)
    noticed = None
    try:
        source_map.parameters(export, source_map.traced)
    except SourcesChanged as error:
        noticed = str(error)
    return noticed, source_map.trace(export)


@pytest.mark.parametrize("change", CHANGES)
def test_what_fsdp1_has_not_wrapped_is_noticed(pool, change):
    reason = CHANGES[change][1]
    for noticed, untraced in pool.run(restructure, change):
        if reason is None:
            assert noticed is untraced is None
        else:
            assert reason in noticed and reason in str(untraced)


def change_while_traced():
    """Why the export has no trace while a rank's parameters change, and after that."""
    original = flat_parameters._shard

    def shard(handle):
        if torch.distributed.get_rank() == 1:
            raise SourcesChanged("moved at this moment")
        return original(handle)

    with mock.patch.object(flat_parameters, "_shard", shard):
        export, source_map, reason = traced("dense")
    said = reason and (reason.text, reason.is_final)
    return said, source_map.off_reason, source_map.trace(export), source_map.off_reason


def test_parameters_changed_during_tracing_are_retraced(pool):
    found = pool.run(change_while_traced)
    assert found == [(("rank 1: moved at this moment", False), None, None, None)] * WORLD_SIZE


def average(engine, **_):
    """The export of a class of the user's own."""
    return iter([]), None


def engines():
    """Whose exports name their sources: flat parameters but for FSDP2."""
    model, of_fsdp2 = sharded("dense", strategy="fsdp1"), sharded("dense", strategy="fsdp2")
    exports = [export_of(each, method) for method in (None, average) for each in (model, of_fsdp2)]
    found = [export.sources is not None for export in exports]
    found.append(flat_sources(model, _qat_enabled=True))
    with mock.patch.object(model._fsdp_wrapped_module, "peft_config", {}, create=True):
        return [*found, flat_sources(model, _qat_enabled=False)]


def flat_sources(model, **attributes):
    config = SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen3"))
    engine = SimpleNamespace(module=model, model_config=config, **attributes)
    return exports.flat_parameters(engine) is not None


def test_only_verls_own_export_names_its_sources(pool):
    assert pool.run(engines) == [[True, True, False, False, False, False]] * WORLD_SIZE
