"""Makes a model's load plan while `load_weights` loads a sync, bucket by bucket.

A bucket that has not come before is traced also where no plan is wanted, or possible: what
`load_weights` makes of its tensors (`uses`) tells whether they fit the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sglang_loader.common.layout import BucketLayout
from sglang_loader.load_plan import (
    BucketPlan,
    BucketUses,
    DestinationProbe,
    KnownDigests,
    LoadPlan,
    PlanBuilder,
    PlanExecutor,
    PlanRefused,
    check_bucket,
    trace_bucket,
    uses_of,
)
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.trace import TracedBucket
from sglang_loader.session.arranged_plan import ArrangedPlan, ArrangementMaker
from sglang_loader.session.named_errors import naming_tensors


@dataclass
class Compiled:
    """A plan that was checked, with what runs and guards it; `arranged`: None where sending
    buckets in the plan's order would not save bytes."""

    plan: LoadPlan
    uses: list[BucketUses]
    executor: PlanExecutor
    probe: DestinationProbe
    arranged: ArrangedPlan | None


class TracedLoads:
    """A model's `load_weights`, observed and compared with plans.

    Attributes:
        load_weights: the model's; its errors name the tensor.
    """

    def __init__(self, model: Any) -> None:
        self.load_weights = naming_tensors(model)
        self._model = model
        self._destinations: Destinations | None = None
        self._known_digests: KnownDigests | None = None

    def restart(self) -> None:
        """Another sync begins: forget the content of the model, which may have changed."""
        self._destinations = self._known_digests = None

    def trace(
        self, layout: BucketLayout, buffer: torch.Tensor
    ) -> tuple[TracedBucket | None, BucketUses]:
        """Load a bucket, and see what becomes of its tensors; None if that cannot be seen."""
        try:
            traced = trace_bucket(
                self._model, self.load_weights, layout, buffer, self._destinations
            )
        except PlanRefused as refused:
            return None, BucketUses(layout, problem=refused.reason)
        self._destinations = traced.destinations
        return traced, uses_of(traced)

    def why_unproven(
        self, bucket: BucketPlan, destinations: Destinations, buffer: torch.Tensor
    ) -> str | None:
        """Load a bucket, and again by its plan: what the plan does otherwise; None: nothing."""
        result = check_bucket(
            self._model, bucket, destinations, self.load_weights, buffer, self._known_digests
        )
        self._known_digests = result.known
        return result.reason


class Recording:
    """The plan of one sync in the making."""

    def __init__(self, model: Any, loads: TracedLoads, context: Mapping[str, object]) -> None:
        self._model = model
        self._loads = loads
        self._builder = PlanBuilder(context)
        self._maker = ArrangementMaker(model)
        self._uses: list[BucketUses] = []

    def add(self, layout: BucketLayout, buffer: torch.Tensor) -> tuple[BucketUses, str | None]:
        """Load the next bucket; what became of it, and why there is no plan, or None."""
        traced, uses = self._loads.trace(layout, buffer)
        self._uses.append(uses)
        if traced is None:
            return uses, str(uses.problem)
        try:
            bucket = self._builder.add_bucket(traced)
        except PlanRefused as refused:
            return uses, refused.reason
        reason = self._loads.why_unproven(bucket, traced.destinations, buffer)
        if reason is not None:
            return BucketUses(layout, problem=reason), f"bucket {len(self._uses) - 1}: {reason}"
        self._maker.add(bucket, traced.destinations, buffer)
        return uses, None

    def finish(self) -> Compiled:
        """The plan of the sync, whose buckets have all been added.

        Raises:
            PlanRefused: there is none.
        """
        plan = self._builder.finish()
        return Compiled(
            plan,
            self._uses,
            PlanExecutor(plan),
            DestinationProbe(self._model, plan.destinations),
            self._maker.finish(plan),
        )
