"""Compiled load plans: run a model's own `load_weights` once, then replay its copies.

`load_weights` of a 30 B mixture of experts spends half a second in Python for copies that need 30
ms. The copies depend on names, shapes and ranks, not on values. So they can be recorded.

    buckets = []
    for layout, buffer in first_sync:            # loads it
        traced = trace_bucket(model, model.load_weights, layout, buffer)
        buckets.append(compile_bucket(traced))   # PlanRefused: go on with load_weights
    plan = join_buckets(buckets, traced.destinations)
    executor = PlanExecutor(plan, model.load_weights)
    for i, buffer in enumerate(later_sync):
        executor.replay(i, BucketSource.flat(buffer))

`check_bucket` must prove a plan bit for bit against the eager loader before the plan is used. The
plan is used only while `guard` finds no change. Nothing here imports sglang.
"""
