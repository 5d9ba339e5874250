"""Compiled load plans: run a model's own `load_weights` once, then replay what it did with the
bytes.

Why: `load_weights` of a 30 B mixture of experts is half a second of Python for copies that need 30
ms. What it does with a tensor depends on names, shapes and ranks, not on values, so it can be
recorded.

    buckets = []
    for layout, buffer in first_sync:            # loads it
        traced = trace_bucket(model, model.load_weights, layout, buffer)
        buckets.append(compile_bucket(traced))   # PlanRefused: says why; go on with load_weights
    plan = join_buckets(buckets, traced.destinations)
    executor = PlanExecutor(plan, model.load_weights)
    for i, buffer in enumerate(later_sync):
        executor.replay(i, BucketSource.flat(buffer))

A plan is used only after `check_bucket` has proved it bit for bit against the eager loader, and
only while `guard` finds nothing changed. Nothing here imports sglang.
"""

from sglang_loader.load_plan.compiler import compile_bucket, join_buckets
from sglang_loader.load_plan.executor import PlanExecutor
from sglang_loader.load_plan.guard import DestinationProbe
from sglang_loader.load_plan.plan import BucketPlan, LoadPlan, PlanRefused
from sglang_loader.load_plan.tracer import trace_bucket
from sglang_loader.load_plan.uses import BucketUses, uses_of
from sglang_loader.load_plan.verify import CheckedDigests, check_bucket

__all__ = [
    "BucketPlan",
    "BucketUses",
    "CheckedDigests",
    "DestinationProbe",
    "LoadPlan",
    "PlanExecutor",
    "PlanRefused",
    "check_bucket",
    "compile_bucket",
    "join_buckets",
    "trace_bucket",
    "uses_of",
]
