"""What the Megatron trainer ranks of `test_megatron_weights` do, in one process start per world."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch

from support.assembled import misplaced
from support.broadcast_steps import Sender
from support.engine_steps import MODES
from support.megatron_trainer import Layout, MegatronActor
from support.trainer import TrainerRank, engine_hashes

LOST = "model.layers.1.self_attn.o_proj.weight"
ALTERED = "model.layers.0.post_attention_layernorm.weight"
NamedTensor = tuple[str, torch.Tensor]


FACTORS = {"bucketed": (0.5, 2.0), "flattened": (0.5, 2.0), "compiled": (0.5, 2.0, 0.5, 2.0)}
"""By mode: what training does to the weights before each sync; in the end they are as before."""


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
        "names": [name for name, _ in exported],
        "checkpoint": sorted(reference),
        "different": [
            name
            for name, tensor in exported
            if tensor.dtype != reference[name].dtype or not torch.equal(tensor, reference[name])
        ],
    }


def exercise_engine(
    rank: TrainerRank,
    folder: str,
    model: str,
    layout: dict[str, int],
    others: list[Any],
    urls: list[str],
) -> dict[str, Any]:
    """Train away and back in every mode, offloading in between, and once more as if the engines
    were elsewhere; then lose and alter a tensor.

    Args:
        rank: this one.
        folder: for hashes.
        model: checkpoint that the engines serve.
        layout: of the trainer.
        others: further `[model, layout]` whose export alone is compared with the checkpoint.
        urls: of all replicas' servers.
    """
    shape = msgspec.convert(layout, Layout)
    actor = MegatronActor(Path(model), shape)
    hash_folder = Path(folder, f"replica{rank.replica}")
    hash_folder.mkdir(exist_ok=True)
    seen: dict[str, Any] = {
        "export": compared(rank, actor, Path(model)),
        "reference": engine_hashes(rank, hash_folder),
    }
    for mode in MODES:
        manager, syncs = rank.manager(mode), []
        for factor in FACTORS[mode]:
            actor.train(factor)
            asyncio.run(manager.release())
            asyncio.run(manager.resume(("weights",)))
            asyncio.run(manager.sync(actor.export(), version=mode))
            report = asdict(manager.report)
            left = actor.offload() if shape.offload else None
            asyncio.run(manager.resume(("kv_cache",)))
            syncs.append((engine_hashes(rank, hash_folder), report, left))
        seen[mode] = syncs
    sender, seen["disaggregated"] = Sender(rank, [(url, rank.tp) for url in urls]), []
    for factor in FACTORS["compiled"]:
        actor.train(factor)
        report = sender.sync(actor.export(), "compiled", range(len(urls)))
        if shape.offload:
            actor.offload()
        seen["disaggregated"].append((sender.hashes(), report))
    sender.close()
    actor.train(0.5)
    blind = rank.manager("flattened", manifest_check="off")
    asyncio.run(blind.sync(without(LOST, actor.export()), version="lost"))
    seen["lost"] = engine_hashes(rank, hash_folder)
    actor.train(2.0)
    asyncio.run(rank.manager("bucketed").sync(altered(ALTERED, actor.export()), version="altered"))
    seen["altered"] = engine_hashes(rank, hash_folder)
    seen["others"] = []
    for other, other_layout in others:
        actor.close()
        actor = MegatronActor(Path(other), msgspec.convert(other_layout, Layout))
        seen["others"].append(compared(rank, actor, Path(other)))
    return seen


def without(lost: str, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """All tensors but one."""
    return ((name, tensor) for name, tensor in weights if name != lost)


def altered(name: str, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """One tensor with another first element."""
    for other, tensor in weights:
        if other == name:
            tensor = tensor.detach().clone()
            tensor.view(-1)[0] += 1
        yield other, tensor
