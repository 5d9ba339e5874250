"""Exports of real Megatron trainers, beside the checkpoint that they have loaded."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tiny_assets import make_assets

from contract.tiny_architectures import read_checkpoint
from support import served_models
from support.assembled import misplaced
from support.megatron_trainer import Layout, MegatronActor
from verl_sglang_sync.sources.snapshot import sources_of
from verl_sglang_sync.sources.source_map import SourceMap

ROUTER_BIAS = "e_score_correction_bias"


def make_checkpoint(folder: Path, model: dict[str, Any] | str) -> Path:
    """A tiny model in bfloat16, which is what Megatron trains, but for the routers' biases; none of
    its tensors is zero, which training here would not change.
    """
    file = folder / "model" / "model.safetensors"
    if isinstance(model, str):
        served_models.make_model(model, folder / "model")
        named = dict(read_checkpoint(served_models.case_of(model), folder / "model"))
    else:
        make_assets(folder, **model)
        named = load_file(file)
    named = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in named.items()}
    for name, tensor in named.items():
        if name.endswith(ROUTER_BIAS):
            named[name] = torch.randn(tensor.shape)
        elif not tensor.any():
            named[name] = torch.randn(tensor.shape, dtype=torch.bfloat16)
    save_file(named, file, {"format": "pt"})
    return folder / "model"


def build(rank: Any, model: Path, layout: Layout) -> None:
    """Build a rank's actor, instead of the last one."""
    if "actor" in rank.kept:
        rank.kept["actor"].close()
    rank.kept["actor"] = MegatronActor(model, layout)


def export_of(rank: Any, model: Path) -> dict[str, Any]:
    """What a rank exports, tensors held to the end: the exporter must not reuse their memory.

    Returns:
        "names" of all tensors, as they come; "different": those that are not the checkpoint's, bit
        for bit; "off": why the export does not name what it reads, or None; else "misplaced": those
        that are not where the trace says, and "num_served": by rank, how many shards it gives to
        how many readers, itself among them; "num_storages": in how many pieces of memory the
        parameters lie.
    """
    actor, ranks = rank.kept["actor"], rank.ranks()
    export, reference = actor.export(), load_file(model / "model.safetensors")
    source_map, tensors = SourceMap(ranks, rank.device), iter(export)
    exported = [next(tensors)]
    sources = sources_of(export)
    if hasattr(sources, "trace_in_export"):
        source_map.trace_alone(export)  # while it is made
    exported += tensors
    off = source_map.trace(export)
    everyone, served = range(dist.get_world_size()), Counter[int]()
    for owners in source_map.traced.owners if off is None else ():
        for shard in range(len(owners.starts)):
            served.update(owners.owner_of(shard, reader) for reader in everyone)
    return {
        "names": [name for name, _ in exported],
        "different": [
            name
            for name, tensor in exported
            if tensor.dtype != reference[name].dtype or not torch.equal(tensor, reference[name])
        ],
        "off": off and off.text,
        "misplaced": misplaced(export, source_map, ranks) if off is None else [],
        "num_served": [served[rank] for rank in everyone],
        "num_storages": actor.num_storages,
    }
