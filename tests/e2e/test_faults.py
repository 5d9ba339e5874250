"""What befalls a sync is survived, or named on every rank, in bounded time; nothing is left of it.

The faults of the storm (`support.storm`) that must be known by their words, one at a time and at a
place of their own: a real TP 2 engine behind a proxy, and two real trainer ranks. What is served is
proven after each, and after the next sync, which must succeed. That nothing was applied twice or
skipped is counted by the engine's own ranks.
"""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from support.engine_loaders import COUNT_LOADER, FAIL_LOADER
from support.fault_proxy import Fault
from support.storm import Storm
from support.storm_trainer import PATIENT_S, TIMEOUT_S

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TP = 2
SLOW_S, CUT_S = 4.0, 0.5
PATH = "update_weights_from_tensor"
MARGIN_S = 8.0
"""For a machine that is busy, beyond each limit."""

presets = pytest.mark.parametrize("preset", ["flattened", "packed"])


@pytest.fixture(scope="module")
def module_storm(tmp_path_factory):
    folder = Path(os.path.realpath(tmp_path_factory.mktemp("f")))
    with Storm(folder, tp=TP, seed=0) as storm:
        yield storm
    assert not storm.findings, storm.findings


@pytest.fixture
def storm(module_storm):
    """Before a fault the engine serves what was synced; after it, too, and after another sync."""
    module_storm.good_sync(["flattened"])
    yield module_storm
    module_storm.proxy.plan(None)
    module_storm.check_served()
    module_storm.good_sync()


def num_loads(storm, slow_nth=0):
    """How many sessions each TP rank has loaded since the last call; a later one is slow."""
    order = {"folder": str(storm.folder), "nth": slow_nth, "seconds": SLOW_S}
    storm.engine.server.ask(COUNT_LOADER, json.dumps(order))
    files = [storm.folder / f"loads{rank}.json" for rank in range(TP)]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("kind", ["lose", "hold", "twice"])
@presets
def test_lost_replies_and_repeated_requests_publish_once(storm, preset, kind):
    num_loads(storm)
    storm.proxy.plan(Fault(kind, 1, TIMEOUT_S + 2 if kind == "hold" else 0.0))
    started = time.monotonic()
    storm.begin(preset=preset, via="proxy", limit_s=TIMEOUT_S if kind == "hold" else PATIENT_S)
    assert storm.finish(more_s=TIMEOUT_S) == [None] * TP
    seconds = time.monotonic() - started
    assert seconds < TIMEOUT_S + MARGIN_S
    assert storm.engine.served(limit_s=PATIENT_S) == str(storm.label)
    assert num_loads(storm) == [1] * TP  # the engine's own count
    assert {request["fault"] for request in storm.proxy.seen} == {kind}
    statuses = [request["status"] for request in storm.proxy.seen]
    assert statuses == ([200, 400] if kind == "twice" else [200])
    if kind == "twice":
        text = storm.proxy.seen[1]["text"]
        assert "the same request has come before: it is not executed again" in text
    if kind == "hold":  # the weights have arrived, only the reply has not
        synced_s = storm.trainer().run(lambda rank: rank.kept["synced_s"])
        assert max(synced_s) < TIMEOUT_S < seconds


@presets
def test_an_early_lost_reply_fails_every_rank(storm, preset):
    before = storm.engine.served(limit_s=PATIENT_S)
    num_loads(storm, slow_nth=1)
    storm.proxy.plan(Fault("cut", 1, CUT_S))
    storm.begin(preset=preset, via="proxy")
    for error in storm.finish():
        assert "ReplyLost: rank 0, replica 0: " in str(error)
        assert "not sent again, because it may have been executed" in str(error)
    assert num_loads(storm) == [0] * TP
    assert storm.engine.served(limit_s=PATIENT_S) == before
    assert [request["fault"] for request in storm.proxy.seen] == ["cut"]


@pytest.mark.parametrize(("preset", "victim"), [("flattened", 1), ("packed", 0)])
def test_a_killed_rank_is_named_in_time(storm, preset, victim):
    trainer = storm.begin(preset=preset, slow_s=0.1)
    time.sleep(1.0)
    trainer.kill(victim)
    died = time.monotonic()
    (error,) = storm.finish()
    assert re.search(rf"(?<!TP )\brank {victim}\b", str(error)), error
    assert time.monotonic() - died < TIMEOUT_S + MARGIN_S


@presets
@pytest.mark.parametrize("rank", [0, 1])
def test_a_tp_rank_fails_before_its_session(storm, preset, rank):
    """The others have joined theirs, and do not wait for it: the sync is made again."""
    storm.engine.server.ask(FAIL_LOADER, str(rank))
    started = time.monotonic()
    storm.begin(preset=preset, limit_s=PATIENT_S)
    assert storm.finish() == [None] * TP
    assert time.monotonic() - started < MARGIN_S
    assert storm.engine.served(limit_s=PATIENT_S) == str(storm.label)


def shared_by_trainers(temporary):
    """All trainers' sockets, and the memory that they handed to engines."""
    folders = set(temporary.glob("weight-sync-*"))
    names = (name for folder in folders for name in (folder / "shared-memory").read_text().split())
    memory = (Path("/dev/shm", name.lstrip("/")) for name in names)
    return folders | {path for path in memory if path.exists()}


def test_leftovers_of_killed_trainers_are_removed(storm):
    """And nothing of a trainer that lives: it can go on."""
    shared = []
    for number in (0, 1):
        for _ in range(3):  # a plan may take two syncs to hold
            storm.good_sync(["in_place"], number=number)
            storm.good_sync(["packed"], number=number)
        shared.append(shared_by_trainers(storm.temporary))
    dying = storm.begin(number=1, preset="packed", slow_s=0.1)
    time.sleep(1.0)
    lives, left = shared[0], shared_by_trainers(storm.temporary) - shared[0]
    dying.kill(*range(TP))
    assert storm.finish(number=1) == []
    assert any("weight-sync-" in path.name for path in left), "control"
    assert any("torch_" in path.name for path in left), "control"
    for _ in range(2):
        storm.good_sync(["packed"], number=2)
    wait_until(lambda: not any(path.exists() for path in left), 20)
    still = [path for path in sorted(left) if path.exists()]
    assert not still, f"nobody has removed what a killed trainer left: {still}"
    assert not [path for path in lives if not path.exists()], "taken from a trainer that lives"
    storm.good_sync(["in_place"])


def wait_until(holds, limit_s):
    deadline = time.monotonic() + limit_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.1)


def test_a_server_killed_between_buckets_is_named_everywhere(storm):
    storm.begin(preset="flattened", slow_s=0.1)
    time.sleep(1.0)
    os.killpg(storm.engine.pid, signal.SIGKILL)
    errors = storm.finish()
    storm.start_engine()
    named = "the engine's process is gone|rank 0, replica 0: http://"
    for error in errors:
        assert re.search(named, str(error)), error
