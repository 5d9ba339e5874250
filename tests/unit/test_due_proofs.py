"""A proof that is due: what is reported and served where it fails, or cannot be made."""

from dataclasses import asdict
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from sglang_loader.common.session.messages import PeerLost
from sglang_loader.load_plan.executor import PlanExecutor
from unit.route_ranks import Rank
from unit.serving_engine import ByName, ServingEngine, colocated, synced
from verl_sglang_sync.engine.engine_ranks import EngineRank, KnownEngineRank
from verl_sglang_sync.engine.server_client.errors import ReplyLost, ServerUnreachable
from verl_sglang_sync.engine.session import EngineCannotMap, TrainerSession
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.routes.table.table_source import TableSource

SEND = "verl_sglang_sync.routes.table.table_source.TableSource.send"


class DueRank(Rank):
    """A rank that notes which commits let requests run, and fails once where told."""

    def sync_failing_once(self, kind, method, error=None):
        """A sync in which rank 1 fails once, in a method of a class, for lack of memory or so."""
        original, self.is_last = getattr(kind, method), []
        commit, has_failed = TrainerSession.commit, dist.get_rank() != 1

        def fails(*arguments):
            nonlocal has_failed
            if not has_failed:
                has_failed = True
                raise error or torch.OutOfMemoryError("no room")
            return original(*arguments)

        def noted(session, watch, *, is_last):
            self.is_last.append(is_last)
            commit(session, watch, is_last=is_last)

        with (
            mock.patch.object(kind, method, fails),
            mock.patch.object(TrainerSession, "commit", noted),
        ):
            self.sync()
        self.seen.off = str(self.is_last)


def _play(options, *steps, wires="pull"):
    rank = DueRank(wires, "moe", **options)
    for step in steps:
        name, *arguments = (step,) if isinstance(step, str) else step
        getattr(rank, name)(*arguments)
    return asdict(rank.seen)


def _play_both(options, *steps):
    return _play(options, *steps, wires="both")


def test_a_proof_without_memory_is_not_reported(pool):
    fails = "sync_failing_once", StagingRing, "pack"
    for seen in pool.run(_play, {"prove": 2}, "sync", fails, "sync", "sync"):
        assert seen["errors"] == [] and not any(seen["wrong"])
        assert seen["proven"] == [True, None, True, True], "the next sync makes up for it"


def test_requests_run_after_a_proof_that_failed(pool):
    fails = "sync_failing_once", StagingRing, "pack"
    for seen in pool.run(_play, {"prove": 2}, "sync", fails):
        assert seen["off"] == "[False, True]", "no session follows the last one"


def test_no_request_runs_before_the_last_proof(pool):
    fails = "sync_failing_once", TableSource, "send"
    for seen in pool.run(_play, {"prove": 1}, fails):
        assert seen["off"] == "[False, False, True]"
        assert seen["proven"] == [True]


def test_a_sync_counts_its_last_export(pool):
    fails = "sync_failing_once", TableSource, "send"
    once = pool.run(_play, {}, "sync")
    for seen, other in zip(pool.run(_play, {}, fails), once, strict=True):
        for count in ("num_tensors", "num_buckets", "payload_bytes"):
            assert seen["report"][count] == other["report"][count]


def test_an_unrepeatable_export_is_not_proven():
    weights = [(f"layer.{i}".replace(".", "_"), torch.full((64,), float(i))) for i in range(4)]
    engine = ServingEngine()
    engine.models = [ByName(weights)]
    weight_sync = colocated(
        engine, "compiled", prove_every_n_syncs=1, manifest_check="off", free_cache_engine=False
    )
    report = synced(weight_sync, iter(weights))
    assert report.is_proven is None
    assert report.num_tensors == 4


def test_a_refuted_plan_is_not_used_again(monkeypatch):
    names = [f"layer_{i}" for i in range(4)]
    engine = ServingEngine()
    engine.models = [model] = [ByName([(name, torch.zeros(64)) for name in names])]
    weight_sync = colocated(
        engine, "compiled", prove_every_n_syncs=2, manifest_check="off", free_cache_engine=False
    )
    replay = PlanExecutor.replay

    def wrong(executor, *arguments):
        replay(executor, *arguments)
        with torch.no_grad():
            model.layer_2[3] += 1

    monkeypatch.setattr(PlanExecutor, "replay", wrong)
    proven, num_replayed = [], []
    for value in range(1, 6):
        weights = [(name, torch.full((64,), 10.0 * i + value)) for i, name in enumerate(names)]
        report = synced(weight_sync, weights)
        proven.append(report.is_proven)
        num_replayed.append(report.num_replayed)
    assert proven == [None, False, None, True, None]
    assert num_replayed == [0, 1, 0, 0, 0]
    assert torch.equal(model.layer_2, torch.full((64,), 25.0))


@pytest.mark.parametrize(
    "error", [PeerLost("silent"), ReplyLost("lost"), ServerUnreachable("refused")], ids=repr
)
def test_an_error_naming_its_rank_keeps_its_kind(error):
    engine = EngineRank("http://h:1, TP rank 0", Mock(), Mock(), KnownEngineRank())
    text = f"http://h:1, TP rank 0: .*{error.args[0]}"
    with pytest.raises(type(error), match=text), engine.naming_errors():
        raise error


def test_memory_unmappable_in_a_proof_is_final(pool):
    fails = "sync_failing", 1, SEND, EngineCannotMap("no access")
    for seen in pool.run(_play, {}, fails, "sync", "sync"):
        assert seen["errors"] == [] and seen["routes"] == ["export"] * 3
        assert seen["state"] == "OFF" and "no access" in seen["off"]


def test_no_export_follows_a_proof_without_engine(pool):
    fails = "sync_failing", 1, SEND, PeerLost("the engine is gone")
    for seen in pool.run(_play, {}, fails):
        assert seen["routes"] == [] and len(seen["errors"]) == 1
        assert "the engine is gone" in seen["errors"][0]


def test_what_the_proof_cannot_map_is_sent(pool):
    fails = "sync_failing_once", TableSource, "send", EngineCannotMap("no access")
    for seen in pool.run(_play_both, {}, fails, *["step", "sync"] * 2):
        assert seen["errors"] == [] and not any(seen["wrong"])
        assert seen["routes"] == ["export", "exchange", "exchange"]
        assert seen["state"] == "PROVEN"
