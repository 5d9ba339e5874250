"""What happens between trainer and server is survived, or named on every rank, in bounded time.

One real server with API keys, TP 2, two real trainer ranks, and a proxy that loses, holds and
cuts. That nothing was applied twice or skipped is counted by the engine's own ranks.
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
    faults_that_fail,
    faults_that_heal,
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
    healed: list[Outcome]

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
    """All faults that heal, in one start of the trainer."""
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
        healed = run_trainer(faults_that_heal, folder, *arguments, urls=[proxy], tp=TP)
        yield Case(server, proxy, folder, healed)


def leader(case: Case) -> dict[str, Any]:
    """What the leader saw; no rank failed."""
    assert [outcome.error for outcome in case.healed] == [None] * TP
    seen: dict[str, Any] = case.healed[0].result
    return seen


HEALED = [(mode, kind) for mode in MODES for kind in ("lose", "hold", "cut")]


@pytest.mark.parametrize(("mode", "kind"), HEALED)
def test_a_fault_is_healed_and_the_sync_applied_once(case: Case, mode: str, kind: str) -> None:
    result = leader(case)
    (fault,) = (f for f in result["faults"] if (f["mode"], f["kind"]) == (mode, kind))
    assert fault["error"] is None
    assert fault["loads"] == [1] * TP  # the engine's own count
    assert fault["hashes"] == result["reference" if fault["scale"] == 1.0 else "half"]
    requests = fault["requests"]
    hit = next(i for i, request in enumerate(requests) if request["fault"] == kind)
    keys = [request["key"] for request in requests]
    assert len(requests) == 2
    assert keys[hit] == keys[hit + 1]
    assert (requests[hit + 1]["status"], requests[hit + 1]["replayed"]) == (200, "true")
    assert fault["seconds"] < 3 * UPDATE_TIMEOUT_S + 10
    if kind == "hold":  # the weights have arrived, only the reply has not
        assert fault["synced_s"] < UPDATE_TIMEOUT_S < fault["seconds"]


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
