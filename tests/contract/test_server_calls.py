"""Whatever verl calls on a replica or on its server actor is there, and takes what verl gives.

The calls are found in verl's sources, so a new one is checked as soon as verl has it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # sglang reads it while it is imported

FOLDERS = ("checkpoint_engine", "experimental", "workers", "trainer")
OTHER_ENGINES = re.compile(r"vllm|trtllm|sglang_pd")
ACTOR = re.compile(r"(.*[._])?(server|servers\[\w+\]|server_actor|server_handle)")
REPLICA = re.compile(r"(.*[._])?(r|replica|replicas\[\w+\])")
VERLS = "verl.workers.rollout.sglang_rollout.async_sglang_server"


@dataclass(frozen=True)
class Call:
    """A call in verl's sources; `arguments` as text, `None` for a keyword is `**`."""

    where: str
    method: str
    arguments: tuple[str, ...]
    keywords: tuple[str | None, ...]

    def check(self, ours: type[Any]) -> None:
        """Fail unless `ours` has the method and it takes the arguments."""
        method = getattr(ours, self.method, None)
        assert method is not None, f"{self.where} calls {ours.__name__}.{self.method}"
        given = {keyword: None for keyword in self.keywords if keyword is not None}
        try:
            inspect.signature(method).bind(None, *self.arguments, **given)
        except TypeError as error:
            raise AssertionError(f"{self.where}: {ours.__name__}.{self.method}: {error}") from None


def calls_in(source: str, where: str) -> Iterator[tuple[str, Call]]:
    """("actor" or "replica", call) of every call on one of those."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        target = node.func
        is_remote = target.attr == "remote" and isinstance(target.value, ast.Attribute)
        if is_remote:
            target = target.value  # type: ignore[assignment]
        receiver, kind = ast.unparse(target.value), "actor" if is_remote else "replica"
        if (ACTOR if is_remote else REPLICA).fullmatch(receiver):
            arguments = tuple(ast.unparse(argument) for argument in node.args)
            keywords = tuple(keyword.arg for keyword in node.keywords)
            yield kind, Call(f"{where}:{node.lineno}", target.attr, arguments, keywords)


@pytest.fixture(scope="module")
def calls() -> dict[str, list[Call]]:
    """All calls of verl's that concern SGLang, by whom they are made on."""
    from verl.workers.rollout.replica import RolloutReplica
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

    root = Path(inspect.getfile(importlib.import_module("verl"))).parent
    replaced = {  # SGLang's replica makes these calls in its own way
        f"workers/rollout/replica.py:{first + line}"
        for name, method in vars(RolloutReplica).items()
        if inspect.isfunction(method) and getattr(SGLangReplica, name) is not method
        for lines, first in (inspect.getsourcelines(method),)
        for line in range(len(lines))
    }
    found: dict[str, list[Call]] = {"actor": [], "replica": []}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name = str(path.relative_to(root))
            if not OTHER_ENGINES.search(name):
                for kind, call in calls_in(path.read_text(), name):
                    if call.where not in replaced:
                        found[kind].append(call)
    return found


def ours(kind: str) -> type[Any]:
    from verl_sglang_sync.verl.replica import WeightSyncHttpServer, WeightSyncReplica

    return {"actor": WeightSyncHttpServer, "replica": WeightSyncReplica}[kind]


@pytest.mark.parametrize(
    ("kind", "methods"),
    [
        (
            "actor",
            {
                *("launch_server", "get_master_address", "get_server_address", "generate"),
                *("wake_up", "sleep", "abort_all_requests", "resume_generation"),
                *("clear_kv_cache", "release_kv_cache", "resume_kv_cache"),
                *("set_global_steps", "start_profile", "stop_profile"),
            },
        ),
        (
            "replica",
            {
                *("wake_up", "sleep", "abort_all_requests", "resume_generation"),
                *("release_kv_cache", "resume_kv_cache", "start_profile", "stop_profile"),
            },
        ),
    ],
)
def test_every_call_of_verls_is_taken(
    calls: dict[str, list[Call]], kind: str, methods: set[str]
) -> None:
    assert {call.method for call in calls[kind]} >= methods, "the calls were not found"
    for call in calls[kind]:
        call.check(ours(kind))


def test_the_manager_may_ask_a_replica_to_reject_requests(calls: dict[str, list[Call]]) -> None:
    asked = [c for c in calls["replica"] if c.method == "abort_all_requests"]
    assert ("reject_request",) in {call.keywords for call in asked}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (Call("x:1", "gone", (), ()), "x:1 calls WeightSyncHttpServer.gone"),
        (Call("x:2", "set_global_steps", (), ()), "missing a required argument"),
        (Call("x:3", "sleep", (), ("level",)), "unexpected keyword argument 'level'"),
    ],
)
def test_a_call_that_is_not_taken_would_be_named(call: Call, message: str) -> None:
    """Negative control."""
    with pytest.raises(AssertionError, match=message):
        call.check(ours("actor"))


@pytest.mark.parametrize(("kind", "verls"), [("actor", "HttpServer"), ("replica", "Replica")])
def test_every_public_method_has_verls_signature(kind: str, verls: str) -> None:
    upstream = getattr(importlib.import_module(VERLS), f"SGLang{verls}")
    compared = 0
    for name, method in inspect.getmembers(upstream, inspect.isfunction):
        if not name.startswith("_"):
            mine = inspect.signature(getattr(ours(kind), name))
            assert list(mine.parameters) == list(inspect.signature(method).parameters), name
            assert inspect.iscoroutinefunction(getattr(ours(kind), name)) == (
                inspect.iscoroutinefunction(method)
            ), name
            compared += 1
    assert compared > 10
