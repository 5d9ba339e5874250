"""The arrangements of one load plan: made and proved bucket by bucket, replayed and offered whole.

    for bucket, buffer in recorded:                  # plans that have proved themselves
        buckets.append(proven_arrangement(model, bucket, destinations, buffer))
    arranged = ArrangedPlan.of(plan, buckets)        # None: nothing would be won
    arranged.digest, arranged.encoded                # what the trainer is offered
    arranged.executor.replay(index, source)

An arrangement that does not prove itself is dropped: its bucket is sent as it is, and the plan
stays.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from sglang_loader.common.layout import digest_of, encode_arrangements, encode_layout
from sglang_loader.common.regions.arrangement import Arrangement
from sglang_loader.load_plan import BucketPlan, LoadPlan, PlanExecutor
from sglang_loader.load_plan.arrange import arrange, num_bytes_read
from sglang_loader.load_plan.destinations import Destinations
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
