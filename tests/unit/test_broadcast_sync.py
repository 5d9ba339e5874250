"""Disaggregated syncs in one process: real sessions over TCP, real broadcasts over gloo."""

import contextlib
import gc
import re
import weakref
from concurrent.futures import Future
from concurrent.futures.thread import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo
from torch.distributed.distributed_c10d import _world

from sglang_loader.common.broadcast import update_group
from sglang_loader.common.broadcast.broadcast import Broadcast, BroadcastError
from sglang_loader.common.broadcast.update_group import GroupPlace, MeetingPoint, join
from sglang_loader.session.group_receiver import GroupReceiver
from support.settings import settings_of
from unit.serving_engine import ServingEngine, synced
from verl_sglang_sync import WeightSyncError
from verl_sglang_sync.engine.update_groups import Replica, UpdateGroup
from verl_sglang_sync.routes import broadcast as route
from verl_sglang_sync.sync.engines import RemoteEngines
from verl_sglang_sync.sync.topologies import disaggregated_sync
from verl_sglang_sync.trainer_ranks import TrainerRanks

CPU = torch.device("cpu")
TPS = (1, 2)
"""Of the replicas."""


class Groups:
    """Stands for `UpdateGroups`: its group is formed in this process, a thread for each rank.

    Attributes:
        engines: one for each replica.
        num_abandoned: groups that were given up.
    """

    def __init__(self):
        self.engines = [ServingEngine(tp=tp) for tp in TPS]
        self.num_abandoned = 0
        self.abandoned = []
        self._formed = None

    def with_replicas(self, replicas):
        if self._formed is None:
            self._formed = self._form(replicas)
        return self._formed

    def abandon(self):
        self.num_abandoned += 1
        self.close()

    def close(self):
        if self._formed is None:
            return
        forget(self._formed.process_group)
        for group in (group for engine in self.engines for group in engine.groups):
            forget(group)
        del group
        self._formed = None
        for engine in self.engines:
            engine.leave_groups()

    @property
    def replicas(self):
        """With their engines as clients of servers."""
        return tuple(
            Replica(identity=f"{i}", base_url=f"http://replica{i}", client=engine, num_ranks=tp)
            for i, (engine, tp) in enumerate(zip(self.engines, TPS, strict=True))
        )

    def _form(self, replicas):
        own, *others = gloo_ranks(1 + sum(TPS))
        for engine, tp in zip(self.engines, TPS, strict=True):
            engine.groups, others = others[:tp], others[tp:]
        return UpdateGroup("weight_sync_a", own, replicas, None, b"secret")


def gloo_ranks(world_size):
    """All ranks of one gloo group, in this process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(partial(gloo_rank, store, world_size), range(world_size)))


def gloo_rank(store, world_size, rank, timeout=timedelta(seconds=20), **_):
    """One rank, which joins as torch's would if each had a process."""
    group = ProcessGroup(store, rank, world_size)
    gloo = ProcessGroupGloo(store, rank, world_size, timeout)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(CPU, ProcessGroup.BackendType.GLOO, gloo)
    group._set_group_name(f"{id(store)}/{rank}")
    _world.pg_map[group] = ("gloo", store)
    _world.pg_names[group] = group.group_name
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def forget(group):
    """What `destroy_process_group` does with a group of `gloo_ranks`; it ends with this object."""
    for registered in (_world.pg_map, _world.pg_names, _world.pg_group_ranks):
        registered.pop(group)


@pytest.fixture
def groups():
    made = Groups()
    yield made
    made.close()


def weight_sync(groups, mode="flattened", **options):
    """A trainer of one rank; syncs `weights` when it is called."""
    settings = settings_of(mode, bucket_bytes=512, request_timeout_s=10, **options)
    made = disaggregated_sync(
        address="127.0.0.1", settings=settings, ranks=TrainerRanks(), device=CPU
    )
    made._engines._groups = groups

    def sync(weights):
        return synced(made, weights, mode, replicas=groups.replicas)

    return sync


def weights(num=5, first=0.0):
    return [(f"t{i}", torch.arange(128.0) + i + first) for i in range(num)]


def test_good_replies_may_come_before_published(groups, monkeypatch):
    monkeypatch.setattr("sglang_loader.common.session.channel.GRACE_MS", 10)
    for engine in groups.engines:
        engine.tells_late_s = 0.3
    weight_sync(groups)(weights())
    assert [engine.num_published for engine in groups.engines] == [1, 1]


@pytest.mark.parametrize("mode", ["flattened", "compiled"])
def test_every_rank_of_every_engine_gets_every_tensor(groups, mode):
    sync = weight_sync(groups, mode)
    for first in (0.0, 100.0, 200.0):  # in sessions over the same sockets
        report = sync(weights(first=first))
        assert report.num_buckets == 5
        for model in (model for engine in groups.engines for model in engine.models):
            assert list(model.loaded) == [name for name, _ in weights()]
            for name, tensor in weights(first=first):
                assert torch.equal(model.loaded[name], tensor)
        if mode == "compiled":
            assert report.num_replayed + report.num_eager == 5
    assert [engine.num_published for engine in groups.engines] == [3, 3]
    assert groups.num_abandoned == 0


@pytest.mark.parametrize("num_buckets", [1, 2, 5])
def test_no_broadcast_begins_before_all_engines_receive_it(groups, monkeypatch, num_buckets):
    """On a GPU it would wait there for the engines while the trainer's export goes on."""
    log = []
    started = iter(range(num_buckets))

    class Logged(Broadcast):
        def __init__(self, flat, group):
            log.append(("broadcast", next(started)))
            super().__init__(flat, group)

    begin = GroupReceiver.begin_bucket

    def logged(self, message, layout):
        begin(self, message, layout)
        log.append(("receive", message.index))

    monkeypatch.setattr(route, "Broadcast", Logged)
    monkeypatch.setattr(GroupReceiver, "begin_bucket", logged)
    weight_sync(groups)(weights(num_buckets))
    assert len(log) == num_buckets * (1 + sum(TPS))
    for i in range(num_buckets):
        assert log[: log.index(("broadcast", i))].count(("receive", i)) == sum(TPS)


@pytest.mark.parametrize(("replica", "rank"), [(0, 0), (1, 1)])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_failed_engine_rank_is_named_unpublished(groups, replica, rank, at):
    sync = weight_sync(groups)
    sync(weights())
    groups.engines[replica].models[rank].fails_at = at
    with pytest.raises(WeightSyncError) as raised:
        sync(weights())
    # At the last bucket another rank of the engine, which has loaded, may report it first.
    named = rf"http://replica{replica}, TP rank \d: TP rank {rank}: Traceback"
    assert re.search(named, str(raised.value))
    assert f"the engine refused bucket {at}" in str(raised.value)
    assert [engine.num_published for engine in groups.engines] == [1, 1]
    assert groups.num_abandoned == 2, "it is tried twice"
    groups.engines[replica].models[rank].fails_at = None
    sync(weights())
    assert [engine.num_published for engine in groups.engines] == [2, 2]


def test_refusals_are_raised_and_remarks_logged_once(groups, caplog):
    sync = weight_sync(groups, manifest_check="off")
    groups.engines[1].remarks = ["t4 is not the model's", "torch copies weights, slower"]
    for _ in range(2):
        sync(weights())
    assert [caplog.messages.count(remark) for remark in groups.engines[1].remarks] == [1, 1]
    assert [engine.checks for engine in groups.engines] == [["off"], ["off"] * 2]
    groups.engines[1].refuses = "1 missing: t5"
    with pytest.raises(WeightSyncError, match="1 missing: t5"):
        sync(weights())
    assert groups.num_abandoned == 1


def test_an_export_that_fails_ends_all_sessions(groups):
    def export():
        yield from weights()
        raise RuntimeError("no more tensors")

    sync = weight_sync(groups)
    with pytest.raises(WeightSyncError, match="no more tensors"):
        sync(export())
    assert [engine.num_published for engine in groups.engines] == [0, 0]
    with pytest.raises(WeightSyncError, match="exported no tensor"):
        sync([])
    assert groups.num_abandoned == 3, "an export that is there only once is tried once"
    sync(weights())
    for thread in (thread for engine in groups.engines for thread in engine._serving.values()):
        thread.join(10)
        assert not thread.is_alive()


def test_a_bad_reply_ends_the_group_at_once(groups, monkeypatch):
    """Not when the garbage collector comes: engines that leave a gloo group wait for its end."""
    sync = weight_sync(groups)
    sync(weights())
    formed = [weakref.ref(groups.with_replicas(groups.replicas).process_group)]
    submit, form = groups.engines[1].submit, groups._form

    def lost(call):
        submit(call)
        reply = Future()
        reply.set_exception(ConnectionError("the connection broke"))
        return reply

    def watched(replicas):
        assert formed[-1]() is None, "before the next is formed"
        group = form(replicas)
        formed.append(weakref.ref(group.process_group))
        return group

    monkeypatch.setattr(groups, "_form", watched)
    monkeypatch.setattr(groups.engines[1], "submit", lost)
    gc.disable()
    try:
        with contextlib.suppress(WeightSyncError):
            sync(weights())
        assert groups.num_abandoned == 2, "it is tried twice"
        assert [group() for group in formed] == [None, None]
    finally:
        gc.enable()


def test_a_transfer_that_nobody_sends_ends(monkeypatch):
    """gloo may miss that a peer has failed, and would then keep whoever leaves the group."""
    monkeypatch.setattr("sglang.srt.utils.init_custom_process_group", gloo_rank)
    monkeypatch.setattr(update_group, "TRANSFER_MARGIN_S", 0.1)
    meeting = MeetingPoint("127.0.0.1", 2, 1, limit_s=5.0, transfer_s=0.5)
    place = GroupPlace("weight_sync_a", "127.0.0.1", meeting.port, 2)
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: join(place, rank, CPU), range(2)))
    transfer = Broadcast(torch.empty(1, dtype=torch.uint8), groups[1])
    with pytest.raises(BroadcastError, match="Timed out waiting 5100ms"):
        transfer.wait(60, "what nobody sends")
    for group in groups:
        forget(group)


class FormingGroups:
    """Stands for `UpdateGroups`, whose groups have names alone.

    Attributes:
        abandoned: as `UpdateGroups` has it.
        left: the groups that engines left when each group was formed.
    """

    def __init__(self, prefix):
        self._prefix, self.current = prefix, None
        self.abandoned, self.left = [], []

    def with_replicas(self, replicas):
        if self.current is None:
            self.left.append(self.abandoned)
            self.abandoned = []
            self.current = UpdateGroup(f"{self._prefix}{len(self.left)}", None, tuple(replicas))
        return self.current

    def abandon(self):
        if self.current is not None:
            self.abandoned.append(self.current.name)
        self.current = None


def test_engines_leave_all_groups_of_failed_syncs():
    """Else a communicator that cannot be used any more would keep GPU memory of the engines."""
    groups, senders = FormingGroups("broadcast"), FormingGroups("send")
    engines = RemoteEngines(groups, senders, settings_of("compiled"))
    engines._group_of(groups, [])
    senders.with_replicas([])
    engines.abandon()
    engines._group_of(groups, [])
    assert groups.left == [[], ["broadcast1", "send1"]]
