"""What the trainer ranks of `test_engine_weights` do, all in one process start per server."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch

from support.manifest_steps import manifest_faults
from support.trainer import NamedTensors, TrainerRank, engine_hashes

MODES = ("bucketed", "flattened", "compiled")


def weights_of(model: Path, device: torch.device, *, scale: float = 1.0) -> NamedTensors:
    """The checkpoint's tensors as verl exports them: every state-dict name, tied ones twice."""
    from safetensors.torch import load_file

    named = dict(load_file(model / "model.safetensors"))
    if json.loads((model / "config.json").read_text())["tie_word_embeddings"]:
        named.setdefault("lm_head.weight", named["model.embed_tokens.weight"])
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return [(name, (tensor * scale).to(device, dtype)) for name, tensor in named.items()]


def store_tied_head(model: Path) -> None:
    """Write the tied output layer into the checkpoint: SGLang's MoE classes have one of their own,
    and leave it uninitialised when the file has none."""
    from safetensors.torch import load_file, save_file

    file = model / "model.safetensors"
    named = load_file(file)
    named["lm_head.weight"] = named["model.embed_tokens.weight"].clone()
    save_file(named, file, {"format": "pt"})


def exercise_engine(rank: TrainerRank, model: str, folder: str) -> dict[str, Any]:
    """Sync away and back, fail, recover, and repeat stages, in all modes."""
    weights = {scale: weights_of(Path(model), rank.device, scale=scale) for scale in (0.5, 1.0)}
    seen: dict[str, Any] = {"reference": engine_hashes(rank, Path(folder))}

    def cycle(
        mode: str, named: NamedTensors, version: str, **settings: Any
    ) -> list[dict[str, str]]:
        return sync_asleep(rank, rank.manager(mode, **settings), named, version, Path(folder))[0]

    for mode in MODES:
        changed = cycle(mode, weights[0.5], "half")
        restored = cycle(mode, weights[1.0], f"{mode}-back", bucket_bytes=1 << 20)
        failure = _failing_sync(rank, mode, weights[1.0])
        recovered = cycle(mode, weights[1.0], f"{mode}-again", multi_stage=False)
        seen[mode] = {
            "changed": changed,
            "restored": restored,
            "failure": failure,
            "recovered": recovered,
        }
    seen["manifest"] = manifest_faults(rank, weights[1.0], Path(folder))
    seen["repeated"] = _repeated_stages(rank)
    seen["syncs"] = syncs_in_a_row(rank, model, folder)
    return seen


SCALES = (0.5, 0.25, 2.0, 1.0)
COMPILED_SETTINGS = (
    {"keep_staging_buffers": True, "read_in_place": False},
    {"keep_staging_buffers": False, "read_in_place": False},
    {"keep_staging_buffers": False, "recheck_every_n_syncs": 2, "read_in_place": False},
)


PULLED_SETTINGS: tuple[dict[str, Any], ...] = ({}, {"recheck_every_n_syncs": 2})
SHARDED_SETTINGS: tuple[dict[str, Any], ...] = (
    {"read_in_place": False, "keep_staging_buffers": True},
    {"read_in_place": False, "recheck_every_n_syncs": 2},
)


def syncs_in_a_row(rank: TrainerRank, folder_of_model: str, folder: str) -> dict[str, Any]:
    """Other weights at every sync, by the eager loader and by each setting of the compiled one."""
    model = Path(folder_of_model)
    run = partial(_run_syncs, rank, model, Path(folder))
    return {
        "eager": run("flattened"),
        "compiled": [run("compiled", **settings) for settings in COMPILED_SETTINGS],
        "sharded": [
            run("compiled", export=sharded_export(weights_of(model, rank.device)), **settings)
            for settings in (SHARDED_SETTINGS if rank.tp > 1 else ())
        ],
        "exchanged after a failure": [
            run("compiled", export=sharded_export(weights_of(model, rank.device)), **settings)
            for settings in ([{"read_in_place": False, "fails_before": 2}] if rank.tp > 1 else ())
        ],
        "pulled": [
            run("compiled", export=export_of(weights_of(model, rank.device)), **settings)
            for export_of in (kept_export, partial(sharded_export, is_shared=True))
            for settings in PULLED_SETTINGS
        ],
        "moved": [
            run("compiled", export=export_of(weights_of(model, rank.device)), moves_after=2)
            for export_of in (kept_export, partial(sharded_export, is_shared=True))
        ],
    }


def sharded_replicas(rank: TrainerRank, model: str, folder: str) -> dict[str, Any]:
    """Shards over all ranks, and engines that each read all of every weight."""
    run = partial(_run_syncs, rank, Path(model), Path(folder) / f"replica{rank.replica}")
    weights = weights_of(Path(model), rank.device)
    sharded = [
        run("compiled", export=sharded_export(weights), **settings) for settings in SHARDED_SETTINGS
    ]
    pulled = run("compiled", export=sharded_export(weights, is_shared=True))
    return {"eager": run("flattened"), "sharded": sharded, "pulled": pulled}


def _run_syncs(
    rank: TrainerRank,
    model: Path,
    folder: Path,
    mode: str,
    export: Any = None,
    moves_after: int = -1,
    fails_before: int = -1,
    **settings: Any,
) -> list[Any]:
    """(the engine's hashes, the report) of each sync, with other weights every time."""
    manager, seen = rank.manager(mode, **settings), []
    for scale in SCALES:
        weights = weights_of(model, rank.device, scale=scale)
        if export is not None:
            if len(seen) == moves_after and rank.rank == rank.tp - 1:
                move_one(export.sources())
            for name, tensor in weights:
                write_values(export.sources()[name], tensor)
            weights = export
        if len(seen) == fails_before:
            _fail_on_the_last_rank(rank, manager, weights)
        seen.append(sync_asleep(rank, manager, weights, str(scale), folder))
    return seen


def sync_asleep(
    rank: TrainerRank, manager: Any, weights: Any, version: str, folder: Path
) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """(the engine's hashes, the report) of a sync between a release and the end of the wake-up."""
    asyncio.run(manager.release())
    asyncio.run(manager.resume(("weights",)))
    asyncio.run(manager.sync(weights, version=version))
    report = asdict(manager.report)
    asyncio.run(manager.resume(("kv_cache",)))
    return engine_hashes(rank, folder), report


def sharded_export(weights: NamedTensors, *, is_shared: bool = False) -> Any:
    """The tensors in shards on all ranks, gathered at every export, as FSDP2's are.

    Args:
        weights: the full tensors.
        is_shared: on a CPU, in memory that other processes can map, as a GPU's always is.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from verl_sglang_sync.sources.reexport import Reexport

    mesh = init_device_mesh(weights[0][1].device.type, (torch.distributed.get_world_size(),))
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in weights}
    if is_shared and weights[0][1].device.type == "cpu":
        for shard in state.values():
            shard.to_local().untyped_storage().share_memory_()
    return Reexport(
        lambda: ((name, shard.full_tensor()) for name, shard in state.items()),
        sources=lambda: state,
    )


def kept_export(weights: NamedTensors) -> Any:
    """Full tensors that the trainer keeps, exported as they are."""
    from verl_sglang_sync.sources.reexport import Reexport

    state = dict(in_storages_of_their_own(weights))
    return Reexport(lambda: iter(state.items()), sources=lambda: state)


def move_one(state: dict[str, torch.Tensor]) -> None:
    """Put one tensor elsewhere; what is where it was is wrong from now on."""
    name = "model.norm.weight"
    old, state[name] = state[name], state[name].clone()
    if old.device.type == "cpu":
        moved: Any = state[name]
        local = moved.to_local() if hasattr(moved, "to_local") else moved
        local.untyped_storage().share_memory_()
    old.fill_(7)


def write_values(shard: Any, tensor: torch.Tensor) -> None:
    """Other values, in place, as an optimizer does."""
    if not hasattr(shard, "device_mesh"):
        shard.copy_(tensor)
        return
    rows = tensor.chunk(shard.device_mesh.size())
    rank = shard.device_mesh.get_local_rank()
    if rank < len(rows):
        shard.to_local().copy_(rows[rank])


def in_storages_of_their_own(weights: NamedTensors) -> NamedTensors:
    """The same tensors, each in memory of its own that other processes can map."""
    own = [(name, tensor.clone()) for name, tensor in weights]
    for _, tensor in own:
        if tensor.device.type == "cpu":
            tensor.share_memory_()
    return own


def _failing_sync(rank: TrainerRank, mode: str, weights: NamedTensors) -> str:
    """Send one tensor of twice its size; return the error."""
    from verl_sglang_sync import WeightSyncError

    bad = [
        (name, torch.cat([tensor, tensor]) if name == "model.norm.weight" else tensor)
        for name, tensor in weights
    ]
    try:
        asyncio.run(rank.manager(mode, manifest_check="off").sync(iter(bad), version="bad"))
    except WeightSyncError as error:
        return str(error)
    return "no error"


def _fail_on_the_last_rank(rank: TrainerRank, manager: Any, weights: Any) -> None:
    """A sync whose last bucket does not leave one rank."""
    from verl_sglang_sync import WeightSyncError
    from verl_sglang_sync.engine.session import TrainerSession

    finish = MagicMock(side_effect=MemoryError("nothing is left"))
    if rank.rank != rank.tp - 1:
        finish = TrainerSession.finish
    with patch.object(TrainerSession, "finish", finish):
        try:
            asyncio.run(manager.sync(weights, version="failed"))
        except WeightSyncError as error:
            assert "nothing is left" in str(error)
            return
    raise AssertionError("the sync did not fail")


def _repeated_stages(rank: TrainerRank) -> str:
    """Release what is released and resume what is resident."""
    manager = rank.manager("flattened")
    for _ in range(2):
        asyncio.run(manager.release())
    for _ in range(2):
        asyncio.run(manager.resume(("weights",)))
        asyncio.run(manager.resume(("kv_cache",)))
    return "ok"


def broken_sync(rank: TrainerRank, model: str) -> str:
    """A sync that fails when some tensors are loaded; the error."""
    return _failing_sync(rank, "flattened", weights_of(Path(model), rank.device))


def sync_weights(rank: TrainerRank, model: str, mode: str = "flattened") -> str:
    """Send the checkpoint's own weights, without any stage."""
    named = weights_of(Path(model), rank.device)
    asyncio.run(rank.manager(mode).sync(named, version="synced"))
    return "ok"
