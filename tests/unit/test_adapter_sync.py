"""The LoRA adapter of several engines: replaced on each, also where one of them has failed."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from verl_sglang_sync.collective import SingleProcess, WeightSyncError
from verl_sglang_sync.engine.server_client import operations
from verl_sglang_sync.engine.server_client.operations import Call
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.sync.adapter_sync import AdapterSync, AdapterUpdate

UPDATE = AdapterUpdate(
    unload=operations.unload_adapter("lora"),
    load=operations.load_adapter("lora", {}, b"weights", num_copies=None),
    num_tensors=3,
    nbytes=24,
)


class Engine:
    """Serves one adapter, and refuses as SGLang does; `fails`: the operation that it fails at."""

    def __init__(self) -> None:
        self.serves, self.fails = False, ""

    def submit(self, call: Call) -> Future[Any]:
        reply: Future[Any] = Future()
        is_load, path = call == UPDATE.load, call.operation.path
        if is_load == self.serves or path == self.fails:
            reply.set_exception(RuntimeError(f"{path} is refused"))
            return reply
        self.serves = is_load
        reply.set_result({})
        return reply


def test_engines_that_come_go_and_fail_serve_the_adapter_after_the_next_sync() -> None:
    first, second, late = Engine(), Engine(), Engine()
    adapters = AdapterSync(SingleProcess())

    def sync(**engines: Engine) -> SyncReport:
        report = SyncReport(mode="compiled", replica=None)
        asyncio.run(adapters.sync(lambda: UPDATE, engines, report))
        assert all(engine.serves for engine in engines.values())
        return report

    assert "unload_adapter" not in sync(first=first, second=second).seconds
    report = sync(first=first)  # the second one is left out, and serves what it had
    assert (report.num_tensors, report.sent_bytes) == (3, 24)
    assert {"unload_adapter", "load_adapter", "export"} <= report.seconds.keys()
    for call in (UPDATE.unload, UPDATE.load):
        second.fails = call.operation.path
        with pytest.raises(WeightSyncError, match=f"{second.fails} is refused"):
            sync(first=first, second=second)
        second.fails = ""
        sync(first=first, second=second, late=late)
