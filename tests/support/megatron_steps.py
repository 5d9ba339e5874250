"""What the Megatron trainer ranks of `test_megatron_weights` do, in one process start per world."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from support.assembled import misplaced
from support.broadcast_steps import Sender, Targets
from support.megatron_trainer import Layout, MegatronActor
from support.trainer import TrainerRank, engine_hashes
from verl_sglang_sync.sources.transfer_plan import Owners

LOST = "model.layers.1.self_attn.o_proj.weight"
ALTERED = "model.layers.0.post_attention_layernorm.weight"
NamedTensor = tuple[str, torch.Tensor]


FACTORS = {
    "bucketed": (0.5, 2.0),
    "flattened": (0.5, 2.0),
    "compiled": (0.5, 2.0, 0.5, 2.0),
    "disaggregated": (0.5, 2.0, 0.5, 2.0),
    "disaggregated, in place": (0.5, 2.0),
}
"""By preset: what training does to the weights before each sync; in the end they are as before."""


def presets_of(layout: Layout, *, is_first: bool) -> list[str]:
    """With mbridge, engines elsewhere get what they get of any other export. What was offloaded is
    not in memory that other processes can map on a CPU. How an export is packed is the same for all
    trainers of a model: the first shows it.
    """
    left_out = [p for p in FACTORS if layout.mbridge and "disaggregated" in p]
    left_out += [] if is_first else ["bucketed", "flattened"]
    if layout.offload:
        left_out.append("disaggregated, in place")
    return [preset for preset in FACTORS if preset not in left_out]


def compared(rank: TrainerRank, actor: MegatronActor, model: Path) -> dict[str, Any]:
    """Bit for bit, tensors held to the end: the exporter must not reuse their memory.

    Also what a trace says of them; None where the export does not say what it reads.
    """
    from safetensors.torch import load_file

    from verl_sglang_sync.sources.source_map import SourceMap

    export, group = actor.export(), rank.group()
    exported = list(export)
    source_map = SourceMap(group, rank.device)
    off = source_map.trace(export)
    reference = load_file(model / "model.safetensors")
    return {
        "off": off,
        "misplaced": misplaced(export, source_map, group) if off is None else None,
        "num_served": num_served(source_map.traced.owners) if off is None else None,
        "num_storages": actor.num_storages,
        "names": [name for name, _ in exported],
        "checkpoint": sorted(reference),
        "different": [
            name
            for name, tensor in exported
            if tensor.dtype != reference[name].dtype or not torch.equal(tensor, reference[name])
        ],
    }


def num_served(parameters: Sequence[Owners]) -> list[int]:
    """By rank: how many shards it gives to how many readers, itself among them."""
    ranks = range(dist.get_world_size())
    served = Counter(
        owners.owner_of(shard, reader)
        for owners in parameters
        for shard in range(len(owners.starts))
        for reader in ranks
    )
    return [served[rank] for rank in ranks]


def exercise_engine(
    rank: TrainerRank,
    folder: str,
    model: str,
    trainers: dict[str, dict[str, Any]],
    targets: Targets,
) -> dict[str, Any]:
    """Every trainer trains away and back in every preset; the last loses and alters a tensor.

    Args:
        rank: this one.
        folder: for hashes.
        model: checkpoint that the engines serve.
        trainers: layouts by name.
        targets: the engines.
    """
    hash_folder = Path(folder, f"replica{rank.replica}")
    hash_folder.mkdir(exist_ok=True)
    seen: dict[str, Any] = {"reference": engine_hashes(rank, hash_folder), "trainers": {}}
    actor: MegatronActor | None = None
    for name, layout in trainers.items():
        if actor is not None:
            actor.close()
        actor = MegatronActor(Path(model), msgspec.convert(layout, Layout))
        found: dict[str, Any] = {"export": compared(rank, actor, Path(model))}
        for preset in presets_of(msgspec.convert(layout, Layout), is_first=not seen["trainers"]):
            sync, syncs = _sync_by(rank, preset, targets), []
            for factor in FACTORS[preset]:
                actor.train(factor)
                report, left = sync(actor)
                syncs.append((engine_hashes(rank, hash_folder), report, left))
                dist.barrier()  # an engine that is invited to the next sync answers no other rank
            found[preset] = syncs
        seen["trainers"][name] = found
    assert actor is not None
    actor.train(0.5)
    blind = rank.manager("flattened", manifest_check="off")
    asyncio.run(blind.sync(without(LOST, actor.export()), version="lost"))
    seen["lost"] = engine_hashes(rank, hash_folder)
    actor.train(2.0)
    asyncio.run(rank.manager("bucketed").sync(altered(ALTERED, actor.export()), version="altered"))
    seen["altered"] = engine_hashes(rank, hash_folder)
    return seen


Sync = Callable[[MegatronActor], tuple[dict[str, Any], int | None]]
"""Syncs an actor's weights; returns the report, and the bytes left where they were."""


def _sync_by(rank: TrainerRank, preset: str, targets: Targets) -> Sync:
    """One preset's syncs; the parameters are offloaded where the layout wants it."""
    if "disaggregated" in preset:
        sender = Sender(rank, targets, read_in_place="in place" in preset)
        return lambda actor: (sender.sync(actor.export(), "compiled"), actor.offload())
    manager = rank.manager(preset)

    def sync(actor: MegatronActor) -> tuple[dict[str, Any], int | None]:
        asyncio.run(manager.release())
        asyncio.run(manager.resume(("weights",)))
        asyncio.run(manager.sync(actor.export(), version=preset))
        report, left = asdict(manager.report), actor.offload()
        asyncio.run(manager.resume(("kv_cache",)))
        return report, left

    return sync


def without(lost: str, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    return ((name, tensor) for name, tensor in weights if name != lost)


def altered(name: str, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    for other, tensor in weights:
        if other == name:
            tensor = tensor.detach().clone()
            tensor.view(-1)[0] += 1
        yield other, tensor
