"""What trainer ranks do to a real engine, in one process start: syncs in every mode, and faults."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest.mock import MagicMock, patch

import msgspec
import torch

from support.exports import (
    NORM,
    KeptExport,
    ShardedExport,
    calling_at,
    doubled,
    on_meta,
)
from support.trainer import Hashes, NamedTensors, TrainerRank, read_hashes, sync_error

MODES = ("bucketed", "flattened", "compiled")
LOST = "model.layers.0.self_attn.k_proj.weight"
STRANGE = "model.layers.0.self_attn.of_another_model.weight"
DIES_AFTER = 6

Sync = tuple[Hashes, dict[str, Any]]
"""The engine's hashes after it, and its report."""


def exercise_engine(rank: TrainerRank) -> dict[str, Any]:
    """Sync away and back, fail, recover, and repeat stages, in all modes."""
    weights = {scale: rank.weights(scale) for scale in (0.5, 1.0)}
    seen: dict[str, Any] = {"reference": rank.hashes()}

    def cycle(mode: str, scale: float, version: str, **settings: Any) -> Hashes:
        manager = rank.manager(mode, **settings)
        return sync_asleep(rank, manager, weights[scale], version)[0]

    for mode in MODES:
        seen[mode] = {
            "changed": cycle(mode, 0.5, "half"),
            **_misfits(rank, mode, weights[1.0]),
            "restored": cycle(mode, 1.0, f"{mode}-back", bucket_bytes=1 << 20),
            "recovered": cycle(mode, 1.0, f"{mode}-again", multi_stage=False),
        }
    seen |= _warned(rank, weights[1.0])
    for stages in (("release",) * 2, ("weights", "kv_cache") * 2):  # released, and resident
        manager = rank.manager("flattened")
        for stage in stages:
            asyncio.run(manager.release() if stage == "release" else manager.resume((stage,)))
    return seen | {"syncs": syncs_in_a_row(rank)}


def _misfits(rank: TrainerRank, mode: str, good: NamedTensors) -> dict[str, Any]:
    """What the loader refuses, what it drops without a word, and good syncs between."""
    less = [(name, tensor) for name, tensor in good if name != LOST]
    dropped = [*less, (STRANGE, torch.ones(4, 4, device=good[0][1].device))]
    manager = rank.manager(mode)
    errors: dict[str, Any] = {"good": [sync_error(manager, good)]}
    for name, weights in (
        ("refused", doubled(good)),
        ("dropped", dropped),
        ("dropped again", dropped),
        ("one shot", iter(dropped)),
        ("less", less),
    ):
        by = rank.manager(mode) if name == "one shot" else manager
        errors[name] = sync_error(by, weights)
        if name in ("one shot", "less"):
            errors["good"] += [sync_error(manager, good), sync_error(manager, iter(good))]
    return errors


def _warned(rank: TrainerRank, good: NamedTensors) -> dict[str, Any]:
    """With `manifest_check="warn"`: errors of two syncs that lack a tensor, and what is logged."""
    said: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("verl_sglang_sync")
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    manager = rank.manager("flattened", manifest_check="warn")
    less = [(name, tensor) for name, tensor in good if name != LOST]
    logger.addHandler(handler)
    errors = [sync_error(manager, less) for _ in range(2)]
    logger.removeHandler(handler)
    assert sync_error(manager, good) is None
    return {"warned": errors, "said": [text for text in said if "manifest check" in text]}


SCALES = (0.5, 0.25, 2.0, 1.0)
STAGED: dict[str, Any] = {"read_in_place": False}
COMPILED_SETTINGS: tuple[dict[str, Any], ...] = (
    {**STAGED, "keep_staging_buffers": True},
    {**STAGED, "keep_staging_buffers": False},
    {**STAGED, "keep_staging_buffers": False, "recheck_every_n_syncs": 2},
)
PULLED_SETTINGS: tuple[dict[str, Any], ...] = ({}, {"recheck_every_n_syncs": 2})
SHARDED_SETTINGS: tuple[dict[str, Any], ...] = (
    {**STAGED, "keep_staging_buffers": True},
    {**STAGED, "recheck_every_n_syncs": 2},
)


def syncs_in_a_row(rank: TrainerRank) -> dict[str, Any]:
    """Other weights at every sync, by the eager loader and by each setting of the compiled one."""
    run = partial(_run_syncs, rank)
    compiled = partial(run, "compiled")
    kept = KeptExport, partial(ShardedExport, is_mappable=True)
    sharded, is_sharded = partial(compiled, ShardedExport), rank.tp > 1
    return {
        "eager": run("flattened"),
        "compiled": [compiled(**settings) for settings in COMPILED_SETTINGS],
        "sharded": [sharded(**settings) for settings in SHARDED_SETTINGS] if is_sharded else [],
        "exchanged after a failure": sharded(fails_before=2, **STAGED) if is_sharded else [],
        "pulled": [compiled(export, **settings) for export in kept for settings in PULLED_SETTINGS],
        "moved": [compiled(export, moves_after=2) for export in kept],
    }


def sharded_replicas(rank: TrainerRank) -> dict[str, Any]:
    """Shards over all ranks, and engines that each read all of every weight."""
    run = partial(_run_syncs, rank)
    return {
        "sharded": [run("compiled", ShardedExport, **settings) for settings in SHARDED_SETTINGS],
        "pulled": run("compiled", partial(ShardedExport, is_mappable=True)),
        "eager": run("flattened"),
    }


def _run_syncs(
    rank: TrainerRank,
    mode: str,
    export_of: Callable[[NamedTensors], KeptExport] | None = None,
    moves_after: int = -1,
    fails_before: int = -1,
    **settings: Any,
) -> list[Sync]:
    """Syncs of other weights every time, of plain lists or of an export that is kept."""
    manager, seen = rank.manager(mode, **settings), []
    export = None if export_of is None else export_of(rank.weights())
    for scale in SCALES:
        weights: Any = rank.weights(scale)
        if export is not None:
            if len(seen) == moves_after and rank.rank == rank.tp - 1:
                export.move(NORM)
            export.write(weights)
            weights = export.reexport()
        if len(seen) == fails_before:
            _fail_on_the_last_rank(rank, manager, weights)
        seen.append(sync_asleep(rank, manager, weights, str(scale)))
    return seen


def sync_asleep(rank: TrainerRank, manager: Any, weights: Any, version: str) -> Sync:
    """A sync between a release and the end of the wake-up."""
    report = report_of_cycle(manager, weights, version)
    return rank.hashes(), report


def report_of_cycle(manager: Any, weights: Any, version: str) -> dict[str, Any]:
    """The same, without a look at the engine's weights."""
    asyncio.run(manager.release())
    asyncio.run(manager.resume(("weights",)))
    asyncio.run(manager.sync(weights, version=version))
    report = asdict(manager.report)
    asyncio.run(manager.resume(("kv_cache",)))
    return report


def sync_away_and_back(rank: TrainerRank) -> list[Hashes]:
    """Hashes of all TP ranks' weights: at first, after a sync of others, and of the first again."""
    manager, seen = rank.manager("flattened"), []
    for scale in (None, 0.5, 1.0):
        if scale is not None:
            weights = rank.weights(scale)
            assert sync_error(manager, iter(weights), str(scale)) is None
        seen.append(hashes_of_hosts(rank))
    return seen


def hashes_of_hosts(rank: TrainerRank) -> Hashes:
    """Of an engine whose TP ranks are on the trainer ranks' hosts; collective.

    Each TP rank gets its tensor from the trainer rank of its host: they share no memory else.
    """
    from support.engine_loaders import HASH_LOADER
    from support.ipc import serialize_handles
    from verl_sglang_sync.engine.server_client import operations

    tensor, handles = torch.zeros(1), [b""] * rank.tp
    torch.distributed.all_gather_object(handles, serialize_handles([(str(rank.folder), tensor)]))
    if rank.is_leader:
        call = operations.update_weights(handles, load_format=HASH_LOADER)
        rank.client.submit(call).result()
    torch.distributed.barrier()
    return read_hashes(rank.folder, rank.tp)


def sync_weights(rank: TrainerRank, mode: str = "flattened") -> None:
    """Send the checkpoint's own weights, without any stage."""
    named = rank.weights()
    asyncio.run(rank.manager(mode).sync(named, version="synced"))


def broken_sync(rank: TrainerRank) -> str | None:
    """A sync that fails when some tensors are loaded; the error."""
    bad = iter(doubled(rank.weights()))
    return sync_error(rank.manager("flattened", manifest_check="off"), bad)


# Faults of a session.


def crash(rank: TrainerRank) -> None:
    """As native code crashes."""
    os.kill(os.getpid(), signal.SIGSEGV)


def die_mid_session(rank: TrainerRank) -> None:
    """All trainer ranks end without a word while buckets are under way."""
    export = calling_at(rank.weights(), DIES_AFTER, lambda: os._exit(9))
    manager = rank.manager("compiled", bucket_bytes=1 << 10)
    asyncio.run(manager.sync(export, version="dead"))


def good_syncs(rank: TrainerRank) -> dict[str, Any]:
    """Two compiled syncs of the checkpoint; returns hashes and seconds."""
    manager, started = rank.manager("compiled"), time.monotonic()
    for _ in range(2):
        asyncio.run(manager.sync(rank.weights(), version="good"))
    return {
        "seconds": time.monotonic() - started,
        "num_replayed": manager.report.num_replayed,
        "hashes": rank.hashes(),
    }


def faults_and_good_syncs(rank: TrainerRank) -> dict[str, Any]:
    """Each fault that a trainer survives, followed by good syncs, in one trainer start."""
    weights = rank.weights()
    unpackable = on_meta(weights, weights[DIES_AFTER][0]) if rank.rank == rank.tp - 1 else weights
    one = [(NORM, torch.ones(1, device=rank.device))]

    def sync(weights: NamedTensors, **settings: Any) -> str | None:
        return sync_error(rank.manager("compiled", **settings), weights)

    seen: dict[str, Any] = {}
    for name, fault in (
        ("a rank that cannot pack", lambda: sync(unpackable, bucket_bytes=1 << 10)),
        ("a wrong token", lambda: _with_a_wrong_token(lambda: sync(one, manifest_check="off"))),
    ):
        seen[name] = {"error": fault(), "good": good_syncs(rank)}
    return seen


def _fail_on_the_last_rank(rank: TrainerRank, manager: Any, weights: Any) -> None:
    """A sync whose last bucket does not leave one rank."""
    from verl_sglang_sync.engine.session import TrainerSession

    finish = MagicMock(side_effect=MemoryError("nothing is left"))
    if rank.rank != rank.tp - 1:
        finish = TrainerSession.finish
    with patch.object(TrainerSession, "finish", finish):
        assert "nothing is left" in (sync_error(manager, weights) or "")


def _with_a_wrong_token(sync: Callable[[], Any]) -> Any:
    """Invite the engine with a token that is not the session's."""
    from verl_sglang_sync.engine.session import TrainerSession

    def forge(self: TrainerSession, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        invitation = msgspec.json.decode(self.invitation)
        self.invitation = msgspec.json.encode({**invitation, "token": "0" * 32})

    init = TrainerSession.__init__
    with patch.object(TrainerSession, "__init__", forge):
        return sync()
