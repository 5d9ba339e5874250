"""The manifest is announced once, before the first byte; all ranks hear what does not fit."""

import asyncio
import logging

import pytest
import torch

from sglang_loader.manifest_verdict import ManifestVerdict
from unit.manifest_ranks import ManifestCase, manifest_sync
from unit.trainer_ranks import RankPool, RecordingEngine, full_tensor, name_of
from verl_sglang_sync.collective import SingleProcess
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.sharding_manager import SGLangShardingManager
from verl_sglang_sync.weight_sync import WeightSyncError

WEIGHTS = [(name_of(i), full_tensor(0, i)) for i in range(6)]
NAMES = tuple(name for name, _ in WEIGHTS)
MISFIT = ManifestVerdict(mismatched=("a [2] (too long)",), missing=("b",), unexpected=("c", "d"))


def make_manager(events, level="error", mode="flattened"):
    """A manager of one process, four tensors to a bucket; returns it and its engine."""
    engine = RecordingEngine(events)
    manager = SGLangShardingManager(
        engine=engine,
        settings=WeightSyncConfig(
            mode=mode,
            bucket_bytes=4 * 256,
            multi_stage_wake_up=True,
            free_cache_engine=False,
            manifest_check=level,
        ),
        group=SingleProcess(),
        device=torch.device("cpu"),
    )
    return manager, engine


def sync(manager, weights):
    """What went wrong in one sync."""
    try:
        asyncio.run(manager.sync(weights))
    except WeightSyncError as error:
        return str(error)
    return None


def announced(engine):
    """(names, complete?) of each manifest that an engine was asked about."""
    return [(tuple(t.name for t in m.tensors), m.is_complete) for m in engine.announced]


def kinds(events):
    return [event[0] for event in events]


@pytest.mark.parametrize("mode", ("bucketed", "flattened"))
def test_a_repeatable_export_is_announced_once_before_the_first_bucket(mode):
    events = []
    manager, engine = make_manager(events, mode=mode)
    assert sync(manager, WEIGHTS) is None
    assert announced(engine) == [(NAMES, True)]
    assert kinds(events) == ["check", "update", "update"]
    events.clear()
    assert sync(manager, iter(WEIGHTS)) is None  # what is known need not be repeatable
    assert kinds(events) == ["update", "update"]


def test_a_manifest_that_does_not_fit_ends_the_sync_before_its_first_byte():
    events = []
    manager, engine = make_manager(events)
    engine.verdict = MISFIT
    error = sync(manager, WEIGHTS)
    assert error.startswith("weight sync failed before its first byte")
    for part in ("1 mismatched: a [2] (too long)", "1 missing: b", "2 unexpected: c, d"):
        assert part in error
    assert kinds(events) == ["check"]
    engine.verdict = ManifestVerdict()
    assert sync(manager, WEIGHTS) is None
    assert kinds(events) == ["check", "check", "update", "update"]


def test_warn_says_it_once_and_goes_on(caplog):
    events = []
    manager, engine = make_manager(events, level="warn")
    engine.verdict = MISFIT
    with caplog.at_level(logging.WARNING):
        assert [sync(manager, WEIGHTS), sync(manager, WEIGHTS)] == [None, None]
    assert kinds(events) == ["check", "update", "update", "update", "update"]
    assert len([r for r in caplog.records if "2 unexpected: c, d" in r.getMessage()]) == 1


def test_off_asks_nothing():
    events = []
    manager, engine = make_manager(events, level="off")
    engine.verdict = MISFIT
    assert sync(manager, WEIGHTS) is None
    assert sync(manager, WEIGHTS[1:]) is None
    assert kinds(events) == ["update"] * 4


def test_what_was_not_checked_is_said_and_the_sync_goes_on(caplog):
    manager, engine = make_manager([])
    engine.verdict = ManifestVerdict(not_checked="a quantised model")
    with caplog.at_level(logging.WARNING):
        assert sync(manager, WEIGHTS) is None
    assert "not checked: a quantised model" in caplog.text


@pytest.mark.parametrize(
    ("changed", "at"),
    [
        pytest.param(WEIGHTS[:-1], f"tensor 5 of the export is none, its manifest has {NAMES[5]}"),
        pytest.param(
            [*WEIGHTS, ("x", torch.ones(2))], "tensor 6 of the export is x torch.float32 [2]"
        ),
        pytest.param(
            [*WEIGHTS[:5], (NAMES[5], torch.ones(4, 16, dtype=torch.float64))],
            "torch.float64 [4, 16]",
        ),
        pytest.param(
            [*WEIGHTS[:4], WEIGHTS[5], WEIGHTS[4]], f"tensor 4 of the export is {NAMES[5]}"
        ),
    ],
    ids=["shorter", "longer", "dtype", "order"],
)
def test_a_later_export_that_differs_is_an_error_before_its_bucket(changed, at, caplog):
    events = []
    manager, _ = make_manager(events)
    assert sync(manager, WEIGHTS) is None
    events.clear()
    assert at in sync(manager, changed)
    assert kinds(events) in (["update"], [])  # the first bucket is as announced
    events.clear()
    assert sync(manager, changed) is None
    assert kinds(events)[0] == "check"

    manager, _ = make_manager(events, level="warn")
    sync(manager, WEIGHTS)
    events.clear()
    with caplog.at_level(logging.WARNING):
        assert sync(manager, changed) is None
    assert "the export differs from its manifest" in caplog.text
    assert sync(manager, changed) is None
    assert "check" in kinds(events)


def test_a_failed_sync_is_announced_again():
    events = []
    manager, engine = make_manager(events)
    engine.fails = "update"
    assert sync(manager, WEIGHTS) is not None
    engine.fails = None
    assert sync(manager, WEIGHTS) is None
    assert kinds(events) == ["check", "update", "check", "update", "update"]


def test_an_export_that_cannot_be_repeated_is_checked_bucket_by_bucket(caplog):
    events = []
    manager, engine = make_manager(events)
    with caplog.at_level(logging.WARNING):
        assert sync(manager, iter(WEIGHTS)) is None
    assert "cannot be started again" in caplog.text
    assert announced(engine) == [(NAMES[:4], False), (NAMES, True)]
    assert kinds(events) == ["check", "update", "check", "update"]
    events.clear()
    assert sync(manager, iter(WEIGHTS)) is None
    assert kinds(events) == ["update", "update"]
    assert "its manifest has" in sync(manager, iter(WEIGHTS[:-1]))
    engine.verdict = MISFIT
    events.clear()
    assert "1 missing: b" in sync(manager, iter(WEIGHTS))
    assert kinds(events) == ["check"]


@pytest.fixture(scope="module")
def pool():
    ranks = RankPool()
    yield ranks
    ranks.close()


def test_what_one_engine_refuses_all_ranks_refuse(pool):
    outcomes = pool.run(manifest_sync, ManifestCase(refused_by=2))
    assert len({tuple(errors) for _, errors, _ in outcomes}) == 1
    message = outcomes[0][1][0]
    assert "rank 2: the weights do not fit the engine's model" in message
    assert "1 missing: model.norm.weight" in message
    assert "2 unexpected: x, y" in message
    assert [asked for asked, _, _ in outcomes] == [["check"] * 2, [], ["check"] * 2, []]
    assert [started for _, _, started in outcomes] == [2] * 4


def test_the_manifest_is_made_once_by_all_ranks_together(pool):
    outcomes = pool.run(manifest_sync, ManifestCase())
    assert [errors for _, errors, _ in outcomes] == [[None, None]] * 4
    assert outcomes[0][0] == ["check", *["update"] * 4]
    assert [started for _, _, started in outcomes] == [3] * 4


def test_an_export_that_dies_while_the_manifest_is_made_ends_the_sync_everywhere(pool):
    outcomes = pool.run(manifest_sync, ManifestCase(dies_on=1))
    for asked, errors, _ in outcomes:
        assert "update" not in asked
        assert all("rank 1: Traceback" in error for error in errors)
        assert all("the export broke" in error for error in errors)


def test_ranks_that_would_send_different_tensors_are_told_before_the_first_byte(pool):
    outcomes = pool.run(manifest_sync, ManifestCase(num_tensors_on=((3, 5),)))
    for asked, errors, _ in outcomes:
        assert "update" not in asked
        assert all("by rank: [6, 6, 6, 5]" in error for error in errors)


def test_off_needs_one_export_for_each_sync(pool):
    outcomes = pool.run(manifest_sync, ManifestCase(refused_by=0, level="off"))
    assert [errors for _, errors, _ in outcomes] == [[None, None]] * 4
    assert [started for _, _, started in outcomes] == [2] * 4
