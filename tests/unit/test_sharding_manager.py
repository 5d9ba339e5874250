"""The stages of a wake-up and a sleep: their order, their failures, their report."""

import asyncio
import json
from contextlib import contextmanager
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist

from support.settings import settings_of
from unit.failed_replies import BAD, LOST, failed_request
from unit.serving_engine import ServingEngine, costs_of
from unit.trainer_ranks import WORLD_SIZE, trainer_ranks
from verl_sglang_sync import WeightSyncError
from verl_sglang_sync.engine.server_client import operations
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.sync.adapter_sync import AdapterUpdate
from verl_sglang_sync.trainer_ranks import TrainerRanks

UPDATE = ("update", "1")
SYNC = {"sync", "open", "export", "pack", "load", "publish", "reply"}
HANDOVER = [("free trainer",), ("barrier",)]
SLEEP = ("release", "kv_cache", "weights")


def two_tensors():
    """Two buckets of 256 bytes."""
    return iter([("model.a", torch.ones(64)), ("model.b", torch.zeros(64))])


def make_manager(events, *, fails=None, tp=None, **settings):
    """A manager, of one process or of a rank with `tp` ranks to a replica; and its engine."""
    from verl_sglang_sync.sync.sharding_manager import SGLangShardingManager

    ranks, is_leader = trainer_ranks(tp) if tp else (TrainerRanks(), True)
    engine = ServingEngine(events, fails, tp=tp or 1) if is_leader else None
    manager = SGLangShardingManager(
        engine=engine,
        settings=settings_of(**{"bucket_bytes": 256, **settings}),
        ranks=ranks,
        device=torch.device("cpu"),
        replica=dist.get_rank() // tp if tp else 7,
    )
    return manager, engine


@contextmanager
def awake(manager, events, *, version="1"):
    """Call the manager as verl's worker does around a generation."""

    async def wake_up():
        await manager.resume(("weights",))
        await manager.sync(two_tensors(), version=version)
        events.append(("free trainer",))
        if dist.is_initialized():
            dist.barrier()
        events.append(("barrier",))
        await manager.resume(("kv_cache",))

    asyncio.run(wake_up())
    try:
        yield
    finally:
        asyncio.run(manager.release())


GRAPHS = {"release_cuda_graphs": True}
SLEEP_WITH_GRAPHS = ("release", "kv_cache", "cuda_graph", "weights")
WITH_GRAPHS = [("resume cuda_graph kv_cache",), ("body",), SLEEP_WITH_GRAPHS]
STAGES = {
    "multi-stage": (
        {"multi_stage_wake_up": True},
        [("resume weights",), UPDATE, *HANDOVER, ("resume kv_cache",), ("body",), SLEEP],
    ),
    "one stage": (
        {"multi_stage_wake_up": False},
        [("resume weights kv_cache",), UPDATE, *HANDOVER, ("resume kv_cache",), ("body",), SLEEP],
    ),
    "resident, multi-stage": (
        {"multi_stage_wake_up": True, "free_cache_engine": False},
        [UPDATE, *HANDOVER, ("body",)],
    ),
    "resident, one stage": (
        {"multi_stage_wake_up": False, "free_cache_engine": False},
        [UPDATE, *HANDOVER, ("body",)],
    ),
    "graphs, multi-stage": (
        {"multi_stage_wake_up": True, **GRAPHS},
        [("resume weights",), UPDATE, *HANDOVER, *WITH_GRAPHS],
    ),
    "graphs, one stage": (
        {"multi_stage_wake_up": False, **GRAPHS},
        [("resume weights cuda_graph kv_cache",), UPDATE, *HANDOVER, *WITH_GRAPHS],
    ),
}


@pytest.mark.parametrize(("settings", "wanted"), STAGES.values(), ids=STAGES.keys())
def test_order_of_the_stages(settings, wanted):
    from verl.utils.ulysses import BaseShardingManager

    events = []
    manager, _ = make_manager(events, **settings)
    assert isinstance(manager, BaseShardingManager)
    with awake(manager, events):
        events.append(("body",))
    assert events == wanted


def test_the_engine_sleeps_after_the_bodys_exception():
    events = []
    manager, _ = make_manager(events)
    with pytest.raises(KeyError, match="out of the body"), awake(manager, events):
        raise KeyError("out of the body")
    assert events[-1] == SLEEP
    assert events.count(SLEEP) == 1


@pytest.mark.parametrize("operation", ("resume weights", "update", "resume kv_cache"))
def test_a_failed_wake_up_skips_the_body(tmp_path, operation):
    events, path = [], tmp_path / "report.jsonl"
    manager, engine = make_manager(events, fails=operation, report_file=str(path))
    refused = pytest.raises(WeightSyncError, match=f"the engine cannot {operation}")
    with refused as error, awake(manager, events):
        events.append(("body",))
    assert "rank 0: Traceback" in str(error.value)
    assert events[-1][0] == operation
    assert ("body",) not in events and not path.exists()

    engine.fails = None
    events.clear()
    with awake(manager, events):
        events.append(("body",))
    assert ("body",) in events
    assert events[-1] == SLEEP
    (line,) = report_lines(path)
    assert (line["num_tensors"], line["num_buckets"], line["payload_bytes"]) == (2, 2, 512)


def test_a_late_bad_reply_fails_the_next_stage(caplog):
    manager, _ = make_manager([], mode="compiled")
    manager._weight_sync._unanswered = [failed_request(BAD)]
    with pytest.raises(WeightSyncError, match="resume_kv_cache") as raised:
        asyncio.run(manager.resume(("kv_cache",)))
    assert str(BAD) in str(raised.value)
    manager._weight_sync._unanswered = [failed_request(LOST)]
    asyncio.run(manager.resume(("kv_cache",)))
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "the weights were published, but the reply was lost" in record.getMessage()


def test_a_failed_sleep_keeps_the_bodys_exception():
    manager, _ = make_manager([], fails="release")
    with pytest.raises(WeightSyncError, match="stage 'release' failed"), awake(manager, []):
        pass
    manager, _ = make_manager([], fails="release")
    refused = pytest.raises(WeightSyncError, match="stage 'release' failed")
    with refused as error, awake(manager, []):
        raise KeyError("out of the body")
    assert isinstance(error.value.__context__, KeyError)


def report_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("free_cache_engine", (True, False))
def test_a_report_line_per_wake_up(tmp_path, free_cache_engine):
    path = tmp_path / "not yet there" / "report.jsonl"
    settings = {"free_cache_engine": free_cache_engine, "manifest_check": "off"}
    manager, engine = make_manager([], report_file=str(path), **settings)
    for version in ("1", "2"):
        with awake(manager, [], version=version):
            pass
    assert "sync" in manager.take_written().seconds and manager.take_written() is None
    lines = report_lines(path)
    sizes = dict.fromkeys(("payload_bytes", "sent_bytes"), 512)
    sizes["staging_bytes"] = 2 * 256
    counts = {"num_tensors": 2, "num_buckets": 2, "num_eager": 2}
    for version, line in enumerate(lines, start=1):
        seconds, told = line["seconds"], line["stages"]
        assert all(spent >= 0 for spent in seconds.values())
        assert line["started_at"].keys() == seconds.keys()
        assert set(line["engine_seconds"]) == {"waiting", "launching", "copying"}
        assert told.keys() == {"release", "resume_weights", "resume_kv_cache"} & seconds.keys()
        tags_of = {"release": ("kv_cache", "weights")}
        for stage, costs in told.items():
            assert costs == costs_of(tags_of.get(stage, (stage.removeprefix("resume_"),)))
        timed = {key: line[key] for key in ("seconds", "started_at", "engine_seconds", "stages")}
        report = SyncReport(mode="flattened", replica=7, weight_version=f"{version}", **timed)
        assert line == asdict(report) | sizes | counts
    staged = {"resume_weights", "resume_kv_cache"} if free_cache_engine else set()
    slept = {"release"} if free_cache_engine else set()
    assert [set(line["seconds"]) for line in lines] == [SYNC | staged, SYNC | staged | slept]
    assert engine.checks == ["off"]


def stages(tp, fails=(None, None), report_file=None):
    """Wake, body, sleep on this rank: (events, error). `fails`: (leader, what it cannot)."""
    events, error = [], None
    refuses = fails[1] if fails[0] == dist.get_rank() else None
    manager, _ = make_manager(events, fails=refuses, tp=tp, report_file=report_file)
    try:
        with awake(manager, events):
            events.append(("body",))
    except WeightSyncError as raised:
        error = str(raised)
    return events, error


@pytest.mark.parametrize(
    ("tp", "leader", "operation"),
    (
        (2, 0, "resume weights"),
        (2, 2, "resume weights"),
        (2, 2, "update"),
        (4, 0, "resume kv_cache"),
        (1, 3, "resume kv_cache"),
        (2, 2, "release"),
    ),
)
def test_one_leaders_failed_stage_fails_all_ranks(pool, tmp_path, tp, leader, operation):
    outcomes = pool.run(stages, tp, (leader, operation))
    errors = {error for _, error in outcomes}
    assert len(errors) == 1
    (error,) = errors
    assert f"rank {leader}: Traceback" in error
    assert f"the engine cannot {operation}" in error
    for rank, (events, _) in enumerate(outcomes):
        assert (("body",) in events) == (operation == "release")
        if rank % tp == 0 and operation != "release":
            assert events[-1][0] == operation  # no replica goes on to the next stage
    path = tmp_path / "report.jsonl"
    good = pool.run(stages, tp, (None, None), str(path))
    for rank, outcome in enumerate(good):
        wanted = STAGES["multi-stage"][1] if rank % tp == 0 else [*HANDOVER, ("body",)]
        assert outcome == (wanted, None)
    assert sorted(line["replica"] for line in report_lines(path)) == [*range(WORLD_SIZE // tp)]


def test_an_unexported_adapter_leaves_the_engine_alone():
    events = []
    manager, _ = make_manager(events)
    with pytest.raises(
        WeightSyncError, match=r"(?s)the LoRA adapter was not exported.*no such module"
    ):
        asyncio.run(manager.sync_adapter(lambda: {}["no such module"]))
    assert events == []
    assert manager.report.seconds == {}, "the next sync counts from zero"


ADAPTER = AdapterUpdate(
    unload=operations.unload_adapter("lora"),
    load=operations.load_adapter("lora", {}, b"weights", num_copies=None),
    num_tensors=1,
    nbytes=4,
)
LOAD, UNLOAD = (("load_lora_adapter_from_tensors",), ("unload_lora_adapter",))


def sync_adapter(manager, version, base=two_tensors):
    asyncio.run(manager.sync_adapter(lambda: ADAPTER, version=version, base=base))


@pytest.mark.parametrize("free_cache_engine", [True, False])
def test_a_replaced_engine_gets_base_weights_again(caplog, free_cache_engine):
    events = []
    manager, engine = make_manager(events, free_cache_engine=free_cache_engine)
    asyncio.run(manager.sync(two_tensors(), version="1"))
    for version in "12":
        sync_adapter(manager, version)
    assert events == [UPDATE, LOAD, UNLOAD, LOAD]
    events.clear()
    engine.version = "default"
    with pytest.raises(WeightSyncError, match=r"version 'default'.* were synced as '1'"):
        sync_adapter(manager, "3", base=None)
    assert events == []
    for version in "34":
        sync_adapter(manager, version)
    assert events == [("update", "3"), UNLOAD, LOAD, UNLOAD, LOAD]
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "'default'" in warning and "synced again" in warning


@pytest.mark.parametrize("versions", [(), (None,), ("1", None)])
def test_an_engine_without_known_version_is_trusted(versions):
    events = []
    manager, engine = make_manager(events)
    for version in versions:
        asyncio.run(manager.sync(two_tensors(), version=version))
    engine.version = "of the user"
    sync_adapter(manager, "2", base=None)
    assert events[len(versions) :] == [LOAD]


def adapter_after_restart(tp, replaced):
    """What the engine of this rank is asked for, after that of rank `replaced` was replaced."""
    events = []
    manager, engine = make_manager(events, tp=tp)
    asyncio.run(manager.sync(two_tensors(), version="1"))
    events.clear()
    if dist.get_rank() == replaced:
        engine.version = "default"
    try:
        sync_adapter(manager, "2", base=None)
    except WeightSyncError as error:
        assert "version 'default'" in str(error) and events == []
    else:
        raise AssertionError("every rank has the error")
    sync_adapter(manager, "2")
    return events


def test_one_replaced_replica_syncs_all_base_weights(pool):
    asked = pool.run(adapter_after_restart, 2, 2)
    assert asked == [[("update", "2"), LOAD], []] * 2


def test_a_wake_up_without_a_sync_reports_none(tmp_path):
    file = tmp_path / "syncs.jsonl"
    manager, _ = make_manager([], report_file=str(file))
    asyncio.run(manager.resume(("kv_cache",)))
    assert not file.exists()
    asyncio.run(manager.sync(two_tensors(), version="1"))
    asyncio.run(manager.resume(("kv_cache",)))
    assert [line["num_tensors"] for line in report_lines(file)] == [2]
