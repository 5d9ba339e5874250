"""A proof that is due: what is reported and served where it fails, or cannot be made."""

from dataclasses import asdict
from unittest import mock

import torch
import torch.distributed as dist

from unit.route_ranks import Rank
from unit.serving_engine import ByName, ServingEngine, colocated, synced
from verl_sglang_sync.engine.session import TrainerSession
from verl_sglang_sync.routes.pull.route import PulledBuckets
from verl_sglang_sync.routes.staging_ring import StagingRing


class DueRank(Rank):
    """A rank that notes which commits let requests run, and fails once where told."""

    def sync_failing_once(self, kind, method):
        """A sync in which rank 1 lacks memory once, in a method of a class."""
        original, self.is_last = getattr(kind, method), []
        commit, has_failed = TrainerSession.commit, dist.get_rank() != 1

        def fails(*arguments):
            nonlocal has_failed
            if not has_failed:
                has_failed = True
                raise torch.OutOfMemoryError("no room")
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


def _play(options, *steps):
    rank = DueRank("pull", "moe", **options)
    for step in steps:
        name, *arguments = (step,) if isinstance(step, str) else step
        getattr(rank, name)(*arguments)
    return asdict(rank.seen)


def test_a_proof_that_fails_for_lack_of_memory_is_not_reported_as_made(pool):
    fails = "sync_failing_once", StagingRing, "pack"
    for seen in pool.run(_play, {"prove": 2}, "sync", fails, "sync", "sync"):
        assert seen["errors"] == [] and not any(seen["wrong"])
        assert seen["proven"] == [True, None, True, True], "the next sync makes up for it"


def test_requests_run_after_a_proof_that_failed(pool):
    fails = "sync_failing_once", StagingRing, "pack"
    for seen in pool.run(_play, {"prove": 2}, "sync", fails):
        assert seen["off"] == "[False, True]", "no session follows the last one"


def test_no_request_runs_before_the_last_proof_of_a_sync(pool):
    fails = "sync_failing_once", PulledBuckets, "deliver"
    for seen in pool.run(_play, {"prove": 1}, fails):
        assert seen["off"] == "[False, False, True]"
        assert seen["proven"] == [True]


def test_the_counts_of_a_sync_are_those_of_its_last_export(pool):
    fails = "sync_failing_once", PulledBuckets, "deliver"
    once = pool.run(_play, {}, "sync")
    for seen, other in zip(pool.run(_play, {}, fails), once, strict=True):
        for count in ("num_tensors", "num_buckets", "payload_bytes"):
            assert seen["report"][count] == other["report"][count]


def test_an_export_that_cannot_be_repeated_is_not_proven():
    weights = [(f"layer.{i}".replace(".", "_"), torch.full((64,), float(i))) for i in range(4)]
    engine = ServingEngine()
    engine.models = [ByName(weights)]
    transport = colocated(
        engine, "compiled", prove_every_n_syncs=1, manifest_check="off", free_cache_engine=False
    )
    report = synced(transport, iter(weights))
    assert report.is_proven is None
    assert report.num_tensors == 4
