"""Nothing grows from sync to sync, by either wire of the copy table: files, threads, memory."""

import asyncio
from pathlib import Path

import psutil
import pytest

from support.exports import ShardedExport
from support.sender import Sender
from support.served import served
from support.storm_checks import shared_memory

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_EARLY, NUM_SYNCS = 100, 400
"""Routes are proven, memory is mapped and groups are formed in the first syncs."""

MAX_GROWN = 8
"""MB of each process's memory in the last 300 syncs, or files, threads and mappings. A connection
may be open at one count and closed at the other.
"""

STAGED = {"routes": ["exchange"]}
WIRES = {
    "mapped": (False, {}, "num_pulled"),
    "sent to a staging buffer": (False, STAGED, "num_exchanged"),
    "sent in a group with the engine": (True, STAGED, "num_sent"),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with served(tmp_path_factory.mktemp("growth"), tp=2, architecture="qwen3_moe") as engine:
        yield engine


@pytest.mark.parametrize("wire", WIRES)
def test_syncs_by_the_table_leave_nothing_behind(engine, wire):
    with engine.ranks() as ranks:
        pids = [engine.process.pid, *engine.schedulers]
        pids += [each.process.pid for each in ranks.processes]
        ranks.run(sync_often, wire, NUM_EARLY)
        early = held_by(pids)
        reports = ranks.run(sync_often, wire, NUM_SYNCS - NUM_EARLY)
        late = held_by(pids)
    route = WIRES[wire][2]
    assert all(report[route] == report["num_buckets"] > 1 for report in reports)
    print(f"{wire}: {early} after {NUM_EARLY} syncs, {late} after {NUM_SYNCS}")
    assert early.pop("shared") == late.pop("shared")
    for name, before in early.items():
        grown = [after - first for first, after in zip(before, late[name], strict=True)]
        assert max(grown) <= MAX_GROWN, (name, grown)


def sync_often(rank, wire, number):
    """Sync other values each time; the report of the last sync."""
    is_remote, settings, _ = WIRES[wire]
    if "sync" not in rank.kept:
        rank.kept["export"] = ShardedExport(rank.weights(), is_mappable=True)
        settings |= {"bucket_bytes": 32 << 10}
        rank.kept["sync"] = (
            Sender(rank, [(rank.url, rank.tp)], **settings)
            if is_remote
            else rank.manager("compiled", **settings)
        )
    sync, export = rank.kept["sync"], rank.kept["export"]
    values = [rank.weights(scale) for scale in (0.5, 1.0)]
    for index in range(number):
        export.write(values[index % 2])
        if is_remote:
            report = sync.sync(export.reexport(), "compiled")
            continue
        asyncio.run(sync.sync(export.reexport(), version=str(index)))
        report = {name: getattr(sync.report, name) for name in ("num_buckets", WIRES[wire][2])}
        asyncio.run(sync.resume(("kv_cache",)))  # it is resident
    return report


def held_by(pids):
    """What these processes hold, by process, and the files of shared memory on this machine."""
    processes = [psutil.Process(pid) for pid in pids]
    files = [path for path, pid in shared_memory().items() if pid in pids]
    return {
        "files": [each.num_fds() for each in processes],
        "threads": [each.num_threads() for each in processes],
        "mapped": [Path(f"/proc/{pid}/maps").read_text().count("/dev/shm") for pid in pids],
        "shared": len(files),
        "rss_mb": [each.memory_info().rss >> 20 for each in processes],
    }
