"""The proof of a whole plan at once, and what its syncs leave as it was."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sglang_loader.common.regions.geometry import Region, region_runs
from sglang_loader.common.regions.intervals import contains, merge_runs
from sglang_loader.load_plan import CheckResult, LoadPlan, check_bucket
from sglang_loader.load_plan.plan import LoadWeights


def self_check(
    model: nn.Module,
    plan: LoadPlan,
    load_weights: LoadWeights,
    buffers: Sequence[torch.Tensor],
) -> CheckResult:
    """`check_bucket` for every bucket of a plan; stops at the first that fails.

    Args:
        buffers: one flat buffer per bucket, filled with this sync's weights.

    Afterwards the weights are those of `buffers`, whatever the outcome.
    """
    known = None
    for i, (bucket, buffer) in enumerate(zip(plan.buckets, buffers, strict=True)):
        result = check_bucket(model, bucket, plan.destinations, load_weights, buffer, known)
        known = result.known
        if not result.ok:
            for layout, later in zip(plan.layouts[i + 1 :], buffers[i + 1 :], strict=True):
                load_weights(iter(layout.views(later[: layout.nbytes].clone())))
            return result
    return CheckResult(ok=True)


def uncovered(plan: LoadPlan, kind: str | None = None) -> list[str]:
    """The model's tensors, all or of a kind, with a byte that a sync does not write."""
    names, found = [storage.name for storage in plan.destinations.storages], []
    for tensor in plan.destinations.tensors:
        ranges = plan.coverage.get(names[tensor.storage], ())
        region = Region(tensor.offset, tensor.shape, tensor.stride, tensor.dtype.itemsize)
        is_covered = all(contains(ranges, run) for run in merge_runs([region_runs(region)]))
        if not is_covered and kind in (None, tensor.kind):
            found.append(tensor.name)
    return found
