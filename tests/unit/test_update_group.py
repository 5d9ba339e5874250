"""Forming an update group: whoever waits for a rank that does not come is sent away."""

import os
import socket
import subprocess
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from sglang.srt.utils import init_custom_process_group
from torch._C._distributed_c10d import TCPStore

from sglang_loader.common.broadcast.broadcast import BroadcastError
from sglang_loader.common.broadcast.update_group import GroupPlace, MeetingPoint, join, meet
from sglang_loader.common.threads import in_thread
from support.hosts import two_hosts
from support.remote import Remote, finish, results_of
from verl_sglang_sync.engine import update_groups
from verl_sglang_sync.engine.server_client.errors import RequestFailed
from verl_sglang_sync.engine.update_groups import Replica, UpdateGroupError, UpdateGroups

LIMIT_S = 60
LIMIT = timedelta(seconds=LIMIT_S)
IMPORTED_WITHIN_S = 240
"""In which a process of its own has also imported SGLang, on a busy machine."""
EXCEEDED = r"not all ranks .* \(limit: 1 s, of timeouts_s.group, else request_timeout_s\): "
CPU = torch.device("cpu")
NO_ROOM = RequestFailed("no room", endpoint="http://1/init", status=400)


def meeting_of(address, num_ranks, limit_s=LIMIT_S):
    """Where one trainer rank and engine ranks meet."""
    return MeetingPoint(address, num_ranks, 1, limit_s=limit_s, transfer_s=LIMIT_S)


def connected(port):
    """A rank's connection to a meeting point of three."""
    return TCPStore("127.0.0.1", port, 3, wait_for_workers=False, timeout=LIMIT)


def test_its_own_connection_keeps_nothing_open():
    meeting = meeting_of("127.0.0.1", 3)
    store = connected(meeting.port)
    store.set("key", "value")
    meeting.close()
    with pytest.raises(Exception, match=r"shutdown or crash|Broken pipe|Connection"):
        store.get("key")


@pytest.mark.parametrize(
    ("num_coming", "ends", "how"),
    [(2, None, "met"), (1, "call_off", "RuntimeError"), (1, "close", "DistNetworkError")],
)
def test_ranks_meet_in_the_store_before_any_collective(num_coming, ends, how):
    """NCCL's wait for a rank that does not come has no end; this one has."""
    meeting = meeting_of("127.0.0.1", 2)
    ended = []

    def rank():
        try:
            meet(connected(meeting.port), 2, LIMIT)
            ended.append("met")
        except Exception as error:
            ended.append(type(error).__name__)

    ranks = [threading.Thread(target=rank, daemon=True) for _ in range(num_coming)]
    for thread in ranks:
        thread.start()
    ranks[0].join(1.0)
    if ends is not None:
        assert ended == []
        getattr(meeting, ends)()
    for thread in ranks:
        thread.join(10)
    assert ended == [how] * num_coming


@pytest.mark.parametrize("rank", (0, 1))
def test_an_unconnected_rank_costs_at_most_the_limit(rank):
    """An engine would serve nothing meanwhile: for a connection gloo waits 2.5 hours by default."""
    meeting = meeting_of("127.0.0.1", 2, limit_s=1.0)
    place = GroupPlace("weight_sync_a", "127.0.0.1", meeting.port, 2)
    store = connected(meeting.port)
    store.add("here", 1)

    class Deadly(dist.Store):
        """The other rank says where it is, and is gone."""

        def set(self, key, value):
            store.set(key, value)
            raise RuntimeError("gone")

    where = {"store": Deadly(), "world_size": 2, "rank": 1 - rank, "group_name": place.name}
    with pytest.raises(RuntimeError, match="gone"):
        init_custom_process_group("gloo", **where)
    with pytest.raises(BroadcastError, match=EXCEEDED):
        join(place, rank, CPU)


def served_where_dns_is_silent(address, resolv_conf):
    """The store of a group of two, in a process whose host waits 6 s for each name."""
    dns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    dns.bind(("127.0.0.1", 53))
    resolv_conf.write_text("nameserver 127.0.0.1\n")
    subprocess.run(["mount", "--bind", resolv_conf, "/etc/resolv.conf"], check=True)
    return dns, meeting_of(address, 2)


@pytest.mark.slow
def test_a_group_forms_despite_silent_dns(tmp_path):
    """torch's store looks up the name of each host that connects, and answers nobody meanwhile."""
    with two_hosts() as (host, _), ExitStack() as stack:
        if not host.prefix:
            pytest.skip("this machine allows no namespaces, which a host of its own is made of")
        environment = {**os.environ, **host.environment, "RES_OPTIONS": "timeout:6 attempts:1"}
        ranks = []
        serve = partial(served_where_dns_is_silent, host.address, tmp_path / "resolv.conf")
        for make in (serve, dict):
            log = tmp_path / f"rank{len(ranks)}.log"
            ranks.append(Remote(make, environment=environment, log=log, command=host.prefix))
            stack.callback(ranks[-1].end)
        results_of(finish(ranks, IMPORTED_WITHIN_S))
        ranks[0].begin(lambda served: served[1].port)
        (port,) = results_of(finish(ranks[:1], IMPORTED_WITHIN_S))
        place = GroupPlace("weight_sync_a", host.address, port, 2)
        for number, rank in enumerate(ranks):
            rank.begin(lambda _, number: join(place, number, CPU).size(), number)
        assert results_of(finish(ranks, IMPORTED_WITHIN_S)) == [2, 2]


class Engine:
    """A server's client: its one rank joins as an engine's does, or has this answer.

    Attributes:
        joined: that its rank has, or how it ended.
    """

    def __init__(self, answer=None, delay_s=0.0):
        self.joined = Future() if answer is None else answer
        self._joins, self._delay_s = answer is None, delay_s

    def run(self, call):
        """It is there."""

    def submit(self, call):
        if self._joins:
            self.joined = in_thread(partial(self._join, call.payload), "engine")
        return self.joined

    def _join(self, told, _):
        time.sleep(self._delay_s)
        names = ("group_name", "master_address", "master_port", "world_size")
        return join(GroupPlace(*(told[name] for name in names)), told["rank_offset"], CPU)


def form(*engines, timeout_s=LIMIT_S):
    """Have a trainer of one rank form a group with these engines, which fails: the groups."""
    where = {"address": "127.0.0.1", "device": CPU}
    groups = UpdateGroups(**where, timeout_s=timeout_s, transfer_s=LIMIT_S)
    replicas = [
        Replica(identity=f"{i}", base_url=f"http://{i}", client=engine, num_ranks=1)
        for i, engine in enumerate(engines)
    ]
    with pytest.raises(UpdateGroupError, match="was not formed: ") as error:
        groups.with_replicas(replicas)
    assert len(groups.abandoned) == 1, "the engines are told to leave it at the next sync"
    return str(error.value).partition(" was not formed: ")[2]


def test_a_refusing_replica_is_named_and_others_leave():
    refused = Future()
    refused.set_exception(NO_ROOM)
    early, late = Engine(), Engine(delay_s=1.5)
    started = time.monotonic()
    told = form(early, Engine(refused), late)
    assert told == f"replica 1 (http://1) did not join the update group: {NO_ROOM}"
    for engine in (early, late):
        assert engine.joined.exception(0) is not None
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("answers", [True, False])
def test_an_overdue_group_names_the_silent_and_ends(answers, monkeypatch):
    """NCCL waits for a rank that never comes without a limit."""
    own, replied, left = Future(), Future(), []
    if answers:
        replied.set_result(None)
    monkeypatch.setattr(update_groups, "REPLY_S", 0.0)
    monkeypatch.setattr(update_groups, "LEAVE_S", 0.0)
    monkeypatch.setattr(update_groups, "in_thread", lambda *_: own)
    monkeypatch.setattr(update_groups, "leave", lambda group, broken: left.append((group, broken)))
    told = form(Engine(replied), timeout_s=0.05)
    silent = "nobody" if answers else "http://0"
    assert told == (
        "not all ranks came within 0.05 s, of timeouts_s.group, else request_timeout_s, "
        f"no word of: {silent}"
    )
    own.set_result("the group")  # too late
    assert left == [("the group", True)]


def test_every_rank_names_an_overdue_groups_limit(monkeypatch):
    place = GroupPlace("weight_sync_a", "127.0.0.1", 1, 2)
    trainers = SimpleNamespace(gather=lambda _: [place, None])
    monkeypatch.setattr(update_groups, "in_thread", lambda *_: Future())
    limits = {"timeout_s": 0.05, "transfer_s": LIMIT_S}
    settings = {"address": "", "device": CPU, "trainers": trainers, **limits}
    with pytest.raises(UpdateGroupError, match=r"not all ranks came within 0.05 s, of timeouts_s"):
        UpdateGroups(**settings).with_replicas(None)
