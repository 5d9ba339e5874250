"""The proof that a load plan does what a model's own loader does, for the tests at any number of
ranks.
"""

import dataclasses
import math
from unittest import mock

import torch

from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.quantization import Quantization
from sglang_loader.load_plan import layer_templates
from sglang_loader.load_plan.copy_table import CopyTable
from sglang_loader.load_plan.destinations import collect_destinations, first_difference
from sglang_loader.load_plan.executor import PlanExecutor
from sglang_loader.session.recording import PlanRecorder
from sglang_loader.upstream import engine_context
from support.plan_check import differing, packed, planned, self_check, snapshot
from support.scattered import Scattered

LAYOUTS = ("many", "cut")
ROUND_BYTES = 1 << 16


def prove(model, first, second, how):
    """Compile a plan with the weights `first`, then replay `second` and compare every byte.

    The negative control drops one copy, which the comparison and the self-check must both notice.
    """
    buckets = [packed(bucket) for bucket in split(first, how)]
    plan = planned(model, *buckets)
    reason = self_check(model, plan, [buffer for _, buffer in buckets])
    assert reason is None, reason

    later = split(second, how)
    buffers = [packed(bucket)[1] for bucket in later]
    load_eagerly(model, later)
    expected = snapshot(plan.destinations)
    load_eagerly(model, split(first, how))
    assert differing(plan.destinations, expected), "the two sets of weights are the same"
    replay(model, plan, buffers)
    assert differing(plan.destinations, expected) == ()
    assert first_difference(plan.destinations, collect_destinations(model)) is None
    prove_table(model, plan, split(first, how), buffers, expected)

    broken = without_one_copy(plan)
    load_eagerly(model, split(first, how))
    replay(model, broken, buffers)
    assert differing(plan.destinations, expected), "a plan without one copy went unnoticed"
    assert self_check(model, broken, buffers) is not None
    assert differing(plan.destinations, expected) == (), "a failed check left other weights"
    return plan


def prove_table(model, plan, before, buffers, expected):
    """The copy table loads the same bytes from shards of 1 to 4 trainer ranks, divided at random.

    The shards of all ranks are mapped, or of some, or none is: the others are sent.

    The negative control drops one copy of the table.
    """
    executor = PlanExecutor(plan, model.load_weights)
    layouts = [bucket.layout for bucket in plan.buckets]
    for num_ranks, num_mapped in ((1, 1), (3, 3), (4, 2), (2, 0)):
        scattered = Scattered(layouts, num_ranks, seed=num_ranks)
        load_eagerly(model, before)
        shards = scattered.shards(buffers, reader=num_ranks - 1, num_mapped=num_mapped)
        run_table(executor, scattered, shards)
        assert differing(plan.destinations, expected) == ()
    table = CopyTable.of(plan, shards.weight_map, ROUND_BYTES)
    at = next(i for i, step in enumerate(table.steps) if step.copies)
    broken = dataclasses.replace(table.steps[at], copies=table.steps[at].copies[1:])
    steps = (*table.steps[:at], broken, *table.steps[at + 1 :])
    load_eagerly(model, before)
    with mock.patch.object(CopyTable, "of", lambda *_: CopyTable(steps)):
        run_table(PlanExecutor(plan, model.load_weights), scattered, shards)
    assert differing(plan.destinations, expected), "a table without one copy went unnoticed"


def prove_inferred(model, weights):
    """Wherever the plan of a bucket is inferred from layers before, it is what a trace gives.

    Returns:
        The number of buckets whose plans are inferred.
    """
    buckets = [packed(weights[i : i + 3]) for i in range(0, len(weights), 3)]
    plan = planned(model, *buckets)
    recorder = PlanRecorder(model)
    with mock.patch.object(layer_templates, "MIN_TENSORS", 1):
        for (layout, buffer), traced in zip(buckets, plan.buckets, strict=True):
            _, reason = recorder.record(layout, buffer)
            assert reason is None, reason
            inferred = recorder._buckets[-1]
            for name in ("layout", "rest", "written", "live_in"):
                assert getattr(inferred, name) == getattr(traced, name), name
            assert set(inferred.copies) == set(traced.copies)
    recorder.finish()
    return recorder.num_inferred


def prove_quantized(model, first, second, source, how):
    """The table leaves what `load_weights` leaves of weights that verl has quantised in torch.

    Args:
        first: quantised weights, of which the plan is made.
        second: those that the table must leave.
        source: those of which `second` was made.

    Returns:
        A table, of weights that one trainer rank holds.
    """
    plan = planned(model, *map(packed, split(first, how)))
    load_eagerly(model, split(second, how))
    expected = snapshot(plan.destinations)
    executor = PlanExecutor(plan, model.load_weights)
    layout, buffer = packed([(name, tensor.bfloat16()) for name, tensor in source])
    layouts = [bucket.layout for bucket in plan.buckets]
    quantization = Quantization("torch", (128, 128), "bfloat16")
    for num_ranks, num_mapped in ((3, 2), (2, 0), (1, 1)):
        load_eagerly(model, split(first, how))
        assert differing(plan.destinations, expected)
        scattered = Scattered([layout], num_ranks, num_ranks, quantization, layouts)
        shards = scattered.shards([buffer], num_ranks - 1, num_mapped)
        run_table(executor, scattered, shards)
        assert differing(plan.destinations, expected) == ()
    return CopyTable.of(plan, shards.weight_map, ROUND_BYTES)


def run_table(executor, scattered, shards):
    run = executor.table_run(shards, scattered.num_ranks, round_bytes=ROUND_BYTES)
    run.begin()
    for each in run.rounds:
        assert not run.is_complete
        run.load_round(scattered.sent(each.sent))
    assert run.is_complete


def split(weights, how):
    """The weights of each bucket: all in one, 16 tensors in each, or cut in the middle."""
    size = {"single": len(weights), "many": 16, "cut": math.ceil(len(weights) / 2)}[how]
    return [weights[i : i + size] for i in range(0, len(weights), size)]


def sync(loader, model, weights, how):
    """One sync as a session makes it: by the plan, or eagerly where none holds."""
    loader.start(engine_context(model))
    for i, bucket in enumerate(split(weights, how)):
        layout, buffer = packed(bucket)
        loader.load(i, layout, BucketSource.flat(buffer))
    return loader.finish()


def load_eagerly(model, buckets):
    """The model's own loader, once for each bucket, on copies: it may change its sources."""
    for bucket in buckets:
        model.load_weights([(name, tensor.clone()) for name, tensor in bucket])


def replay(model, plan, buffers):
    """The plan, once for each bucket, which stays as it is."""
    executor = PlanExecutor(plan, model.load_weights)
    for i, buffer in enumerate(buffers):
        before = buffer.clone()
        executor.replay(i, BucketSource.flat(buffer))
        assert torch.equal(buffer, before)


def without_one_copy(plan):
    """The same plan, less the first copy of the first bucket that has one."""
    at = next(i for i, bucket in enumerate(plan.buckets) if bucket.copies)
    broken = dataclasses.replace(plan.buckets[at], copies=plan.buckets[at].copies[1:])
    return dataclasses.replace(plan, buckets=(*plan.buckets[:at], broken, *plan.buckets[at + 1 :]))
