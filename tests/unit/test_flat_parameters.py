"""FSDP1's flat parameters are found in the ranks' shards: real FSDP1, verl's export, gloo."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from support.assembled import misplaced
from unit.route_ranks import export_of, sharded
from unit.trainer_ranks import WORLD_SIZE, trainer_group
from verl_sglang_sync.verl import flat_parameters
from verl_sglang_sync.verl.exports import flat_parameters as sources_of

CPU = torch.device("cpu")


def traced(kind, device=CPU, **options):
    """A model's export under FSDP1, its source map, and why it cannot be traced."""
    from verl_sglang_sync.sources.source_map import SourceMap

    export = export_of(sharded(kind, strategy="fsdp1", **options))
    source_map = SourceMap(trainer_group(2)[0], device)
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
    return names, misplaced(export, source_map, trainer_group(2)[0]), sorted(holders)


@pytest.mark.parametrize(
    ("kind", "rows", "options", "holders"),
    [
        ("tied", 1, {}, [(0,), (1,), (2,), (3,)]),
        ("moe", 1, {"use_orig_params": True}, [(0,), (1,), (2,), (3,)]),  # with padding between
        ("vl", 1, {}, [(0,), (1,), (2,), (3,)]),
        ("dense", 2, {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, [(0, 2), (1, 3)]),
        ("dense", 1, {"sharding_strategy": ShardingStrategy.NO_SHARD}, [(0, 1, 2, 3)]),
    ],
)
def test_every_exported_weight_is_a_run_of_the_shards(pool, kind, rows, options, holders):
    for names, wrong, found in pool.run(assemble, kind, rows, options):
        assert len(names) > 20 and wrong == []
        assert found == holders


def refuse():
    """Why nothing is traced: offloaded, and where FSDP1 has the weights in another order."""
    _, _, offloaded = traced("dense", torch.device("cuda"))
    sizes = flat_parameters.accumulate
    with mock.patch.object(
        flat_parameters, "accumulate", lambda all_, initial: sizes(all_, initial=8)
    ):
        _, _, elsewhere = traced("dense")
    return offloaded, elsewhere


def test_what_lies_elsewhere_is_not_traced(pool):
    for offloaded, elsewhere in pool.run(refuse):
        assert "the root module is on cpu, the engine on cuda" in offloaded
        assert (
            "FSDP1 has model.embed_tokens.weight of the root module elsewhere, or in other order"
            in elsewhere
        )


def engines():
    """Whose exports have flat parameters: only without an adapter and quantisation."""
    model = sharded("dense", strategy="fsdp1")
    hf_config = SimpleNamespace(model_type="qwen3")
    config = SimpleNamespace(hf_config=hf_config)
    plain = SimpleNamespace(module=model, model_config=config, _qat_enabled=False)
    quantised = SimpleNamespace(module=model, model_config=config, _qat_enabled=True)
    found = [sources_of(engine) is not None for engine in (plain, quantised, SimpleNamespace())]
    model._fsdp_wrapped_module.peft_config = {}
    return [*found, sources_of(plain) is not None]


def test_exports_that_change_the_weights_have_no_flat_parameters(pool):
    assert pool.run(engines) == [[True, False, False, False]] * WORLD_SIZE
