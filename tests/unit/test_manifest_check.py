"""What an engine finds wrong with the tensors of a sync: all ranks hear of it, or it is logged."""

import asyncio
import logging

import pytest
import torch

from support.settings import settings_of
from unit.serving_engine import ServingEngine
from unit.trainer_ranks import full_tensor, name_of
from verl_sglang_sync import WeightSyncError
from verl_sglang_sync.collective import SingleProcess
from verl_sglang_sync.sync.sharding_manager import SGLangShardingManager

WEIGHTS = [(name_of(i), full_tensor(0, i)) for i in range(6)]


def make_manager(level="error", mode="flattened"):
    """A manager of one process, four tensors to a bucket; returns it and its engine."""
    engine = ServingEngine()
    manager = SGLangShardingManager(
        engine=engine,
        settings=settings_of(
            mode, bucket_bytes=4 * 256, free_cache_engine=False, manifest_check=level
        ),
        group=SingleProcess(),
        device=torch.device("cpu"),
    )
    return manager, engine


def sync(manager, weights=WEIGHTS):
    try:
        asyncio.run(manager.sync(weights))
    except WeightSyncError as error:
        return str(error)
    return None


@pytest.mark.parametrize("mode", ["bucketed", "flattened", "compiled"])
@pytest.mark.parametrize("level", ["error", "warn", "off"])
def test_every_sync_tells_the_engine_the_setting(mode, level):
    manager, engine = make_manager(level, mode)
    for weights in (WEIGHTS, iter(WEIGHTS)):
        assert sync(manager, weights) is None
        assert engine.checks == [level]


def test_what_the_engine_refuses_is_raised_and_the_next_sync_is_a_new_one():
    manager, engine = make_manager()
    engine.refuses = "1 missing: b; 2 unexpected: c, d"
    assert "1 missing: b; 2 unexpected: c, d" in sync(manager)
    assert engine.num_published == 0
    engine.refuses = None
    assert sync(manager) is None


def test_a_remark_is_logged_once(caplog):
    manager, engine = make_manager("warn")
    engine.remark = "the weights do not fit: 1 missing: only here"
    with caplog.at_level(logging.WARNING):
        assert [sync(manager), sync(manager)] == [None, None]
    said = [r for r in caplog.records if "1 missing: only here" in r.getMessage()]
    assert [record.levelname for record in said] == ["WARNING"]
    assert said[0].getMessage().startswith("manifest check: ")


def test_an_export_that_changes_is_another_set_of_tensors():
    manager, engine = make_manager()
    for weights in (WEIGHTS, WEIGHTS[:-1], [*WEIGHTS, ("x", torch.ones(2))]):
        assert sync(manager, weights) is None
        assert list(engine.models[0].loaded) == [name for name, _ in weights]
