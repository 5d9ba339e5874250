"""Makes a model's load plan while `load_weights` loads a sync, bucket by bucket, and the
arrangements of its buckets, which the trainer is offered.

A bucket that has not come before is traced also where no plan is wanted, or possible: what
`load_weights` makes of its tensors (`uses`) tells whether they fit the model. An arrangement that
does not prove itself is dropped: its bucket is sent as it is, and the plan stays.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from sglang_loader.common.layout import BucketLayout, digest_of, encode_arrangements, encode_layout
from sglang_loader.common.regions.arrangement import Arrangement
from sglang_loader.load_plan import (
    BucketPlan,
    BucketUses,
    DestinationProbe,
    KnownDigests,
    LoadPlan,
    PlanExecutor,
    PlanRefused,
    check_bucket,
    compile_bucket,
    join_buckets,
    trace_bucket,
    uses_of,
)
from sglang_loader.load_plan.arrange import arrange, num_bytes_read
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.plan import LoadWeights
from sglang_loader.load_plan.trace import TracedBucket
from sglang_loader.load_plan.verify import check_arranged

logger = logging.getLogger(__name__)

MAX_PART = 0.9
"""A bucket of which more is read is sent as it is: there is next to nothing to win."""

Arranged = tuple[Arrangement, BucketPlan]


class ArrangedPlan:
    """What a plan's buckets are like when they come arranged.

    Args:
        buckets: arrangement and rebased plan of each; None: it comes as it is.

    Attributes:
        encoded: for the trainer; see `layout`.
        changes_buffer: a replay changes what it reads.
    """

    def __init__(self, plan: LoadPlan, buckets: Sequence[Arranged | None]) -> None:
        self._plan = plan
        self._buckets = list(buckets)
        layouts = [digest_of(encode_layout(layout)) for layout in plan.layouts]
        arrangements = [bucket[0] if bucket else None for bucket in buckets]
        self.encoded = encode_arrangements(list(zip(layouts, arrangements, strict=True)))
        self.digest = digest_of(self.encoded)
        rebased = [
            arranged[1] if arranged else whole
            for arranged, whole in zip(buckets, plan.buckets, strict=True)
        ]
        self.executor = PlanExecutor(replace(plan, buckets=tuple(rebased)))
        self.changes_buffer = any(bucket.changes_buffer for bucket in rebased)

    @classmethod
    def of(cls, plan: LoadPlan, buckets: Sequence[Arranged | None]) -> ArrangedPlan | None:
        """None if no bucket comes arranged."""
        return cls(plan, buckets) if any(buckets) else None

    def nbytes(self, index: int) -> int | None:
        """Size of an arranged bucket; None if it comes as it is, or there is none."""
        bucket = self._buckets[index] if index < len(self._buckets) else None
        return bucket[0].nbytes if bucket else None

    def rechecked(self, model: Any, index: int, buffer: torch.Tensor) -> ArrangedPlan | None:
        """This, or what is left of it if the bucket's arrangement no longer proves itself."""
        bucket = self._buckets[index]
        if bucket is None or _is_proven(model, bucket, self._plan.destinations, buffer):
            return self
        left = [*self._buckets[:index], None, *self._buckets[index + 1 :]]
        return ArrangedPlan.of(self._plan, left)


def proven_arrangement(
    model: Any, bucket: BucketPlan, destinations: Destinations, buffer: torch.Tensor
) -> Arranged | None:
    """How a bucket is best arranged, proved against the model's loader; None: as it is. Its own
    plan has just been proved with what is in `buffer`.
    """
    limit = MAX_PART * sum(tensor.nbytes for tensor in bucket.layout.tensors)
    arranged = arrange(bucket) if num_bytes_read(bucket) < limit else None
    if arranged is None or arranged[0].nbytes >= limit:
        return None
    return arranged if _is_proven(model, arranged, destinations, buffer) else None


def _is_proven(
    model: Any, arranged: Arranged, destinations: Destinations, buffer: torch.Tensor
) -> bool:
    arrangement, plan = arranged
    reason = check_arranged(plan, arrangement, destinations, model.load_weights, buffer)
    if reason is not None:
        logger.warning(
            "%s: a bucket of %d tensors is sent whole, its arrangement is wrong: %s",
            type(model).__name__,
            len(plan.layout.tensors),
            reason,
        )
    return reason is None


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
        destinations: the model's storages after the last traced bucket of this sync.
    """

    def __init__(self, model: Any) -> None:
        self.load_weights = naming_tensors(model)
        self._model = model
        self._known_digests: KnownDigests | None = None
        self.destinations: Destinations | None = None

    def restart(self) -> None:
        """Another sync begins: forget the content of the model, which may have changed."""
        self.destinations = self._known_digests = None

    def trace(
        self, layout: BucketLayout, buffer: torch.Tensor
    ) -> tuple[TracedBucket | None, BucketUses]:
        """Load a bucket, and see what becomes of its tensors; None if that cannot be seen."""
        try:
            traced = trace_bucket(self._model, self.load_weights, layout, buffer, self.destinations)
        except PlanRefused as refused:
            return None, BucketUses(layout, problem=refused.reason)
        self.destinations = traced.destinations
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
        self._context = context
        self._buckets: list[BucketPlan] = []
        self._arranged: list[Arranged | None] = []

    def add(self, layout: BucketLayout, buffer: torch.Tensor) -> tuple[BucketUses, str | None]:
        """Load the next bucket; what became of it, and why there is no plan, or None."""
        traced, uses = self._loads.trace(layout, buffer)
        if traced is None:
            return uses, str(uses.problem)
        try:
            bucket = compile_bucket(traced)
        except PlanRefused as refused:
            return uses, refused.reason
        reason = self._loads.why_unproven(bucket, traced.destinations, buffer)
        if reason is not None:
            return BucketUses(layout, problem=reason), f"bucket {len(self._buckets)}: {reason}"
        self._buckets.append(bucket)
        arranged = proven_arrangement(self._model, bucket, traced.destinations, buffer)
        self._arranged.append(arranged)
        return uses, None

    def finish(self, uses: list[BucketUses]) -> Compiled:
        """The plan of the sync once all buckets were added; raises PlanRefused if there is none."""
        assert self._loads.destinations is not None, "a plan needs at least one bucket"
        plan = join_buckets(self._buckets, self._loads.destinations, self._context)
        probe = DestinationProbe(self._model, plan.destinations)
        arranged = ArrangedPlan.of(plan, self._arranged)
        return Compiled(plan, uses, PlanExecutor(plan), probe, arranged)


NamedTensor = tuple[str, torch.Tensor]


def naming_tensors(model: Any) -> LoadWeights:
    """The model's `load_weights`; an error of it gets a note with the tensor's name and shape, or
    with those of all that are suspect: SGLang's own is often an assertion about two shapes, of one
    tensor of several thousand.
    """

    def load_weights(named_tensors: Iterable[NamedTensor]) -> None:
        given: list[NamedTensor] = []

        def giving() -> Iterator[NamedTensor]:
            for pair in named_tensors:
                given.append(pair)
                yield pair

        try:
            model.load_weights(giving())
        except Exception as error:
            suspects = given[-1:]
            with suppress(Exception):  # not every tensor has an address; what is raised must be it
                suspects = _in_hand(error, given) or suspects
            named = " or ".join(f"{name} {list(tensor.shape)}" for name, tensor in suspects)
            error.add_note(f"load_weights failed at {named or 'no tensor'}: {error!r}")
            raise

    return load_weights


def _in_hand(error: Exception, given: list[NamedTensor]) -> list[NamedTensor]:
    """Those of the tensors that the innermost function has in hand which has any: a loader may have
    taken all of them before it looks at the first.
    """
    for local_variables in reversed(list(_frames(error.__traceback__))[2:]):
        addresses = [t.data_ptr() for t in local_variables if isinstance(t, torch.Tensor)]
        found = [pair for pair in given if any(_holds(pair[1], at) for at in addresses)]
        if found:
            return found
    return []


def _holds(tensor: torch.Tensor, address: int) -> bool:
    return 0 <= address - tensor.data_ptr() < tensor.numel() * tensor.element_size()


def _frames(trace: TracebackType | None) -> Iterator[list[Any]]:
    while trace is not None:
        yield list(trace.tb_frame.f_locals.values())
        trace = trace.tb_next
