"""What the trainer ranks of `test_fp8_gpu` do: other weights at every sync, quantised by verl."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from contract.tiny_architectures import random_weights, read_checkpoint
from support.engine_steps import sync_asleep
from support.fp8_models import case_of, quantizer
from support.trainer import TrainerRank

SEEDS = (1, 2, 3, 4)
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("flattened", {}),
    ("bucketed", {}),
    ("compiled", {}),
    ("compiled", {"recheck_every_n_syncs": 2, "keep_staging_buffers": True}),
)


def quantized_syncs(rank: TrainerRank, name: str, model: str, folder: str) -> list[Any]:
    """(the engine's hashes, the report) of each sync, for each of `WAYS`."""
    from verl_sglang_sync.sources.reexport import Reexport, transformed
    from verl_sglang_sync.verl.quantized_export import quantized

    checkpoint = read_checkpoint(case_of(name), Path(model))
    quantize = partial(quantized, quantizer=quantizer(), dtype=torch.bfloat16)

    def export(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        for key, tensor in random_weights(checkpoint, seed):
            yield key, tensor.to(rank.device, torch.bfloat16)

    def syncs(mode: str, settings: dict[str, Any]) -> list[Any]:
        manager, seen = rank.manager(mode, **settings), []
        for seed in SEEDS:
            weights = transformed(Reexport(partial(export, seed)), quantize, computes=True)
            seen.append(sync_asleep(rank, manager, weights, str(seed), Path(folder)))
        return seen

    return [syncs(mode, settings) for mode, settings in WAYS]
