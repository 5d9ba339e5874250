"""What trainer ranks do in the GPU tests alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from contract.tiny_architectures import random_weights, read_checkpoint
from support.cycle_models import checkpoint_weights
from support.engine_steps import Sync, sync_asleep
from support.fp8_models import case_of, quantizer
from support.http_requests import generate
from support.trainer import TrainerRank

REBALANCED = "[EPLBManager] rebalance end"
MODEL = "qwen3-moe"


def around_a_remap(rank: TrainerRank, num_tokens: int) -> dict[str, list[Sync]]:
    """Syncs before and after the rebalancing that comes with so many tokens."""
    first = checkpoint_weights(MODEL, rank.folder / "model", rank.device)
    second = [(name, tensor * 0.5) for name, tensor in first]

    def sync(mode: str, *weights: Any) -> list[Sync]:
        manager = rank.manager(mode)
        return [sync_asleep(rank, manager, named, "other") for named in weights]

    seen = {"learned": sync("compiled", first, second, first)}
    if rank.is_leader:
        generate(rank.url, num_tokens)
        log, deadline = rank.folder / "server.log", time.monotonic() + 30
        while REBALANCED not in log.read_text(errors="replace"):
            assert time.monotonic() < deadline, "the engine did not rebalance its experts"
            time.sleep(0.2)
    seen["remapped"] = sync("compiled", first, second, first)
    seen["eager"] = sync("flattened", second, first)
    return seen


SEEDS = (1, 2, 3, 4)
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("flattened", {}),
    ("bucketed", {}),
    ("compiled", {}),
    ("compiled", {"recheck_every_n_syncs": 2, "keep_staging_buffers": True}),
)


def quantized_syncs(rank: TrainerRank, name: str) -> list[list[Sync]]:
    """Syncs of other weights every time, quantised by verl, for each of `WAYS`."""
    from verl_sglang_sync.sources.export import Reexport, transformed
    from verl_sglang_sync.verl.engine_format import quantized

    checkpoint = read_checkpoint(case_of(name), rank.folder / "model")
    quantize = partial(quantized, quantizer=quantizer(), dtype=torch.bfloat16)

    def export(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        for key, tensor in random_weights(checkpoint, seed):
            yield key, tensor.to(rank.device, torch.bfloat16)

    def syncs(mode: str, settings: dict[str, Any]) -> list[Sync]:
        manager, seen = rank.manager(mode, **settings), []
        for seed in SEEDS:
            weights = transformed(Reexport(partial(export, seed)), quantize, computes=True)
            seen.append(sync_asleep(rank, manager, weights, str(seed)))
        return seen

    return [syncs(mode, settings) for mode, settings in WAYS]
