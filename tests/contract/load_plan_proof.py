"""The proof that a load plan does what a model's own loader does, for the tests at any number of
ranks.
"""

import dataclasses
import math

import torch

from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.copies.strided import gather_reads
from sglang_loader.common.layout import decode_arrangements, encode_arrangements
from sglang_loader.common.regions.arrangement import arranged_nbytes
from sglang_loader.load_plan.arrange import arrange
from sglang_loader.load_plan.destinations import collect_destinations, first_difference
from sglang_loader.load_plan.executor import PlanExecutor, replay_once
from sglang_loader.upstream import engine_context
from support.plan_check import differing, packed, planned, self_check, snapshot

LAYOUTS = ("many", "cut")


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
    prove_arranged(model, plan, split(first, how), buffers, expected)

    broken = without_one_copy(plan)
    load_eagerly(model, split(first, how))
    replay(model, broken, buffers)
    assert differing(plan.destinations, expected), "a plan without one copy went unnoticed"
    assert self_check(model, broken, buffers) is not None
    assert differing(plan.destinations, expected) == (), "a failed check left other weights"
    return plan


def prove_arranged(model, plan, before, buffers, expected):
    """Every bucket of every architecture can be arranged, and loads the same bytes so."""
    load_eagerly(model, before)
    for bucket, buffer in zip(plan.buckets, buffers, strict=True):
        arranged = arrange(bucket)
        assert arranged is not None, bucket.layout
        arrangement, rebased = arranged
        encoded = encode_arrangements((("digest", arrangement),))
        if arranged_nbytes(arrangement) <= bucket.layout.nbytes:
            assert decode_arrangements(encoded, {"digest": bucket.layout})[0][1] == arrangement
        tensors = [tensor for _, tensor in bucket.layout.views(buffer)]
        flat = gather_reads(arrangement, tensors, buffer.device)
        replay_once(rebased, plan.destinations, model.load_weights, flat)
    assert differing(plan.destinations, expected) == ()


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
