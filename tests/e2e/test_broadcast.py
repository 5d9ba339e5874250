"""Disaggregated mode on real processes: bit-exact weights for each trainer world and rollout TP.

Two real engines, of TP 1 and TP 2; trainers of one, two and four ranks sync to one, to both, and to
the other, with process groups kept where the replicas are the same and formed anew where not.
One of the engines listens at ::1, and in mode compiled the group meets there.
"""

import base64
import itertools
import json
import os
import signal
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tiny_assets import make_assets

from support.engine_loaders import HOST_LOADER
from support.exports import calling_at
from support.hosts import loopback
from support.http_requests import get, post
from support.sender import Senders
from support.served import Served, served
from support.trainer import Ranks
from verl_sglang_sync.engine.server_client import operations
from verl_sglang_sync.engine.session import EngineCannotMap
from verl_sglang_sync.routes.table.sending import Sender
from verl_sglang_sync.routes.table.table_source import TableSource
from verl_sglang_sync.sources.snapshot import SourcesChanged

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BOTH = (0, 1)
LIMIT_S = 8.0
"""Of the syncs in which somebody fails."""


@dataclass(frozen=True)
class Engines:
    """A TP 1 and a TP 2 engine of one checkpoint, and what each has of which weights' scale."""

    servers: tuple[Served, Served]
    folder: Path
    scales: list[float] = field(default_factory=lambda: [1.0, 1.0])
    known: dict[tuple[int, float], Any] = field(default_factory=dict)

    @property
    def targets(self):
        return [(server.url, server.tp) for server in self.servers]

    @property
    def pids(self):
        return [server.process.pid for server in self.servers]

    def ranks(self, world_size):
        """Trainer ranks, whose group is their own."""
        return Ranks(self.folder, [self.servers[0].url] * world_size)

    @contextmanager
    def elsewhere(self, member):
        """One of them is on another host than the trainer, as far as it knows."""
        self.servers[member].ask(HOST_LOADER, "another host")
        try:
            yield
        finally:
            self.servers[member].ask(HOST_LOADER, "here")

    def check(self):
        """Each has the weights that it got last, and no other scale's."""
        for place in enumerate(self.scales):
            hashes = self.servers[place[0]].hashes()
            assert hashes == self.known.setdefault(place, hashes), place
        assert len({str(hashes) for hashes in self.known.values()}) == len(self.known)

    def syncs(self, senders, plan):
        """Sync by a plan of (the weights' scale, mode, who takes part): every sync leaves its
        members with its weights, and the others as they were; the reports.
        """
        reports = []
        for scale, mode, members in plan:
            reports.append(senders.sync(scale, mode, members))
            for member in members:
                self.scales[member] = scale
            self.check()
        return reports


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broadcast")
    make_assets(folder, architecture="qwen3_moe")
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(
                served(
                    folder / f"tp{tp}",
                    model=folder / "model",
                    tp=tp,
                    host=host,
                    loaders=(HOST_LOADER,),
                )
            )
            for tp, host in ((1, loopback()), (2, "127.0.0.1"))
        )
        made = Engines((one, two), folder)
        assert loopback() in one.url, "IPv6's, where this host has one"
        made.check()
        yield made


# A plan is made, replayed, then shards are sent.
SENDS = [
    (scale, "compiled", members)
    for members, scales in (
        ((0,), (0.5, 2.0, 4.0, 1.0)),
        ((1,), (0.5, 2.0, 4.0, 1.0)),
        (BOTH, (0.5, 2.0, 4.0)),
        ((1,), (0.25, 0.5)),
        (BOTH, (2.0, 1.0)),
    )
    for scale in scales
]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_trainer_ranks_send_what_engine_ranks_read(engines, world_size):
    """To each replica alone, to both, and after one has left and joined again."""
    with engines.ranks(world_size) as ranks:
        reports = engines.syncs(Senders(ranks, engines.targets, shards="sent"), SENDS)
    for members, report in {who: r for (*_, who), r in zip(SENDS, reports, strict=True)}.items():
        assert report["num_sent"] == report["num_replayed"] == report["num_buckets"], members
        pairs, payload = report["pair_bytes"], report["payload_bytes"]
        assert len(pairs) == world_size
        assert all(min(sent) > 0 for sent in pairs), "each trainer rank sends to each engine rank"
        needed = [sum(sent) for sent in zip(*pairs, strict=True)]
        assert report["sent_bytes"] == sum(needed)
        if 0 in members:
            assert needed.pop(0) == payload, "TP 1 needs all"
        for nbytes in needed:
            assert payload / 2 < nbytes < 0.6 * payload, "half, and what both have"
    broadcast = [report for report in reports if not report["num_sent"]]
    assert len(broadcast) <= 6 and broadcast[0] is reports[0], "one or two after each change"
    groups = itertools.groupby(zip(SENDS, reports, strict=True), lambda each: each[0][2])
    formed = [{report["num_formed"] for _, report in syncs} for _, syncs in groups]
    assert formed == [{1}, {2}, {3}, {4}, {5}], "one is kept while the replicas stay"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_engines_on_the_trainers_host_pull_all_shards(engines, world_size):
    """As each replica alone, as both, and after one has left and joined again."""
    with engines.ranks(world_size) as ranks:
        reports = engines.syncs(Senders(ranks, engines.targets, shards="mapped"), SENDS)
    is_pulled = [report["num_pulled"] == report["num_buckets"] for report in reports]
    changes = [i for i, (*_, who) in enumerate(SENDS) if i == 0 or who != SENDS[i - 1][2]]
    assert [i for i, pulled in enumerate(is_pulled) if not pulled] == changes
    for report, pulled in zip(reports, is_pulled, strict=True):
        if pulled:
            assert report["num_replayed"] == report["num_buckets"]
            assert (report["num_sent"], report["num_eager"], report["staging_bytes"]) == (0, 0, 0)


@pytest.mark.parametrize(("far", "world_size"), [(0, 2), (1, 2), (1, 1)])
def test_near_engines_pull_while_others_are_sent_to(engines, far, world_size):
    """As each replica alone, as both, and after one has left and joined again."""
    near = 1 - far
    with engines.elsewhere(far), engines.ranks(world_size) as ranks:
        reports = engines.syncs(Senders(ranks, engines.targets, shards="mapped"), SENDS)
    for members, report in {who: r for (*_, who), r in zip(SENDS, reports, strict=True)}.items():
        num, payload = report["num_buckets"], report["payload_bytes"]
        assert report["num_pulled"] == (num if near in members else 0)
        assert report["num_sent"] == (num if far in members else 0)
        assert (report["num_replayed"], report["num_eager"]) == (num, 0)
        if far in members:
            needed = [sum(sent) for sent in zip(*report["pair_bytes"], strict=True)]
            assert len(report["pair_bytes"]) == world_size
            assert report["sent_bytes"] == sum(needed), "to the others nothing was sent"
            assert len(needed) == engines.servers[far].tp
            assert all(payload / 2 < nbytes < 0.6 * payload for nbytes in needed) or far == 0
            assert needed == [payload] or far == 1
    exported = [report for report in reports if not report["num_sent"] + report["num_pulled"]]
    assert len(exported) <= 6 and exported[0] is reports[0], "one or two after each change"


@pytest.mark.parametrize("shards", ["sent", "mapped"])
def test_every_second_sync_is_proven_again(engines, shards):
    """Also where one engine is sent to, and the other reads in place what can be mapped."""
    sends = [(scale, "compiled", BOTH) for scale in (0.5, 2.0, 4.0, 0.5, 2.0, 4.0, 0.5, 1.0)]
    with engines.elsewhere(1), engines.ranks(2) as ranks:
        senders = Senders(ranks, engines.targets, shards=shards, prove_every_n_syncs=2)
        reports = engines.syncs(senders, sends)
    is_sent = [bool(report["num_sent"]) for report in reports]
    is_pulled = [bool(report["num_pulled"]) for report in reports]
    assert is_pulled == (is_sent if shards == "mapped" else [False] * len(sends))
    assert all(is_sent[-4:])
    assert [report["is_proven"] for report in reports][1::2] == [True] * 4


def test_a_requested_proof_is_made_with_all_replicas(engines):
    def last(url):
        return json.loads(get(url, "weight_sync/proof").text)

    urls = [server.url for server in engines.servers]
    with engines.ranks(2) as ranks:
        senders = Senders(ranks, engines.targets, shards="sent")
        # Norms that are alike are proven twice.
        engines.syncs(senders, [(scale, "compiled", BOTH) for scale in (0.5, 2.0)])
        before = [last(url)["number"] for url in urls]
        assert post(urls[1], "weight_sync/prove", {}).status == 200
        assert [last(url)["requested"] for url in urls] == [False, True]
        proven, after = engines.syncs(senders, [(4.0, "compiled", BOTH), (1.0, "compiled", BOTH)])
    assert (proven["is_proven"], after["is_proven"]) == (True, None)
    assert proven["num_sent"] and after["num_sent"]
    for url, number in zip(urls, before, strict=True):
        outcome = last(url)
        assert (outcome["number"], outcome["is_proven"]) == (number + 1, True)
        assert not outcome["requested"] and outcome["seconds"] > 0


def senders_that_fail(engines, ranks, *members, shards="sent"):
    """Short limits: sessions say who is missing; the requests to all engines began before, and end
    alike.
    """
    limits = {"timeout_s": LIMIT_S, "timeouts_s": {"update": 3 * LIMIT_S}}
    targets = [engines.targets[i] for i in members or BOTH]
    return Senders(ranks, targets, shards=shards, **limits)


def fail_amid_sending(rank, act):
    """A sync of other weights in which something is done before a bucket leaves this rank.

    Its group keeps no engine waiting, even where something on each rank still refers to it.
    """
    calls, launch, export = itertools.count(), Sender.launch, rank.kept["export"]

    def launching(sender, *args):
        if next(calls) == 7:
            rank.kept[id(args[-1])] = args[-1]  # the group
            act(rank)
        return launch(sender, *args)

    export.write(rank.weights(0.5))
    with mock.patch.object(Sender, "launch", launching):
        seen = rank.kept["sender"].attempt(export.reexport(), mode="compiled")
    return seen


def refuse(rank):
    if rank.rank == 1:
        raise MemoryError("no room to pack")


def stop(rank):
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def stop_engine(rank, pid, by=signal.SIGSTOP):
    if rank.rank == 0:
        os.killpg(pid, by)


def die(rank, *_):
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_failure_while_sending_is_named_and_recovered(engines):
    pid, url = engines.pids[1], engines.servers[1].url
    stop_it = partial(stop_engine, pid=pid)
    silent = f"no message from the engine within {LIMIT_S:g} s"
    with engines.ranks(2) as ranks:
        senders = senders_that_fail(engines, ranks)
        for act, texts in (
            (refuse, ("no error",)),  # it is made again by the export
            (stop_it, (f"{url}, TP rank ", silent)),
            (stop, ("rank 1 did not answer the other trainer ranks",)),
        ):
            assert senders.until_sent()
            ranks.begin(fail_amid_sending, act)
            first = ranks.processes[0].outcome(60)
            os.killpg(pid, signal.SIGCONT)
            if act is stop:
                time.sleep(LIMIT_S)  # the other rank stands still for longer than this one waited
            os.kill(ranks.processes[1].process.pid, signal.SIGCONT)
            second = ranks.processes[1].outcome(60)
            assert first and second and not first.error and not second.error
            assert all(text in first.result["error"] for text in texts), first
            assert first.result["seconds"] < LIMIT_S + 15, act
            assert (second.result["error"] == "no error") == (act is refuse)
            assert senders.until_sent(), "it is sent again"
            engines.check()


def cannot_read(rank, reason):
    """A sync in which the near engine cannot read the shards, until the export has been made."""
    send, failures = TableSource.send, [reason] if rank.rank == 0 else []

    def fails_once(source, *arguments):
        if failures:
            raise failures.pop()
        return send(source, *arguments)

    with mock.patch.object(TableSource, "send", fails_once):
        return rank.kept["sender"].sync(rank.kept["export"].reexport(), "compiled")


def test_a_failure_of_mixed_routes_is_named(engines):
    """Also the near one, for which no transfer waits. Where it cannot map, all are sent to."""
    with engines.elsewhere(1), engines.ranks(2) as ranks:
        senders = senders_that_fail(engines, ranks, shards="mapped")
        for failing in BOTH:
            assert senders.until_sent() and senders.sync(mode="compiled")["num_pulled"]
            pid = engines.pids[failing]
            seen = ranks.run(fail_amid_sending, partial(stop_engine, pid=pid))
            os.killpg(pid, signal.SIGCONT)
            (error,) = {rank["error"] for rank in seen}
            assert f"{engines.servers[failing].url}, TP rank " in error
            # The near one has read all by then, and is silent on its outcome.
            silent = ("no message from the engine", "not loaded")
            assert any(f"{text} within {LIMIT_S:g} s" in error for text in silent)
            assert seen[0]["seconds"] < LIMIT_S + 15
            assert senders.until_sent(), "it is sent again"
            engines.check()
        for reason in (SourcesChanged("moved"), EngineCannotMap("no access")):
            exported = ranks.run(cannot_read, reason)[0]
            assert (exported["num_pulled"], exported["num_sent"]) == (0, 0)
            assert senders.until_sent(), "it is sent again"
            after = senders.sync(mode="compiled")
            assert bool(after["num_pulled"]) == isinstance(reason, SourcesChanged)
            engines.check()


def read_shards(rank):
    """Rank 1 is killed while engines read all ranks' shards."""
    export = rank.kept["export"]
    export.write(rank.weights(0.5))
    with mock.patch.object(TableSource, "confirm", lambda _: die(rank)):
        seen = rank.kept["sender"].attempt(export.reexport(), mode="compiled")
    return seen


def be_gone(rank):
    """A sync that one rank does not live to see."""
    die(rank)
    return rank.kept["sender"].attempt(rank.kept["export"].reexport(), mode="compiled")


@pytest.mark.parametrize(
    ("shards", "dying", "limit_s"),
    [
        ("sent", be_gone, LIMIT_S),
        ("sent", partial(fail_amid_sending, act=die), LIMIT_S + 15),
        ("mapped", read_shards, LIMIT_S + 15),
    ],
    ids=["before a sync", "amid sending", "as engines read its shards"],
)
def test_a_dead_trainer_rank_is_named_in_time(engines, shards, dying, limit_s):
    with engines.ranks(2) as ranks:
        senders = senders_that_fail(engines, ranks, shards=shards)
        kind = "num_sent" if shards == "sent" else "num_pulled"
        assert [senders.sync(mode="compiled")[kind] for _ in range(4)][-1]
        first, second = ranks.attempt(dying)
    assert "SIGKILL" in str(second.error)
    assert "rank 1 did not answer" in first.result["error"]
    assert first.result["seconds"] < limit_s
    good_sync(engines)


def good_sync(engines):
    """The weights as they are, by a trainer of one rank."""
    with engines.ranks(1) as ranks:
        engines.syncs(Senders(ranks, engines.targets), [(1.0, "flattened", BOTH)])


def first_request(rank):
    """What a sync sends first."""
    sent, make = [], operations.update_weights

    def recorded(*args, **fields):
        sent.append(make(*args, **fields))
        return sent[-1]

    with mock.patch.object(operations, "update_weights", recorded):
        rank.kept["sender"].sync(rank.weights())
    return dict(sent[0].payload) if sent else {}


def test_strangers_in_the_trainers_group_are_refused(engines):
    """A receive that nobody meets would meet the next broadcast, and gloo ends the engine there. A
    group that an engine was told to leave is formed anew before anything is sent.
    """
    url = engines.servers[0].url
    with engines.ranks(2) as ranks:
        senders = Senders(ranks, engines.targets, timeout_s=20)
        first = ranks.run(first_request)[0]
        descriptor = json.loads(base64.b64decode(first["serialized_named_tensors"][0]))
        later = json.dumps({**descriptor, "timeout_s": 1000.0}).encode()
        changed = first | {"serialized_named_tensors": [base64.b64encode(later).decode()]}
        stock = {"names": ["a"], "dtypes": ["uint8"], "shapes": [[8]]}
        stock |= {"group_name": descriptor["group"], "load_format": None}
        for endpoint, payload, text in (
            ("tensor", first, "the same request has come before"),
            ("tensor", changed, "changed on its way"),
            ("distributed", stock, "a group of verl-sglang-sync"),  # in sglang's own format
        ):
            status, answer = post(url, f"update_weights_from_{endpoint}", payload)
            assert status == 400 and text in answer, answer
        senders.sync()
        leave = {"group_name": descriptor["group"]}
        assert post(url, "destroy_weights_update_group", leave).status == 200
        assert senders.sync()["num_formed"] == 2
    engines.check()


def test_a_server_dead_in_a_pull_is_named(engines, tmp_path):
    with (
        served(tmp_path / "near", model=engines.folder / "model") as near,
        engines.elsewhere(1),
        engines.ranks(2) as ranks,
    ):
        targets = [engines.targets[1], (near.url, near.tp)]
        senders = Senders(ranks, targets, shards="mapped", timeout_s=20)
        assert senders.until_sent() and senders.sync(mode="compiled")["num_pulled"]
        pid = near.process.pid
        seen = ranks.run(fail_amid_sending, partial(stop_engine, pid=pid, by=signal.SIGKILL))
        (error,) = {rank["error"] for rank in seen}
        assert near.url.removeprefix("http://") in error
        assert seen[0]["seconds"] < 25
        assert senders.sync(mode="compiled", members=(0,))["num_buckets"]
        engines.check()


def test_a_server_dead_in_a_sync_is_named(engines):
    """The last test of the file: no server survives it."""
    pids = engines.pids

    def kill(rank, target):
        if rank.rank == 0:
            os.killpg(pids[target], signal.SIGKILL)  # its schedulers might publish without it

    def dying(rank):
        weights = rank.weights()
        return calling_at(weights, len(weights) // 2, lambda: kill(rank, 1))

    with engines.ranks(2) as ranks:
        senders = Senders(ranks, engines.targets, timeout_s=20)
        senders.sync()
        broadcast = senders.attempt(dying)
        senders.sync(members=(0,))  # without the dead one
        assert senders_that_fail(engines, ranks, 0).until_sent()
        sending = ranks.run(fail_amid_sending, lambda rank: kill(rank, 0))
    for server, seen in ((engines.servers[1], broadcast), (engines.servers[0], sending)):
        (error,) = {rank["error"] for rank in seen}
        assert server.url.removeprefix("http://") in error
        assert seen[0]["seconds"] < 25
