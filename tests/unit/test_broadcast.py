"""Broadcasts that end, never end or fail; groups that are joined and left; what a receiver gives
back, and what it refuses to receive.
"""

import json
import operator
import os
import socket
import threading
import weakref
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_loader.common.broadcast import broadcast, update_group
from sglang_loader.common.broadcast.broadcast import Broadcast, BroadcastError, Transfer
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.session import messages
from sglang_loader.common.session.messages import SessionError
from sglang_loader.hooks import update_groups as group_hooks
from sglang_loader.session import group_receiver
from sglang_loader.session.group_receiver import GroupReceiver
from unit.test_session_messages import DESCRIPTOR as OF_NO_GROUP

CPU = torch.device("cpu")
GROUP = SimpleNamespace(set_timeout=lambda limit: None)


class Work:
    """A broadcast as torch sees it."""

    def __init__(self, completed=False, error=None):
        self.completed, self.error = completed, error

    def is_completed(self):
        return self.completed

    def wait(self):
        if self.error:
            raise self.error


@pytest.fixture
def work(monkeypatch):
    """The work of every broadcast that is started."""
    found = Work()
    monkeypatch.setattr(update_group, "meet", lambda *_: None)
    monkeypatch.setattr(update_group, "_first_words", lambda *where: Transfer(found, where[-1]))
    monkeypatch.setattr(broadcast.dist, "broadcast", lambda *_args, **_kwargs: found)
    return found


def some_bytes(nbytes=8):
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_a_buffer_without_bytes_is_not_broadcast(work):
    assert Broadcast(some_bytes(0), GROUP).is_done()


def test_a_peer_that_is_gone_is_an_error(work):
    work.completed, work.error = True, RuntimeError("connection closed")
    with pytest.raises(BroadcastError, match="bucket 0 did not arrive: connection closed"):
        Broadcast(some_bytes(), GROUP).wait(1, "bucket 0")


@pytest.mark.parametrize("arrives", [True, False])
def test_on_a_gpu_only_events_show_arrival(work, monkeypatch, arrives):
    """torch's account of a failed NCCL communicator is "completed" although nothing came."""
    monkeypatch.setattr(broadcast, "GRACE_S", 0.01)
    started = Broadcast(some_bytes(), GROUP)
    started._event = SimpleNamespace(query=lambda: arrives)
    work.completed = True
    if arrives:
        started.wait(1, "it")
        return
    assert not started.is_done()
    with pytest.raises(BroadcastError, match="NCCL gave the transfer up"):
        started.wait(1, "it")


TWO = SimpleNamespace(size=lambda: 2)
EIGHT_BYTES = BucketLayout.pack([("t", (8,), torch.int8)])


def bucket(index, **changes):
    return messages.LoadBucket(
        **{"index": index, "buffers": [], "slot": 0, "layout": b"", **changes}
    )


def round_of(index, receives):
    return messages.LoadRound(index=index, buffers=[], slot=0, receives=receives)


@pytest.fixture
def receiver():
    return GroupReceiver()


def begin(receiver, num_buckets):
    receiver.begin_session(GROUP, None, CPU, 0.01)
    for i in range(num_buckets):
        receiver.begin_bucket(bucket(i), EIGHT_BYTES)


def test_a_receiver_still_waits_after_its_session_failed(work, receiver):
    """Else the group would be destroyed instead of aborted, and that waits for the broadcast."""
    begin(receiver, 1)
    with pytest.raises(BroadcastError, match="load 0 did not arrive: nothing within"):
        while not receiver.has_arrived():
            pass
    unsafe = receiver._buffers[0]
    receiver.release()
    assert receiver.is_waiting_in(GROUP)
    assert receiver._buffers[0] is not unsafe  # bytes may still come into it
    work.completed = True
    begin(receiver, 1)  # of another trainer
    assert receiver.has_arrived() and receiver._buffers[0].numel()
    receiver.drop_group(GROUP)
    assert not receiver.is_waiting_in(GROUP)


def test_buffers_live_as_long_as_the_group(work, receiver):
    work.completed = True
    begin(receiver, 2)
    sources = [receiver.source(bucket(i, layout=bytes([i])), 8) for i in range(2)]
    receiver.release()
    kept = list(receiver._buffers)
    begin(receiver, 2)
    assert all(map(operator.is_, receiver._buffers, kept))
    again = [receiver.source(bucket(i, layout=bytes([i])), 8) for i in range(2)]
    assert all(map(operator.is_, again, sources)), "what is bound to them is used again"
    ends = [weakref.finalize(source, lambda: None) for source in sources]
    del sources, again
    begin(receiver, 2)
    receiver.release()  # though all had come
    assert all(end.alive for end in ends)
    receiver.drop_group(GROUP)
    assert [buffer.numel() for buffer in receiver._buffers] == [0, 0]
    assert not any(end.alive for end in ends)


def test_a_round_of_other_engines_brings_nothing(receiver, monkeypatch):
    receiver.begin_session(GROUP, TWO, CPU, 1)
    sizes = []
    monkeypatch.setattr(group_receiver, "all_to_all", lambda *args: sizes.append(args[3]))
    empty = round_of(0, [0, 0])
    receiver.begin_round(empty)
    assert sizes == [[0, 0]] and receiver.has_arrived()
    assert receiver.buffer(empty).numel() == 0


MAPPED = messages.SharedBuffer(slot=0, name="b", handle=None, keep=False)


@pytest.mark.parametrize(
    ("senders", "receives", "problem"),
    [
        (None, None, "is not broadcast"),
        (None, [8, 0], "of 2 ranks, this engine is in none"),
        (TWO, [8, 0, 0], "of 3 ranks, .*in one of 2"),
    ],
)
def test_what_the_group_sends_not_is_refused(receiver, senders, receives, problem):
    receiver.begin_session(GROUP, senders, CPU, 1)
    with pytest.raises(SessionError, match=f"load 2 .*{problem}"):
        if receives is None:
            receiver.begin_bucket(bucket(2, buffers=[MAPPED]), EIGHT_BYTES)
        else:
            receiver.begin_round(round_of(2, receives))
    assert not receiver._incoming


SECRET = b"of the group"
DESCRIPTOR = messages.signed(
    msgspec.structs.replace(OF_NO_GROUP, endpoint="tcp://10.0.0.1:4567", group="weight_sync_a"),
    SECRET,
)


@given(place=st.integers(0, 10_000), other=st.characters(codec="utf-8"))
def test_an_invitation_that_was_changed_is_refused(place, other):
    text = messages.encode_descriptor(DESCRIPTOR).decode()
    messages.check_signature(messages.decode_descriptor(text.encode()), SECRET)
    with pytest.raises(SessionError, match="wrong signature"):
        messages.check_signature(DESCRIPTOR, b"another")
    place %= len(text)
    changed = (text[:place] + other + text[place + 1 :]).encode()
    if json_of(changed) == json_of(text.encode()):
        return
    with pytest.raises(SessionError):
        messages.check_signature(messages.decode_descriptor(changed), SECRET)


def json_of(data):
    try:
        return json.loads(data)
    except ValueError:
        return None


@pytest.fixture
def joined(monkeypatch):
    """A runner that is in the group of `DESCRIPTOR`."""
    runner = Runner()
    runner._model_update_group["weight_sync_a"] = GROUP
    monkeypatch.setitem(group_hooks._secrets, "weight_sync_a", SECRET)
    monkeypatch.setattr(group_hooks, "receiver", GroupReceiver())
    return runner


def test_a_session_is_served_only_in_its_group(work, joined):
    assert group_hooks.groups_of(joined, DESCRIPTOR) == [GROUP]
    elsewhere = msgspec.structs.replace(DESCRIPTOR, endpoint="tcp://10.6.6.6:1")
    with pytest.raises(
        SessionError, match="not the trainer's of that group, or was changed on its way"
    ):
        group_hooks.groups_of(joined, elsewhere)
    unknown = msgspec.structs.replace(DESCRIPTOR, group="weight_sync_b")
    with pytest.raises(SessionError, match="not in group 'weight_sync_b', but in: weight_sync_"):
        group_hooks.groups_of(joined, unknown)
    begin(group_hooks.receiver, 1)
    group_hooks.receiver.release()  # of a session that failed
    with pytest.raises(SessionError, match="is not used again: a sync in it has failed"):
        group_hooks.groups_of(joined, DESCRIPTOR)


class Runner:
    """SGLang's `ModelRunner`, as far as groups go."""

    def __init__(self):
        self.model = torch.nn.Linear(1, 1)
        self._model_update_group = {}


def join(runner, port):
    """Have the second rank of an engine join, as the hook does."""
    where = ("127.0.0.1", port, 1, 3, "weight_sync_a", "gloo")
    return group_hooks.join_group(None, runner, *where)


def test_a_group_whose_trainer_is_gone_is_refused(monkeypatch):
    monkeypatch.setattr(group_hooks, "tp_rank", lambda: 1)
    with socket.create_server(("127.0.0.1", 0)) as trainer:
        port = trainer.getsockname()[1]
    success, message = join(Runner(), port)
    assert not success
    assert "cannot join GroupPlace(name='weight_sync_a', address='127.0.0.1', port=" in message


@pytest.fixture
def left(monkeypatch):
    """Groups that were left, and whether as broken ones."""
    found = []
    monkeypatch.setattr(group_hooks, "leave", lambda group, broken: found.append((group, broken)))
    monkeypatch.setattr(group_hooks, "mark_left", lambda group: None)
    return found


@pytest.mark.parametrize("error", (None, RuntimeError("a rank is gone"), MemoryError("no room")))
def test_an_engine_joins_or_leaves_our_group(work, monkeypatch, error):
    def formed(store, rank, world_size, **_):
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        assert (rank, world_size) == (2, 3)
        return GROUP

    left = []
    monkeypatch.setattr("sglang.srt.utils.init_custom_process_group", formed)
    monkeypatch.setattr(update_group, "leave", lambda group, broken: left.append((group, broken)))
    monkeypatch.setattr(group_hooks, "secret_of", lambda group: SECRET)
    monkeypatch.setattr(group_hooks, "tp_rank", lambda: 1)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    work.completed, work.error = True, error
    runner = Runner()
    meeting = update_group.MeetingPoint("127.0.0.1", 3, 1, limit_s=60, transfer_s=60)
    success, message = join(runner, meeting.port)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    if error is None:
        assert success and runner._model_update_group == {"weight_sync_a": GROUP} and not left
    else:
        assert not success and str(error) in message
        assert left == [(GROUP, True)] and not runner._model_update_group


def test_a_group_without_a_secret_serves_no_session(monkeypatch, left):
    """Its store was closed between."""

    def closed(group):
        raise torch.distributed.DistNetworkError("closed")

    monkeypatch.setattr(group_hooks, "join", lambda *_: GROUP)
    monkeypatch.setattr(group_hooks, "secret_of", closed)
    monkeypatch.setattr(group_hooks, "_secrets", {})
    monkeypatch.setattr(group_hooks, "tp_rank", lambda: 1)
    runner = Runner()
    success, message = join(runner, 1)
    assert not success and "closed" in message
    with pytest.raises(SessionError, match="not in group 'weight_sync_a'"):
        group_hooks.groups_of(runner, DESCRIPTOR)
    assert group_hooks.leave_group(None, runner, "weight_sync_a")[0]
    assert left == [(GROUP, False)]


def test_other_groups_are_sglangs_own(work, left):
    runner = Runner()
    originals = []

    def original(*arguments):
        originals.append(arguments)
        return True, "stock"

    hooks = group_hooks
    joined = hooks.join_group(original, runner, "host", 1, 2, 3, "other", "gloo")
    assert (joined, hooks.leave_group(original, runner, "other")) == ((True, "stock"),) * 2
    assert originals == [(runner, "host", 1, 2, 3, "other", "gloo"), (runner, "other")]
    assert not left
    request = SimpleNamespace(group_name="other")
    assert hooks.refuse_in_our_groups(lambda *_: "stock", None, request) == "stock"
    request.group_name = "weight_sync_a"
    reply = hooks.refuse_in_our_groups(None, None, request)
    assert not reply.success
    assert "weight_sync_a is a group of verl-sglang-sync" in reply.message


@pytest.mark.parametrize("arrived", [True, False])
def test_a_group_aborts_only_with_outstanding_broadcasts(work, left, joined, arrived):
    receiver = group_hooks.receiver
    work.completed = arrived
    begin(receiver, 2)
    receiver.release()
    assert group_hooks.leave_group(None, joined, "weight_sync_a")[0]
    assert left == [(GROUP, not arrived)]
    assert not joined._model_update_group
    assert not receiver.is_waiting_in(GROUP)


def test_the_last_reference_ends_with_its_group(left, joined):
    """gloo waits for outstanding collectives when it is dropped: `leave` does that in a thread."""
    group = Runner()
    joined._model_update_group["weight_sync_a"] = group
    group_hooks.receiver.begin_session(group, group, CPU, 1.0)
    group_hooks.receiver.release()
    assert group_hooks.leave_group(None, joined, "weight_sync_a")[0]
    left.clear()
    gone = weakref.ref(group)
    del group
    assert gone() is None


def test_leaving_ends_though_a_peer_is_dead(monkeypatch, caplog):
    monkeypatch.setattr(update_group, "_leave_limit_s", lambda _: 0.05)
    never = threading.Event()
    update_group.abort(SimpleNamespace(abort=never.wait))
    never.set()
    assert "more than 0.05 s to abort the update group" in caplog.text


@pytest.mark.parametrize("value", [None, "1"])
def test_a_trainer_with_other_nccl_settings_is_refused(monkeypatch, value):
    from verl_sglang_sync.verl.checkpoint_engine import _check_nccl

    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    if value is not None:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", value)
    with pytest.raises(ValueError, match=f"NCCL_CUMEM_ENABLE={value!r}.*allowed: '0'"):
        _check_nccl(torch.device("cuda", 0))
    _check_nccl(CPU)
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    _check_nccl(torch.device("cuda", 0))
