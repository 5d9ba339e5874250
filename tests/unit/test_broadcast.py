"""Broadcasts that end, never end or fail; when they begin; what a receiver gives back."""

import os
import socket
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_loader.common.broadcast import broadcast, update_group
from sglang_loader.common.broadcast.broadcast import Broadcast, BroadcastError
from sglang_loader.common.broadcast.messages import BroadcastBucket, decode_bucket, encode_bucket
from sglang_loader.common.check_remarks import with_remark
from sglang_loader.common.layout import BucketLayout, BucketTensor, WireError, encode_layout
from sglang_loader.common.session.messages import SESSION_VERSION, SessionError
from sglang_loader.hooks import weights as weight_updater_hooks
from sglang_loader.session.broadcast_receiver import BroadcastReceiver
from support.settings import settings_of
from verl_sglang_sync import WeightSyncError
from verl_sglang_sync.collective import SingleProcess
from verl_sglang_sync.engine import update_groups
from verl_sglang_sync.engine.update_groups import Replica, UpdateGroup, UpdateGroups
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes import broadcast as broadcast_transport
from verl_sglang_sync.routes.broadcast import BroadcastTransport

CPU = torch.device("cpu")
GROUP = object()


class Work:
    """A broadcast as torch sees it."""

    def __init__(self, completed=False, error=None):
        self.completed, self.error = completed, error

    def is_completed(self):
        return self.completed

    def wait(self):
        if self.error:
            raise RuntimeError(self.error)


@pytest.fixture
def work(monkeypatch):
    """The work of every broadcast that is started."""
    found = Work()
    monkeypatch.setattr(update_group, "_meet", lambda _group: None)
    monkeypatch.setattr(broadcast.dist, "broadcast", lambda *_args, **_kwargs: found)
    return found


def some_bytes(nbytes=8):
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_a_broadcast_is_done_when_its_work_is(work):
    started = Broadcast(some_bytes(), GROUP)
    assert not started.is_done()
    work.completed = True
    assert started.is_done()
    started.wait(0, "it")


def test_a_buffer_without_bytes_is_not_broadcast(work):
    assert Broadcast(some_bytes(0), GROUP).is_done()


def test_a_broadcast_that_never_ends_is_given_up(work):
    with pytest.raises(BroadcastError, match="bucket 3 did not arrive: nothing within"):
        Broadcast(some_bytes(), GROUP).wait(0.01, "bucket 3")


def test_a_peer_that_is_gone_is_an_error(work):
    work.completed, work.error = True, "connection closed"
    with pytest.raises(BroadcastError, match="bucket 0 did not arrive: connection closed"):
        Broadcast(some_bytes(), GROUP).wait(1, "bucket 0")


@pytest.mark.parametrize("arrives", [True, False])
def test_on_a_gpu_only_the_event_says_that_the_bytes_are_there(work, monkeypatch, arrives):
    """torch's account of a failed NCCL communicator is "completed" although nothing came."""
    monkeypatch.setattr(broadcast, "GRACE_S", 0.01)
    started = Broadcast(some_bytes(), GROUP)
    started._event = SimpleNamespace(query=lambda: arrives)
    work.completed = True
    if arrives:
        started.wait(1, "it")
        return
    assert not started.is_done()
    with pytest.raises(BroadcastError, match="NCCL gave the broadcast up"):
        started.wait(1, "it")


EIGHT_BYTES = BucketLayout((BucketTensor("t", (8,), torch.int8, 0),), 8)


def bucket(index, *, last=False, next_nbytes=8, **changes):
    fields = {
        "sync_id": "s",
        "index": index,
        "is_last": last,
        "num_tensors": index + 1,
        "encoded_layout": encode_layout(EIGHT_BYTES),
        "next_nbytes": 0 if last else next_nbytes,
        "timeout_s": 0.01,
    }
    return BroadcastBucket(**{**fields, **changes})


def test_a_receiver_knows_which_group_it_waits_in(work):
    receiver, other = BroadcastReceiver(), object()
    work.completed = True
    receiver.receive(bucket(0), GROUP, CPU)  # bucket 1 has been announced
    work.completed = False
    assert receiver.is_waiting_in(GROUP)
    assert not receiver.is_waiting_in(other)
    work.completed = True
    assert not receiver.is_waiting_in(GROUP)


def test_a_receiver_still_waits_after_it_gave_up(work):
    """Else the group would be destroyed instead of aborted, and that waits for the broadcast."""
    receiver = BroadcastReceiver()
    with pytest.raises(BroadcastError, match="bucket 0 did not arrive"):
        receiver.receive(bucket(0), GROUP, CPU)
    unsafe = receiver._buffers[0]
    receiver.give_up()
    assert receiver.is_waiting_in(GROUP)
    assert receiver._buffers[0] is not unsafe  # bytes may still come into it
    receiver.left(GROUP)
    assert not receiver.is_waiting_in(GROUP)


def test_a_receiver_gives_its_memory_back_with_the_group(work):
    receiver = BroadcastReceiver()
    work.completed = True
    receiver.receive(bucket(0), GROUP, CPU)
    assert [buffer.numel() for buffer in receiver._buffers] == [8, 8]
    receiver.left(GROUP)
    assert [buffer.numel() for buffer in receiver._buffers] == [0, 0]
    receiver.check(bucket(0), GROUP)  # of another sync: bucket 1 of this one is expected no more


def test_a_sync_in_another_group_begins_where_nobody_told_of_the_end_of_the_one_before(work):
    receiver = BroadcastReceiver()
    work.completed = True
    receiver.receive(bucket(0), GROUP, CPU)
    with pytest.raises(WireError, match="bucket 1 of sync"):
        receiver.check(bucket(0), GROUP)
    receiver.check(bucket(0), object())


SECRET = b"of the group"


@given(place=st.integers(0, 10_000), other=st.characters())
def test_an_announcement_that_was_changed_is_refused(place, other):
    text = encode_bucket(bucket(0), SECRET)
    assert decode_bucket(text, SECRET) == bucket(0)
    place %= len(text)
    changed = text[:place] + other + text[place + 1 :]
    if changed != text:
        with pytest.raises(WireError, match="not a broadcast bucket of this group's trainer"):
            decode_bucket(changed, SECRET)
    with pytest.raises(WireError, match="not a broadcast bucket of this group's trainer"):
        decode_bucket(text, b"another")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"version": SESSION_VERSION + 1}, SessionError, "different releases"),
        ({"encoded_layout": b"noise"}, WireError, "not a bucket layout"),
        ({"next_nbytes": -1}, WireError, "bucket 3: next_nbytes=-1"),
        ({"is_last": True, "next_nbytes": 8}, WireError, "next_nbytes=8, is_last=True"),
    ],
)
def test_an_announcement_that_means_nothing_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        decode_bucket(encode_bucket(bucket(3, **changes), SECRET), SECRET)


class Log(list):
    """What the trainer does, in order; stands for the groups and for the client too."""

    is_done = staticmethod(lambda: True)

    def __init__(self):
        super().__init__()
        self.checks = []

    def submit(self, call):
        bucket = decode_bucket(call.payload["names"][0], SECRET)
        self.append(("post", bucket.index))
        self.checks.append(bucket.manifest_check)
        reply = Future()
        reply.set_result({"message": with_remark(f"{bucket.index} is not the model's")})
        return reply

    def with_replicas(self, replicas):
        return UpdateGroup("g", GROUP, tuple((replica, self) for replica in replicas), None, SECRET)

    def abandon(self):
        self.append(("abandon", None))


@pytest.mark.parametrize("num_buckets", [1, 2, 5])
def test_no_broadcast_begins_before_the_engines_are_told(monkeypatch, num_buckets, caplog):
    """On a GPU it would wait there for the engines while the trainer's export goes on."""
    log = Log()
    started = iter(range(num_buckets))

    def start(flat, group):
        log.append(("broadcast", next(started)))
        return SimpleNamespace(is_done=lambda: True)

    monkeypatch.setattr(broadcast_transport, "Broadcast", start)
    settings = settings_of(bucket_bytes=512, manifest_check="warn")
    transport = BroadcastTransport(
        groups=log, settings=settings, agree=SingleProcess().agree, device=CPU
    )

    def export():
        for i in range(num_buckets):
            log.append(("export", i))
            yield f"t{i}", torch.zeros(128)

    replicas = [Replica(identity="a", base_url="http://a", num_ranks=1)]
    transport.sync(
        export(), replicas, version="1", report=SyncReport(mode="flattened", replica=None)
    )
    for kind in ("export", "broadcast", "post"):
        assert [index for what, index in log if what == kind] == list(range(num_buckets))
    for i in range(num_buckets):
        told = log.index(("post", max(i - 1, 0)))
        since = log[log.index(("broadcast", i)) : told]
        assert {what for what, _ in since} == {"broadcast"}  # told at once, or before
    assert log.checks == ["off"] * (num_buckets - 1) + ["warn"]
    assert f"manifest check: {num_buckets - 1} is not the model's" in caplog.text


def test_a_group_that_is_not_formed_in_time_is_an_error_and_left(monkeypatch):
    """NCCL waits for a rank that never comes without a limit."""
    monkeypatch.setattr(update_groups, "SEND_AWAY_S", 0.0)
    monkeypatch.setattr(update_groups, "WINDOW_S", 0.01)
    joined = Future()
    monkeypatch.setattr(update_groups, "_in_thread", lambda step: joined)
    left = []
    monkeypatch.setattr(update_groups, "leave", lambda group, broken: left.append((group, broken)))
    replied = Future()
    replied.set_result(None)
    client = SimpleNamespace(run=lambda call: None, submit=lambda call: replied)
    groups = UpdateGroups(address="127.0.0.1", device=CPU, timeout_s=0.05)
    replica = Replica(identity="a", base_url="http://a", num_ranks=1)
    groups._clients[replica] = client
    with pytest.raises(BroadcastError, match=r"was not formed: not all ranks came within 0\.05 s"):
        groups.with_replicas([replica])
    assert len(groups._left) == 1  # the engines are told to leave it at the next sync
    joined.set_result(GROUP)  # too late
    assert left == [(GROUP, True)]


def test_a_failed_sync_abandons_the_group(monkeypatch):
    log = Log()
    settings = settings_of(bucket_bytes=512)
    transport = BroadcastTransport(
        groups=log, settings=settings, agree=SingleProcess().agree, device=CPU
    )
    report = SyncReport(mode="flattened", replica=None)
    with pytest.raises(WeightSyncError, match="exported no tensor"):
        transport.sync(iter([]), [], version=None, report=report)
    assert log == [("abandon", None)]


class Runner:
    """SGLang's `ModelRunner`, as far as groups go."""

    def __init__(self):
        self.model = torch.nn.Linear(1, 1)
        self._model_update_group = {}


def join(runner, name, joined=(True, "joined")):
    def original(runner, *arguments):
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        assert arguments == ("127.0.0.1", port, 2, 3, name, "gloo")
        runner._model_update_group[name] = GROUP
        return joined

    with socket.create_server(("127.0.0.1", 0)) as trainer:
        port = trainer.getsockname()[1]
        where = ("127.0.0.1", port, 2, 3, name, "gloo")
        return weight_updater_hooks.join_group(original, runner, *where)


def test_a_group_whose_trainer_is_gone_is_refused_at_once():
    with socket.create_server(("127.0.0.1", 0)) as trainer:
        port = trainer.getsockname()[1]
    where = ("127.0.0.1", port, 1, 2, "weight_sync_a", "gloo")
    success, message = weight_updater_hooks.join_group(None, Runner(), *where)
    assert not success
    assert f"127.0.0.1:{port}, where weight_sync_a is formed: " in message


@pytest.fixture
def left(monkeypatch):
    """Groups that were left, and whether as broken ones."""
    found = []
    monkeypatch.setattr(
        weight_updater_hooks, "leave", lambda group, broken: found.append((group, broken))
    )
    monkeypatch.setattr(weight_updater_hooks, "say_left", lambda group: None)
    return found


def test_an_engine_connects_a_group_of_ours(work, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    work.completed = True
    monkeypatch.setattr(weight_updater_hooks, "secret_of", lambda group: SECRET)
    runner = Runner()
    assert join(runner, "weight_sync_a") == (True, "joined")
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert runner._model_update_group == {"weight_sync_a": GROUP}


def test_an_engine_that_cannot_connect_says_so_and_leaves(work, left):
    work.completed, work.error = True, "the trainer is gone"
    runner = Runner()
    success, message = join(runner, "weight_sync_a")
    assert not success
    assert "the trainer is gone" in message
    assert left == [(GROUP, True)]
    assert not runner._model_update_group


def test_other_groups_are_sglangs_own(work, left):
    runner = Runner()
    originals = []

    def original(*arguments):
        originals.append(arguments)
        return True, "stock"

    hooks = weight_updater_hooks
    joined = hooks.join_group(original, runner, "host", 1, 2, 3, "other", "gloo")
    assert (joined, hooks.leave_group(original, runner, "other")) == ((True, "stock"),) * 2
    assert originals == [(runner, "host", 1, 2, 3, "other", "gloo"), (runner, "other")]
    assert not left


@pytest.mark.parametrize("arrived", [True, False])
def test_a_group_is_aborted_only_if_a_broadcast_is_outstanding(work, left, arrived):
    runner, receiver = Runner(), BroadcastReceiver()
    runner._model_update_group["weight_sync_a"] = GROUP
    weight_updater_hooks._receivers[runner] = receiver
    work.completed = True
    receiver.receive(bucket(0), GROUP, CPU)  # bucket 1 has been announced
    work.completed = arrived
    assert weight_updater_hooks.leave_group(None, runner, "weight_sync_a")[0]
    assert left == [(GROUP, not arrived)]
    assert not runner._model_update_group
    assert not receiver.is_waiting_in(GROUP)


def test_leaving_ends_though_a_peer_is_dead(monkeypatch, caplog):
    monkeypatch.setattr(update_group, "LEAVE_TIMEOUT_S", 0.05)
    never = threading.Event()
    update_group.abort(SimpleNamespace(abort=never.wait))
    never.set()
    assert "more than 0.05 s to abort the update group" in caplog.text


@pytest.mark.parametrize("value", [None, "1"])
def test_a_trainer_with_another_nccl_setting_than_sglangs_is_refused(monkeypatch, value):
    from verl_sglang_sync.verl.checkpoint_engine import _check_nccl

    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    if value is not None:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", value)
    with pytest.raises(ValueError, match=f"NCCL_CUMEM_ENABLE={value!r}.*allowed: '0'"):
        _check_nccl(torch.device("cuda", 0))
    _check_nccl(CPU)
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    _check_nccl(torch.device("cuda", 0))
