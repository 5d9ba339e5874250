"""What goes wrong with a session, done by real trainer ranks to a real engine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.arrangement import Arrangement, Read
from support.engine_steps import weights_of
from support.trainer import NamedTensors, TrainerRank, engine_hashes

DIES_AFTER = 6


def good_syncs(rank: TrainerRank, model: str, folder: str) -> dict[str, Any]:
    """Two compiled syncs of the checkpoint; returns hashes and seconds."""
    manager = rank.manager("compiled")
    started = time.monotonic()
    for _ in range(2):
        asyncio.run(manager.sync(weights_of(Path(model), rank.device), version="good"))
    return {
        "seconds": time.monotonic() - started,
        "num_replayed": manager.report.num_replayed,
        "hashes": engine_hashes(rank, Path(folder)),
    }


def faults_and_good_syncs(rank: TrainerRank, model: str, folder: str) -> dict[str, Any]:
    """Each fault that a trainer survives, followed by good syncs, in one trainer start."""
    seen: dict[str, Any] = {"arranged by something else": forged_arrangements(rank, model, folder)}
    for name, fault in (
        ("a rank that cannot pack", lambda: fail_on_one_rank(rank, model)),
        ("a wrong token", lambda: wrong_token(rank)),
    ):
        seen[name] = {"error": fault(), "good": good_syncs(rank, model, folder)}
    return seen


def die_mid_session(rank: TrainerRank, model: str) -> None:
    """All trainer ranks end without a word while buckets are under way."""

    def export(weights: NamedTensors) -> Iterator[Any]:
        for i, pair in enumerate(weights):
            if i == DIES_AFTER:
                os._exit(9)
            yield pair

    manager = rank.manager("compiled", bucket_bytes=1 << 10)
    asyncio.run(manager.sync(export(weights_of(Path(model), rank.device)), version="dead"))


def fail_on_one_rank(rank: TrainerRank, model: str) -> str:
    """The last rank cannot pack one tensor; returns the error that this rank raised."""
    from verl_sglang_sync import WeightSyncError

    weights = weights_of(Path(model), rank.device)
    if rank.rank == rank.tp - 1:
        name, tensor = weights[DIES_AFTER]
        weights[DIES_AFTER] = (name, tensor.to("meta"))
    try:
        manager = rank.manager("compiled", bucket_bytes=1 << 10)
        asyncio.run(manager.sync(weights, version="bad"))
    except WeightSyncError as error:
        return str(error)
    return "no error"


def wrong_token(rank: TrainerRank) -> str:
    """Invite the engine with a token that is not the session's; returns what came of it."""
    from verl_sglang_sync import WeightSyncError
    from verl_sglang_sync.engine.session import TrainerSession

    def forge(self: TrainerSession, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        invitation = msgspec.json.decode(self.invitation)
        self.invitation = msgspec.json.encode({**invitation, "token": "0" * 32})

    init = TrainerSession.__init__
    TrainerSession.__init__ = forge  # type: ignore[method-assign]
    try:
        manager = rank.manager("compiled", manifest_check="off")
        asyncio.run(manager.sync(_one_tensor(rank), version="forged"))
    except WeightSyncError as error:
        return str(error)
    finally:
        TrainerSession.__init__ = init  # type: ignore[method-assign]
    return "no error"


def forged_arrangements(rank: TrainerRank, model: str, folder: str) -> dict[str, Any]:
    """Send buckets arranged in a way that the engine does not hold, then go on as before."""
    from verl_sglang_sync import WeightSyncError
    from verl_sglang_sync.routes.arranged_sending import ArrangedSync, KnownArrangements

    manager = rank.manager("compiled", read_in_place=False)
    weights = weights_of(Path(model), rank.device)
    num_arranged = []

    def sync() -> None:
        asyncio.run(manager.sync(weights, version="good"))
        num_arranged.append(manager.report.num_arranged)

    for _ in range(2):
        sync()
    transport = manager._transport
    sent = [cut.bucket for cut in transport._stream.cuts]
    buckets = [(bucket.digest, _whole(bucket.layout)) for bucket in sent]
    transport._arrangements.known = KnownArrangements("0" * 64, tuple(buckets))
    keep_if_held = ArrangedSync.keep_if_held
    ArrangedSync.keep_if_held = lambda *_: None  # type: ignore[method-assign]
    error = "no error"
    try:
        sync()
    except WeightSyncError as raised:
        error = str(raised)
    finally:
        ArrangedSync.keep_if_held = keep_if_held  # type: ignore[method-assign]
    for _ in range(2):
        sync()
    return {
        "error": error,
        "num_arranged": num_arranged,
        "hashes": engine_hashes(rank, Path(folder)),
    }


def _whole(layout: BucketLayout) -> Arrangement:
    """An arrangement that is the bucket as it is."""
    reads = [Read(i, 0, (), t.nbytes, t.offset) for i, t in enumerate(layout.tensors) if t.nbytes]
    return Arrangement(tuple(reads), layout.nbytes)


def _one_tensor(rank: TrainerRank) -> NamedTensors:
    import torch

    return [("model.norm.weight", torch.ones(1, device=rank.device))]
