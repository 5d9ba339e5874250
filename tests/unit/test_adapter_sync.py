"""The LoRA adapter of several engines: replaced on each, also where one of them has failed."""

import asyncio
from concurrent.futures import Future
from dataclasses import replace

import pytest

from verl_sglang_sync.engine.server_client import operations
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.sync.adapter_sync import AdapterSync, AdapterUpdate
from verl_sglang_sync.trainer_ranks import TrainerRanks, WeightSyncError

UPDATE = AdapterUpdate(
    unload=operations.unload_adapter("lora"),
    load=operations.load_adapter("lora", {}, b"weights", num_copies=None),
    num_tensors=3,
    nbytes=24,
)


REFUSED = replace(UPDATE, refusal="lora_bias=True")


class Engine:
    """Serves one adapter, and refuses as SGLang does.

    Attributes:
        fails: the operation that it fails at.
        loses: the operation that it does, and nobody hears of.
        num_loads: adapters that it has loaded.
    """

    def __init__(self):
        self.serves, self.fails, self.loses = False, "", ""
        self.num_loads = 0

    def submit(self, call):
        reply = Future()
        is_load, path = call == UPDATE.load, call.operation.path
        if is_load == self.serves or path == self.fails:
            reply.set_exception(RuntimeError(f"{path} is refused"))
            return reply
        self.serves = is_load
        self.num_loads += is_load
        if path == self.loses:
            reply.set_exception(RuntimeError("the reply was lost"))
        else:
            reply.set_result({})
        return reply


def sync(adapters, **engines):
    """The report of a sync after which all of these serve the adapter."""
    report = SyncReport(mode="compiled", replica=None)
    asyncio.run(adapters.sync(lambda: UPDATE, engines, report))
    assert all(engine.serves for engine in engines.values())
    return report


def test_changed_engines_serve_the_adapter_after_next_sync():
    first, second, late = Engine(), Engine(), Engine()
    adapters = AdapterSync(TrainerRanks())
    assert "unload_adapter" not in sync(adapters, first=first, second=second).seconds
    report = sync(adapters, first=first)  # the second one is left out, and serves what it had
    assert (report.num_tensors, report.sent_bytes) == (3, 24)
    assert {"unload_adapter", "load_adapter", "export"} <= report.seconds.keys()
    for call in (UPDATE.unload, UPDATE.load):
        second.fails = call.operation.path
        with pytest.raises(WeightSyncError, match=f"{UPDATE.load.operation.path} is refused"):
            sync(adapters, first=first, second=second)
        second.fails = ""
        sync(adapters, first=first, second=second, late=late)


def test_after_lost_replies_the_next_adapter_is_served():
    engine, adapters = Engine(), AdapterSync(TrainerRanks())
    engine.loses = UPDATE.load.operation.path
    with pytest.raises(WeightSyncError, match="reply was lost"):
        sync(adapters, engine=engine)
    for lost in ("", "", UPDATE.unload.operation.path, "", ""):
        engine.loses = lost
        sync(adapters, engine=engine)


def test_a_refused_adapter_leaves_every_engine_unchanged():
    serving, empty, adapters = Engine(), Engine(), AdapterSync(TrainerRanks())
    sync(adapters, serving=serving)
    report = SyncReport(mode="compiled", replica=None)
    engines = {"serving": serving, "empty": empty}
    with pytest.raises(WeightSyncError, match="lora_bias=True"):
        asyncio.run(adapters.sync(lambda: REFUSED, engines, report))
    assert (serving.num_loads, serving.serves) == (1, True)
    assert (empty.num_loads, empty.serves) == (0, False)
