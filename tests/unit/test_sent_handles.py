"""The references of GPU memory that engines were given, when an engine dies or fails early.

A file with counters as torch has them stands for a GPU's: 1 until a handle's receiver drops it.
"""

import os
import signal
import struct
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import zmq

from sglang_loader.common import shared_memory
from sglang_loader.common.session import messages
from sglang_loader.common.session.channel import engine_end
from sglang_loader.common.shared_memory import CudaHandle, drop_references
from support.settings import settings_of
from verl_sglang_sync.engine.session import (
    BlockNotMapped,
    SentHandles,
    SessionSockets,
    TrainerSession,
)
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.sources.memory_blocks import BlockNames
from verl_sglang_sync.sync.sessions import Sessions
from verl_sglang_sync.trainer_ranks import TrainerRanks

NUM = 6
SETTINGS = settings_of("compiled", request_timeout_s=10)


@pytest.fixture
def counters(tmp_path, monkeypatch):
    """A function that reads all counters."""
    file = tmp_path / "torch_counters"
    file.write_bytes(bytes(shared_memory.HEADER_NBYTES) + struct.pack(f"{NUM}Q", *[1] * NUM))
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)

    def read():
        return list(struct.unpack_from(f"{NUM}Q", file.read_bytes(), shared_memory.HEADER_NBYTES))

    return read


def handle(number, file="/torch_counters"):
    return CudaHandle(
        nbytes=64,
        gpu="GPU-0",
        allocation=b"",
        offset=0,
        counter_file=file,
        counter_offset=number,
        event=b"",
        event_sync_required=False,
    )


ELSEWHERE = handle(0, "/torch_of_another_host")


def test_only_the_counters_of_the_handles_are_cleared(counters):
    assert drop_references([handle(1), handle(4), ELSEWHERE]) == [ELSEWHERE]
    assert counters() == [1, 0, 1, 1, 0, 1]


class Trainer:
    """Sessions with one engine rank, whose end of the socket is in this process, too."""

    def __init__(self):
        self.sockets, self.sent, self.number = SessionSockets(), SentHandles(), 0

    def session(self, mapped, blocks, *, keep, ends="well", joins=True):
        """One session in which new handles of `blocks` are sent to an engine that maps `mapped`."""
        opened = TrainerSession(self.sockets, SETTINGS, BlockNames(), self.sent)
        session = messages.decode_descriptor(opened.descriptor)
        engine = engine_end(session.endpoint)
        engine.begin(session.token, timeout_s=10)
        try:
            with opened:
                if joins:
                    engine.send(
                        messages.Hello,
                        buffers=list(mapped),
                        stored=[],
                        plan="",
                        wants_proof=False,
                    )
                    assert opened.accept(Mock(), wait_s=5)
                handles = {}
                for block in blocks:
                    handles[block], self.number = handle(self.number), self.number + 1
                opened.map_blocks(blocks, handles, keep=keep)
                if "committed" in ends:
                    opened.commit(Mock(), is_last=True)
                if "gone" in ends:
                    engine.close()
                    while not opened._channel.is_peer_gone:
                        pass
                if ends != "well":
                    raise RuntimeError(ends)
        except RuntimeError as error:
            assert str(error) == ends
        finally:
            engine.close()
        return opened


def leave(spare):
    with engine_end(spare.endpoint):
        pass
    while not spare.is_peer_gone:
        pass


def stay(spare):
    """A peer that says nothing, for as long as the process lives."""
    staying.append(engine_end(spare.endpoint))
    while spare.is_untouched:
        pass


staying = []


def close_in_a_fork(spare):
    """The child's copies are closed, and the parent's socket stays where it is."""
    if (child := os.fork()) == 0:
        spare.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert spare.is_untouched


CHANGES = {
    "nothing": lambda spare: None,
    "a child is forked, which would listen": close_in_a_fork,
    "a cleaner removes it": lambda spare: Path(spare.endpoint.removeprefix("ipc://")).unlink(),
    "somebody was there": leave,
    "somebody is there": stay,
    "its context is destroyed": lambda spare: zmq.Context.instance().destroy(linger=0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_socket_is_prepared(change):
    sockets = SessionSockets()
    sockets.prepare()
    spare = sockets._spare
    sockets.prepare()
    assert sockets._spare is spare
    CHANGES[change](spare)
    with sockets.open() as opened, engine_end(opened.endpoint):
        assert (opened is spare) == (change == "nothing")
    assert sockets._spare is None


def test_a_forked_child_opens_its_own_socket():
    sockets = SessionSockets()
    sockets.prepare()
    spare = sockets._spare
    if (child := os.fork()) == 0:
        signal.alarm(10)  # a socket of the parent may never answer here
        os._exit(sockets.open() is spare)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("keep", [False, True])
def test_mapped_blocks_are_announced_as_others(keep):
    """Without a handle for any of them, as in most syncs."""
    announced = []
    for mapped, handles in (("abc", {}), ("ab", {"c": handle(0)})):
        with TrainerSession(SessionSockets(), SETTINGS, BlockNames()) as session:
            session._mapped = set(mapped)
            session.map_blocks("abc", handles, keep=keep)
            announced.append([(each.slot, each.name, each.keep) for each in session._unsent])
            assert session._slots == {"a": 0, "b": 1, "c": 2}
            assert session._kept == set("abc" if keep else "")
    assert announced[0] == announced[1]
    session = TrainerSession(SessionSockets(), SETTINGS, BlockNames())
    with session, pytest.raises(BlockNotMapped, match="block c"):
        session._mapped = set("ab")
        session.map_blocks("abc", {}, keep=keep)


def test_what_a_dead_engine_was_given_is_dropped(counters):
    trainer = Trainer()
    trainer.session([], ["a", "b"], keep=True)
    assert counters() == [1] * NUM, "the engine holds them"
    trainer.session(["a", "b"], ["a", "b", "c"], keep=False, ends="gone")
    assert counters() == [0, 0, 0, 0, 0, 1]


def test_another_engine_in_its_place_holds_nothing(counters):
    trainer = Trainer()
    trainer.session([], ["a", "b"], keep=True)
    trainer.session([], [], keep=True)
    assert counters() == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("ends", ["failed", "committed, gone"])
def test_an_engine_reports_held_memory_first(ends, counters):
    """A reference that is dropped twice would keep the memory for good."""
    trainer = Trainer()
    trainer.session([], ["a", "b"], keep=True, ends=ends)
    assert counters() == [1] * NUM
    trainer.session(["b"], [], keep=True)
    assert counters() == [0, 1, 1, 1, 1, 1]


def test_an_engine_drops_unneeded_memory_itself(counters):
    trainer = Trainer()
    trainer.session([], ["a"], keep=True)
    trainer.session(["a"], ["b"], keep=False)
    trainer.session([], [], keep=False, ends="gone")
    assert counters() == [1] * NUM


@pytest.mark.parametrize("ends", ["well", "gone"])
def test_handles_of_other_hosts_are_reported_once(ends, counters):
    trainer = Trainer()
    trainer.session([], ["a"], keep=True)
    trainer.sent.add("b", ELSEWHERE)
    if ends == "gone":
        trainer.session(["a", "b"], [], keep=True, ends="gone")
    assert trainer.session([], [], keep=True).dropped_elsewhere == [ELSEWHERE]
    assert counters()[0] == 0
    assert not trainer.session([], [], keep=True).dropped_elsewhere


class Beside(TrainerRanks):
    """With the rank of another host that has the sessions, and says what its engines dropped."""

    def _exchange(self, turn):
        dropped = [handle(1, f"/torch_{os.getpid()}_1"), handle(2, "/torch_1_1")]
        return [turn, replace(turn, item=(False, True, dropped))]


def test_a_rank_drops_its_own_handles_alone(counters, tmp_path):
    for name in (f"torch_{os.getpid()}_1", "torch_1_1"):
        (tmp_path / name).write_bytes((tmp_path / "torch_counters").read_bytes())
    sessions = Sessions(Beside(), SETTINGS, SyncReport(mode="compiled", replica=0))
    sessions.wait_joined(can_prove=True)
    own, others = (
        struct.unpack_from(f"{NUM}Q", (tmp_path / name).read_bytes(), shared_memory.HEADER_NBYTES)
        for name in (f"torch_{os.getpid()}_1", "torch_1_1")
    )
    assert own == (1, 0, 1, 1, 1, 1) and others == (1,) * NUM
