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
