"""What happens between trainer and server is survived, or named on every rank, in bounded time.

One real server with API keys, TP 2, two real trainer ranks, and a proxy that loses, holds, cuts
and repeats. That nothing was applied twice or skipped is counted by the engine's own ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from support.engine_loaders import COUNT_LOADER
from support.fault_proxy import fault_proxy
from support.fault_steps import (
    KEYS,
    MODES,
    UPDATE_TIMEOUT_S,
    faults_of_a_request,
    faults_that_fail,
    kill_between_buckets,
)
from support.served import Served, served
from verl_sglang_sync.bench.engine_server import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TP = 2


@dataclass(frozen=True)
class Case:
    """The engine, and what each rank saw through the proxy in front of it."""

    engine: Served
    results: list[dict[str, Any]]

    def faults(self, mode: str, kind: str) -> list[dict[str, Any]]:
        """What each rank saw of one fault, the leader first."""
        return [
            next(f for f in result["faults"] if (f["mode"], f["kind"]) == (mode, kind))
            for result in self.results
        ]

    def hashes(self, scale: float) -> Any:
        """Of the engine's weights once they are the trainer's times `scale`."""
        return self.results[0]["reference" if scale == 1.0 else "half"]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """All faults of the proxy, in one start of the trainer."""
    keys = ("--api-key", KEYS["api_key"], "--admin-api-key", KEYS["admin_api_key"])
    folder = tmp_path_factory.mktemp("faults")
    with (
        served(folder, tp=TP, loaders=(COUNT_LOADER,), extra=keys) as engine,
        fault_proxy(engine.url) as proxy,
    ):
        yield Case(engine, engine.run(faults_of_a_request, proxy, url=proxy))


@pytest.mark.parametrize("kind", ["lose", "hold", "twice"])
@pytest.mark.parametrize("mode", MODES)
def test_the_weights_are_published_once_though_a_reply_is_lost_or_a_request_comes_twice(
    case: Case, mode: str, kind: str
) -> None:
    fault = case.faults(mode, kind)[0]
    assert fault["error"] is None
    assert fault["loads"] == [1] * TP  # the engine's own count
    assert fault["hashes"] == case.hashes(fault["scale"])
    assert fault["version"] == f"{mode}, {kind}"
    assert fault["seconds"] < UPDATE_TIMEOUT_S + 10
    assert {request["fault"] for request in fault["requests"]} == {kind}
    statuses = [request["status"] for request in fault["requests"]]
    assert statuses == ([200, 400] if kind == "twice" else [200])
    if kind == "twice":
        text = fault["requests"][1]["text"]
        assert "the same request has come before: it is not executed again" in text
        assert fault["seconds"] < 10
    if kind == "hold":  # the weights have arrived, only the reply has not
        assert fault["synced_s"] < UPDATE_TIMEOUT_S < fault["seconds"]


@pytest.mark.parametrize("mode", MODES)
def test_a_reply_that_is_lost_before_fails_the_sync_on_every_rank(case: Case, mode: str) -> None:
    faults = case.faults(mode, "cut")
    (error,) = {fault["error"] for fault in faults}
    assert "ConnectionBroken: rank 0, replica 0: " in error
    assert "not sent again, because it may have been executed" in error
    assert max(fault["seconds"] for fault in faults) < 10
    fault = faults[0]
    assert fault["loads"] == [0] * TP
    assert fault["hashes"] == case.hashes(1.5 - fault["scale"])  # as before
    assert fault["version"] == "good"
    assert [request["fault"] for request in fault["requests"]] == ["cut"]


@pytest.mark.parametrize("kind", ["lose", "hold", "cut", "twice"])
@pytest.mark.parametrize("mode", MODES)
def test_the_sync_after_a_fault_is_right(case: Case, mode: str, kind: str) -> None:
    faults = case.faults(mode, kind)
    assert [fault["good"] for fault in faults] == [None] * TP
    assert faults[0]["good_hashes"] == case.hashes(faults[0]["scale"])


def test_the_weights_were_others_at_each_sync(case: Case) -> None:
    """Else equal hashes would prove nothing."""
    for whole, half in zip(case.hashes(1.0), case.hashes(0.5), strict=True):
        assert not [name for name in whole if whole[name] == half[name]]
    scales = [fault["scale"] for fault in case.results[0]["faults"]]
    assert all(a != b for a, b in itertools.pairwise(scales))


def test_what_does_not_heal_is_named_on_every_rank(case: Case) -> None:
    closed, url = f"http://127.0.0.1:{free_port()}", case.engine.url
    results = case.engine.run(faults_that_fail, url, closed)
    named = {
        "refused": f"ServerUnreachable: rank 0, replica 0: {closed}/update_weights_from_tensor: "
        "no connection in 3 attempts: ",
        "wrong key": f"NotAuthorized: rank 0, replica 0: {url}/update_weights_from_tensor: "
        "HTTP 401: the server refused the admin_api_key",
    }
    for name, text in named.items():
        for mode in MODES:
            seen = [result[f"{name}, {mode}"] for result in results]
            (error,) = {rank["failed"]["error"] for rank in seen}
            assert text in error
            assert max(rank["failed"]["seconds"] for rank in seen) < 10
            assert [rank["good"] for rank in seen] == [None] * TP
            assert seen[0]["hashes"] == case.hashes(1.0)


def test_a_server_killed_between_two_buckets_is_named_on_every_rank(case: Case) -> None:
    """The last test of the file: it ends the server."""
    process = case.engine.server.process
    results = case.engine.run(kill_between_buckets, case.engine.url, process.pid)
    (error,) = {result["error"] for result in results}
    assert "the engine's process is gone" in error or "ServerUnreachable" in error
    assert max(result["seconds"] for result in results) < 3 * UPDATE_TIMEOUT_S + 10
    assert process.wait(10) < 0
