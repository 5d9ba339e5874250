"""What happens between trainer and server is survived, or named on every rank, in bounded time.

One real server with API keys, TP 2, two real trainer ranks, and a proxy that loses, holds, cuts
and repeats. That nothing was applied twice or skipped is counted by the engine's own ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_assets import make_assets

from support.engine_hash import HASH_LOADER
from support.fault_proxy import fault_proxy
from support.fault_steps import (
    KEYS,
    MODES,
    UPDATE_TIMEOUT_S,
    faults_of_a_request,
    faults_that_fail,
    kill_between_buckets,
)
from support.load_counter import COUNT_LOADER
from support.sglang_server import Server, free_port, sglang_server
from support.trainer import Outcome, Step, run_trainer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TP = 2


@dataclass(frozen=True)
class Case:
    """The server, the proxy in front of it, and what the ranks saw through the proxy."""

    server: Server
    proxy: str
    folder: Path
    faults: list[Outcome]

    @property
    def model(self) -> str:
        """The checkpoint."""
        return str(self.folder / "model")

    def run(self, step: Step, url: str, *args: Any) -> list[Any]:
        """Results of a step by rank."""
        outcomes = run_trainer(step, self.folder, url, *args, urls=[url], tp=TP)
        assert [outcome.error for outcome in outcomes] == [None] * TP
        return [outcome.result for outcome in outcomes]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """All faults of the proxy, in one start of the trainer."""
    folder = tmp_path_factory.mktemp("faults")
    make_assets(folder)
    model = folder / "model"
    keys = ("--api-key", KEYS["api_key"], "--admin-api-key", KEYS["admin_api_key"])
    loaders = (HASH_LOADER, COUNT_LOADER)
    with (
        sglang_server(model, folder, tp=TP, loaders=loaders, extra=keys) as server,
        fault_proxy(server.url) as proxy,
    ):
        arguments = (proxy, str(model), str(folder))
        faults = run_trainer(faults_of_a_request, folder, *arguments, urls=[proxy], tp=TP)
        yield Case(server, proxy, folder, faults)


def results_of(case: Case) -> list[dict[str, Any]]:
    """What each rank saw; none failed."""
    assert [outcome.error for outcome in case.faults] == [None] * TP
    return [outcome.result for outcome in case.faults]


def leader(case: Case) -> dict[str, Any]:
    """What the leader saw; no rank failed."""
    return results_of(case)[0]


def fault_of(result: dict[str, Any], mode: str, kind: str) -> dict[str, Any]:
    """What a rank saw of one fault."""
    (fault,) = (f for f in result["faults"] if (f["mode"], f["kind"]) == (mode, kind))
    return dict(fault)


def hashes_at(result: dict[str, Any], scale: float) -> Any:
    """Of the engine's weights once they are the trainer's times `scale`."""
    return result["reference" if scale == 1.0 else "half"]


@pytest.mark.parametrize("kind", ["lose", "hold"])
@pytest.mark.parametrize("mode", MODES)
def test_a_reply_that_is_lost_once_the_weights_are_published_fails_nothing(
    case: Case, mode: str, kind: str
) -> None:
    result = leader(case)
    fault = fault_of(result, mode, kind)
    assert fault["error"] is None
    assert fault["loads"] == [1] * TP  # the engine's own count
    assert fault["hashes"] == hashes_at(result, fault["scale"])
    assert fault["version"] == f"{mode}, {kind}"
    assert [(request["fault"], request["status"]) for request in fault["requests"]] == [(kind, 200)]
    assert fault["seconds"] < UPDATE_TIMEOUT_S + 10
    if kind == "hold":  # the weights have arrived, only the reply has not
        assert fault["synced_s"] < UPDATE_TIMEOUT_S < fault["seconds"]


@pytest.mark.parametrize("mode", MODES)
def test_a_reply_that_is_lost_before_fails_the_sync_on_every_rank(case: Case, mode: str) -> None:
    result = leader(case)
    faults = [fault_of(rank, mode, "cut") for rank in results_of(case)]
    (error,) = {fault["error"] for fault in faults}
    assert "ConnectionBroken: rank 0, replica 0: " in error
    assert "not sent again, because it may have been executed" in error
    assert max(fault["seconds"] for fault in faults) < 10
    fault = faults[0]
    assert fault["loads"] == [0] * TP
    assert fault["hashes"] == hashes_at(result, 1.5 - fault["scale"])  # as before
    assert fault["version"] == "good"
    assert [request["fault"] for request in fault["requests"]] == ["cut"]


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_arrives_twice_is_executed_once(case: Case, mode: str) -> None:
    result = leader(case)
    fault = fault_of(result, mode, "twice")
    assert fault["error"] is None
    first, second = fault["requests"]
    assert (first["status"], second["status"]) == (200, 400)
    assert "the same request has come before: it is not executed again" in second["text"]
    assert fault["loads"] == [1] * TP
    assert fault["hashes"] == hashes_at(result, fault["scale"])
    assert fault["version"] == f"{mode}, twice"
    assert fault["seconds"] < 10


@pytest.mark.parametrize("kind", ["lose", "hold", "cut", "twice"])
@pytest.mark.parametrize("mode", MODES)
def test_the_sync_after_a_fault_is_right(case: Case, mode: str, kind: str) -> None:
    fault = fault_of(leader(case), mode, kind)
    assert [fault_of(rank, mode, kind)["good"]["error"] for rank in results_of(case)] == [None] * TP
    assert fault["good_hashes"] == hashes_at(leader(case), fault["scale"])


def test_the_weights_were_others_at_each_sync(case: Case) -> None:
    """Else equal hashes would prove nothing."""
    result = leader(case)
    for whole, half in zip(result["reference"], result["half"], strict=True):
        assert not [name for name in whole if whole[name] == half[name]]
    scales = [fault["scale"] for fault in result["faults"]]
    assert all(a != b for a, b in itertools.pairwise(scales))


def test_what_does_not_heal_is_named_on_every_rank(case: Case) -> None:
    closed = f"http://127.0.0.1:{free_port()}"
    results = case.run(faults_that_fail, case.server.url, closed, case.model, str(case.folder))
    named = {
        "refused": f"ServerUnreachable: rank 0, replica 0: {closed}/update_weights_from_tensor: "
        "no connection in 3 attempts: ",
        "wrong key": f"NotAuthorized: rank 0, replica 0: {case.server.url}/"
        "update_weights_from_tensor: HTTP 401: the server refused the admin_api_key",
    }
    for name, text in named.items():
        for mode in MODES:
            seen = [result[f"{name}, {mode}"] for result in results]
            (error,) = {rank["failed"]["error"] for rank in seen}
            assert text in error
            assert max(rank["failed"]["seconds"] for rank in seen) < 10
            assert [rank["good"]["error"] for rank in seen] == [None] * TP
            assert seen[0]["hashes"] == leader(case)["reference"]


def test_a_server_killed_between_two_buckets_is_named_on_every_rank(case: Case) -> None:
    """The last test of the file: it ends the server."""
    pid = case.server.process.pid
    results = case.run(kill_between_buckets, case.server.url, case.model, pid)
    (error,) = {result["error"] for result in results}
    assert "the engine's process is gone" in error or "ServerUnreachable" in error
    assert max(result["seconds"] for result in results) < 3 * UPDATE_TIMEOUT_S + 10
    assert case.server.process.wait(10) < 0
