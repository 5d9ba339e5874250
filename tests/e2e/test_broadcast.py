"""Disaggregated mode on real processes: bit-exact weights for each trainer world and rollout TP.

Two real engines, of TP 1 and TP 2; trainers of one, two and four ranks sync to one, to both, and to
the other, with process groups kept where the replicas are the same and formed anew where not.
One of the engines listens at ::1, and in mode compiled the group meets there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tiny_assets import make_assets

from support.broadcast_steps import (
    BOTH,
    LIMIT_S,
    PLAN,
    SENDS,
    broadcast_syncs,
    dies_amid_sending,
    dies_as_it_is_read,
    faults_amid_sending,
    good_sync,
    sent_syncs,
    syncs_and_faults,
)
from support.remote import results_of
from support.sglang_server import Server, loopback, sglang_server
from support.trainer import Step, run_trainer
from verl_sglang_sync.engine.server_client import SGLangServerClient, operations

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@dataclass(frozen=True)
class Engines:
    """A TP 1 and a TP 2 engine of one checkpoint."""

    servers: tuple[Server, Server]
    folder: Path

    def run(self, step: Step, *args: Any, world_size: int) -> list[dict[str, Any]]:
        """Run trainer ranks, whose group is their own; their results."""
        targets = [[server.url, tp] for server, tp in zip(self.servers, (1, 2), strict=True)]
        urls = [self.servers[0].url] * world_size
        return results_of(run_trainer(step, self.folder, targets, *args, urls=urls))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("broadcast")
    make_assets(folder, architecture="qwen3_moe")
    with ExitStack() as stack:
        servers = []
        for tp, host in ((1, loopback()), (2, "127.0.0.1")):
            own = folder / f"tp{tp}"
            own.mkdir()
            server = sglang_server(folder / "model", own, tp=tp, host=host)
            servers.append(stack.enter_context(server))
        yield Engines((servers[0], servers[1]), folder)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_trainer_rank_sends_what_every_engine_rank_reads(
    engines: Engines, world_size: int
) -> None:
    """To each replica alone, to both, and after one has left and joined again."""
    seen = engines.run(sent_syncs, world_size=world_size)[0]
    check_hashes(seen, SENDS)
    reports = [sync["report"] for sync in seen["syncs"]]
    by_members = {members: report for (_, members), report in zip(SENDS, reports, strict=True)}
    for members, report in by_members.items():
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


def check_hashes(
    seen: dict[str, Any], syncs: Sequence[tuple[float, tuple[int, ...]]]
) -> dict[float, list[Any]]:
    """Every sync left its members with its weights, and the others as they were.

    Args:
        seen: of a trainer.
        syncs: the weights' scale and the members of each.

    Returns:
        By scale, then by engine, what it has then.
    """
    by_scale: dict[float, list[Any]] = {1.0: seen["reference"]}
    state = [1.0, 1.0]
    for (scale, members), sync in zip(syncs, seen["syncs"], strict=True):
        for member in members:
            state[member] = scale
        for target, hashes in enumerate(sync["hashes"]):
            expected = by_scale.setdefault(state[target], [None, None])
            if expected[target] is None:
                expected[target] = hashes
            assert hashes == expected[target], (scale, members)
    return by_scale


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_engines_on_the_trainers_host_read_every_rank_s_shards_where_they_are(
    engines: Engines, world_size: int
) -> None:
    """As each replica alone, as both, and after one has left and joined again."""
    seen = engines.run(sent_syncs, SENDS, None, True, world_size=world_size)[0]
    check_hashes(seen, SENDS)
    reports = [sync["report"] for sync in seen["syncs"]]
    is_pulled = [report["num_pulled"] == report["num_buckets"] for report in reports]
    changes = [i for i, (_, who) in enumerate(SENDS) if i == 0 or who != SENDS[i - 1][1]]
    assert [i for i, pulled in enumerate(is_pulled) if not pulled] == changes
    for report, pulled in zip(reports, is_pulled, strict=True):
        if pulled:
            assert report["num_replayed"] == report["num_buckets"]
            assert (report["num_sent"], report["num_eager"], report["staging_bytes"]) == (0, 0, 0)


def test_what_is_sent_is_compared_with_the_export_again_in_every_second_sync(
    engines: Engines,
) -> None:
    sends = [(scale, BOTH) for scale in (0.5, 2.0, 4.0, 0.5, 2.0, 4.0, 0.5, 1.0)]
    settings = {"recheck_every_n_syncs": 2}
    seen = engines.run(sent_syncs, sends, settings, world_size=2)[0]
    by_scale: dict[float, Any] = {1.0: seen["reference"]}
    for (scale, _), sync in zip(sends, seen["syncs"], strict=True):
        assert sync["hashes"] == by_scale.setdefault(scale, sync["hashes"])
    is_sent = [bool(sync["report"]["num_sent"]) for sync in seen["syncs"]]
    assert is_sent[-4:] in ([True, False, True, False], [False, True, False, True])


def test_whoever_fails_amid_sending_is_named_and_the_next_sync_is_right(engines: Engines) -> None:
    pids = [server.process.pid for server in engines.servers]
    seen = engines.run(faults_amid_sending, pids, world_size=2)
    url = engines.servers[1].url
    for fault, texts in (
        ("cannot pack", ("rank 1: Traceback", "no room to pack")),
        (
            "engine stopped",
            (f"{url}, TP rank ", f"no message from the engine within {LIMIT_S:g} s"),
        ),
        ("trainer rank stopped", ("rank 1 did not answer the other trainer ranks",)),
    ):
        first = seen[0][fault]
        assert all(text in first["error"] for text in texts), first["error"]
        assert first["seconds"] < LIMIT_S + 15, fault
        assert seen[1][fault]["error"] != "no error"
        assert first["num_sent"] > 0, "it is sent again"
        assert first["hashes"] == seen[0]["reference"]


@pytest.mark.parametrize(
    ("step", "said"),
    [(dies_amid_sending, "rank 1 did not answer"), (dies_as_it_is_read, "rank 1")],
    ids=("amid sending", "as engines read its shards"),
)
def test_a_trainer_rank_that_dies_is_named_in_time(engines: Engines, step: Step, said: str) -> None:
    urls = [server.url for server in engines.servers]
    targets = [[url, tp] for url, tp in zip(urls, (1, 2), strict=True)]
    first, second = run_trainer(step, engines.folder, targets, urls=urls)
    assert "SIGKILL" in str(second.error)
    assert said in first.result["error"]
    assert first.result["seconds"] < LIMIT_S + 15
    (again,) = engines.run(good_sync, world_size=1)
    assert again == first.result["reference"]


def test_an_ipv6_server_is_told_updates_and_asked_for_its_state(engines: Engines) -> None:
    """The first engine listens at ::1, and all that the other tests saw of it came from there."""
    engines.run(good_sync, world_size=1)
    url = engines.servers[0].url
    if "127.0.0.1" in url:
        pytest.skip("this host has no IPv6 loopback")
    assert url.startswith("http://[::1]:")
    server_info = operations.Call(replace(operations.MODEL_INFO, path="server_info"))
    with SGLangServerClient(url, timeout_s=60) as client:
        assert client.run(server_info)["host"] == "::1"
        assert client.run(operations.model_info())["weight_version"] == "v"


@pytest.fixture(scope="module")
def two_ranks(engines: Engines) -> list[dict[str, Any]]:
    """What a trainer of two ranks saw; it ends with the death of both servers."""
    check_syncs(engines.run(broadcast_syncs, world_size=1)[0])
    pids = [server.process.pid for server in engines.servers]
    return engines.run(syncs_and_faults, pids, world_size=2)


def check_syncs(seen: dict[str, Any]) -> None:
    """Every sync of `PLAN` left the members with its weights and the others as they were."""
    by_scale = check_hashes(seen, [(scale, members) for _, scale, _, members in PLAN])
    for (what, *_), sync in zip(PLAN, seen["syncs"], strict=True):
        report = sync["report"]
        assert report["num_buckets"] > 2
        assert report["staging_bytes"] > 0
        if what.startswith("compiled"):
            loaded = report["num_replayed"], report["num_eager"], report["eager_reason"]
            made = 0, report["num_buckets"], "the plan is being made"
            # a later trainer finds the plan that the engines made for an earlier one
            assert loaded == (report["num_buckets"], 0, None) or ("made" in what and loaded == made)
    distinct = [str(by_scale[scale][0]) for scale in (0.5, 0.25, 2.0, 4.0, 1.0)]
    assert len(set(distinct)) == len(distinct)
    formed = [sync["num_formed"] for sync in seen["syncs"]]
    assert formed == [1, 1, 2, 1, 1, 3, 4]  # "compiled" has groups of its own


def test_replicas_come_and_go_and_all_weights_arrive(
    engines: Engines, two_ranks: list[dict[str, Any]]
) -> None:
    check_syncs(two_ranks[0]["syncs"])
    assert "buckets replayed, 0 loaded eagerly" in engines.servers[1].log.read_text()


def test_a_fault_is_named_on_every_rank_and_the_next_sync_is_right(
    two_ranks: list[dict[str, Any]],
) -> None:
    seen = [result["faults"] for result in two_ranks]
    reference = two_ranks[0]["syncs"]["reference"]
    for fault, text in (
        ("shape", r"TP rank \d: Traceback"),  # of whichever engine rank says it first
        ("manifest", "1 unexpected: "),
        ("cannot pack", "meta tensor"),
        ("other tensors on one rank", "the ranks exported different tensors"),
    ):
        (error,) = {rank[fault]["error"] for rank in seen}
        assert re.search(text, error), error
        assert seen[0][fault]["seconds"] < 20
        assert seen[0][fault]["hashes"] == reference


def test_what_others_send_with_the_trainers_group_is_refused_before_anything_is_received(
    two_ranks: list[dict[str, Any]],
) -> None:
    """A receive that nobody meets would meet the next broadcast, and gloo ends the engine there. A
    group that an engine was told to leave is formed anew before anything is sent.
    """
    seen = two_ranks[0]["strangers"]
    assert "the same request has come before" in seen["answers"]["repeated"]
    assert "changed on its way" in seen["answers"]["changed"]
    assert "a group of verl-sglang-sync" in seen["answers"]["in sglang's format"]
    assert seen["num_formed"] == 2
    assert seen["hashes"] == two_ranks[0]["syncs"]["reference"]


def test_a_replica_that_does_not_join_is_named_and_the_others_leave_at_once(
    engines: Engines, two_ranks: list[dict[str, Any]]
) -> None:
    seen = [result["refusal"] for result in two_ranks]
    (error,) = {rank["refused"]["error"] for rank in seen}
    url = engines.servers[1].url
    assert f"replica 1 ({url}) did not join the update group: {url}/init_" in error
    assert seen[0]["refused"]["seconds"] < 20
    for what in ("the other alone", "both again"):
        assert seen[0][what]["error"] == "no error"
        assert seen[0][what]["seconds"] < 20, "its ranks waited for the one that did not come"
    assert seen[0]["hashes"] == two_ranks[0]["syncs"]["reference"]


def test_a_server_that_dies_mid_sync_is_named_in_time(
    engines: Engines, two_ranks: list[dict[str, Any]]
) -> None:
    seen = [result["death"] for result in two_ranks]
    for server, how in ((engines.servers[1], "broadcast"), (engines.servers[0], "sending")):
        (error,) = {rank[how]["error"] for rank in seen}
        assert server.url.removeprefix("http://") in error
        assert seen[0][how]["seconds"] < 25
