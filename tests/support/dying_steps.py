"""What the trainer ranks of `test_dead_trainers` do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from support.exports import KeptExport, calling_at
from support.trainer import TrainerRank, sync_error

DEAD_PEER_LIMIT_S = 5.0
HANGS_AFTER_S = 60.0
DIES_AT = 6
SHARED_MEMORY = Path("/dev/shm")


def good_syncs(rank: TrainerRank, mode: str) -> list[dict[str, Any]]:
    """Of the weights halved, and as they are: the error, the seconds, the engine's hashes."""
    seen = []
    for scale in (0.5, 1.0):
        weights, started = rank.weights(scale), time.monotonic()
        error = sync_error(rank.manager(mode), weights, f"{mode} {scale}")
        seconds = time.monotonic() - started
        seen.append({"error": error, "seconds": seconds, "hashes": rank.hashes()})
    return seen


def outlive_a_rank(rank: TrainerRank, mode: str, victim: int, file: str) -> None:
    """One rank is killed in its export; the other writes to `file` what it raised, and when.

    It writes and exits instead of returning: no process group can be left in order any more.
    """
    from verl_sglang_sync import WeightSyncError

    weights = rank.weights()
    assert sync_error(rank.manager(mode), weights, "good") is None
    rank.use_client(rank.url, timeout_s=DEAD_PEER_LIMIT_S)
    manager = rank.manager(mode, timeout_s=DEAD_PEER_LIMIT_S, bucket_bytes=1 << 12)
    died = rank.folder / f"{file}.died"

    def die() -> None:
        if rank.rank == victim:
            died.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def tell(kind: str, text: str) -> None:
        seen = {"kind": kind, "text": text, "seconds": time.time() - float(died.read_text())}
        (rank.folder / file).write_text(json.dumps(seen))
        os._exit(1)

    def watch() -> None:
        while not died.exists():
            time.sleep(0.1)
        time.sleep(HANGS_AFTER_S)
        tell("nothing", "the sync was still waiting")

    if rank.rank != victim:
        threading.Thread(target=watch, daemon=True).start()
    try:
        asyncio.run(manager.sync(calling_at(weights, DIES_AT, die), version="dead"))
    except WeightSyncError as error:
        tell("WeightSyncError", str(error))
    except Exception as error:
        tell(type(error).__name__, str(error))
    tell("nothing", "the sync returned")


def live_on(rank: TrainerRank, folder: str) -> dict[str, Any]:
    """Sync, tell what this process shares, and sync again when told to.

    `folder/live` gets the paths; the step goes on when `folder/go` is there.
    """
    export = KeptExport(rank.weights())
    manager = rank.manager("compiled", keep_staging_buffers=True)
    errors = [sync_error(manager, export.reexport(), "live") for _ in range(3)]
    if rank.is_leader:
        _tell_what_is_shared(Path(folder, "live"))
    deadline = time.monotonic() + 240
    while not Path(folder, "go").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    export.write(rank.weights(0.5))
    errors.append(sync_error(manager, export.reexport(), "live, again"))
    return {"errors": errors, "hashes": rank.hashes()}


def die_with_shared_memory(rank: TrainerRank, folder: str) -> None:
    """Good syncs, then SIGKILL in the middle of one; `folder/dead` gets what was shared then."""
    weights = rank.weights()
    staged = rank.manager("compiled", keep_staging_buffers=True, read_in_place=False)
    kept, in_place = KeptExport(weights).reexport(), rank.manager("compiled")
    # A plan may take two syncs to hold.
    for manager, export in ((in_place, kept), (staged, weights)):
        for _ in range(4):
            assert sync_error(manager, export, "dying") is None

    def die() -> None:
        if rank.is_leader:
            _tell_what_is_shared(Path(folder, "dead"))
        while not Path(folder, "dead").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(staged.sync(calling_at(weights, DIES_AT, die), version="dead"))


def _tell_what_is_shared(file: Path) -> None:
    """Write the paths of all trainers' sockets, and of the memory that they handed to engines."""
    folders = list(Path(tempfile.gettempdir()).glob("weight-sync-*"))
    names = (folder / "shared-memory" for folder in folders)
    memory = (SHARED_MEMORY / name.lstrip("/") for n in names for name in n.read_text().split())
    paths = [*folders, *(path for path in memory if path.exists())]
    file.with_suffix(".new").write_text(json.dumps(sorted(map(str, paths))))
    file.with_suffix(".new").rename(file)
