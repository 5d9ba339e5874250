"""Recording of a model's load plan while `load_weights` loads a sync, bucket by bucket.

New buckets are traced even if no plan is wanted or possible. The uses of their tensors show whether
the tensors fit the model. If a saved plan is tried, the uses of its buckets are saved with it, and
only other buckets are traced. A bucket of layers that are like traced ones need not be traced: its
plan is inferred (`load_plan.layer_templates`), and checked as any.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from traceback import walk_tb
from typing import Any

import torch

from sglang_loader.common.digest import tensor_digest
from sglang_loader.common.layout import BucketLayout
from sglang_loader.load_plan.compiler import compile_bucket, join_buckets
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.host_reads import LoadWatch
from sglang_loader.load_plan.layer_templates import LayerTemplates
from sglang_loader.load_plan.plan import BucketPlan, LoadPlan, LoadWeights, PlanRefused
from sglang_loader.load_plan.trace import TracedBucket
from sglang_loader.load_plan.tracer import trace_bucket
from sglang_loader.load_plan.uses import BucketUses, uses_of
from sglang_loader.load_plan.verify import Digests, check_bucket

logger = logging.getLogger(__name__)

NamedTensor = tuple[str, torch.Tensor]

_COUNTS = frozenset((torch.int32, torch.int64))


class PlanRecorder:
    """The recorder of a model's load plan.

    A recorder observes the model's `load_weights`, compares plans with it, and makes the plan of a
    sync.

    Attributes:
        load_weights: the model's method. Errors name the tensor.
        num_inferred: the number of buckets of this sync whose plans were inferred.
    """

    def __init__(self, model: Any) -> None:
        self.load_weights = naming_tensors(model)
        self._model = model
        self._may_infer = True  # until an inferred plan was wrong
        # SGLang's vocabulary embeddings have these two attributes.
        self._vocabularies = {
            (module.org_vocab_size, module.embedding_dim)
            for module in model.modules()
            if hasattr(module, "org_vocab_size") and hasattr(module, "embedding_dim")
        }
        self.restart()

    def restart(self) -> None:
        """Begin another sync, and drop all that was recorded of the last one."""
        self._digests: Digests = {}  # of the model, which may have changed since the last sync
        self._destinations: Destinations | None = None  # after the last traced bucket
        self._buckets: list[BucketPlan] = []
        self._templates = LayerTemplates()
        self.num_inferred = 0

    def trace(
        self, layout: BucketLayout, buffer: torch.Tensor
    ) -> tuple[TracedBucket | None, BucketUses]:
        """Load a bucket, and return its trace and the uses of its tensors.

        The trace is None if no trace is possible.
        """
        contents = self.contents_of(layout, buffer)  # before the loader may change them
        try:
            traced = trace_bucket(
                self._model, self.load_weights, layout, buffer, self._destinations
            )
        except PlanRefused as refused:  # the bucket is loaded all the same
            return None, BucketUses(layout, problem=str(refused))
        self._destinations = traced.destinations
        return traced, replace(uses_of(traced), contents=contents)

    def plan_difference(
        self, bucket: BucketPlan, destinations: Destinations, buffer: torch.Tensor
    ) -> str | None:
        """Load a bucket eagerly and by its plan, and return how the results differ, or None."""
        return check_bucket(
            self._model, bucket, destinations, self.load_weights, buffer, self._digests
        )

    def record(self, layout: BucketLayout, buffer: torch.Tensor) -> tuple[BucketUses, str | None]:
        """Load the next bucket.

        Returns:
            The uses of its tensors, and the reason why it has no plan, or None.
        """
        if (inferred := self._record_inferred(layout, buffer)) is not None:
            return inferred, None
        traced, uses = self.trace(layout, buffer)
        if traced is None:
            return uses, str(uses.problem)
        try:
            bucket = compile_bucket(traced)
        except PlanRefused as refused:
            return uses, str(refused)
        reason = self.plan_difference(bucket, traced.destinations, buffer)
        if reason is not None:
            return BucketUses(layout, problem=reason), f"bucket {len(self._buckets)}: {reason}"
        self._buckets.append(bucket)
        if self._may_infer:
            self._templates.add(traced, uses, bucket)
        return uses, None

    def _record_inferred(self, layout: BucketLayout, buffer: torch.Tensor) -> BucketUses | None:
        """Load the next bucket, if a plan that is inferred for the bucket holds.

        Returns:
            The uses of its tensors, or None if the bucket must be traced.
        """
        if not self._may_infer or self._destinations is None:
            return None
        destinations = self._destinations
        inferred = self._templates.infer(layout, destinations)
        if inferred is None:
            return None
        contents = self.contents_of(layout, buffer)
        reads: list[str] | None = None

        def load_weights(named: Iterable[NamedTensor]) -> None:
            nonlocal reads
            if reads is None:  # the first load is of the true weights, as in a trace
                reads = self._load_watched(named, destinations)
            else:
                self.load_weights(named)

        # If the check raises, for a lack of memory, the sync is made again without it.
        self._may_infer = False
        reason = check_bucket(
            *(self._model, inferred.plan, destinations, load_weights, buffer, self._digests),
            is_inferred=True,
        )
        if reason is None and reads:
            reason = f"Python reads the data of tensors ({reads[0]})"
        if reason is not None:  # the next bucket would fail as well, after the time of its check
            logger.info("load plans are not inferred from like layers: %s", reason)
            return None
        self._may_infer = True
        self._buckets.append(inferred.plan)
        self.num_inferred += 1
        return replace(inferred.uses, contents=contents)

    def _load_watched(self, named: Iterable[NamedTensor], destinations: Destinations) -> list[str]:
        """Load a bucket, and return the names of methods by which Python has read data."""
        reads: list[str] = []

        def report(method: str, tensor: torch.Tensor) -> None:
            with torch._C.DisableTorchFunction():
                # SGLang reads where each expert lies, which is no data of the sync.
                is_count = tensor.device.type == "cpu" and tensor.dtype in _COUNTS
                address = tensor.untyped_storage().data_ptr()
                if not is_count or address == bucket or destinations.find(address) is not None:
                    reads.append(method)

        pairs = list(named)
        bucket = pairs[0][1].untyped_storage().data_ptr()
        watch = LoadWatch(report)
        with watch.watching():
            self.load_weights(iter(pairs))
        if watch.has_live_scalars:
            reads.append("item")
        return reads

    def contents_of(self, layout: BucketLayout, buffer: torch.Tensor) -> dict[str, str]:
        """Return the `BucketUses.contents` of a bucket."""
        shapes = self._vocabularies
        if all(tensor.shape not in shapes for tensor in layout.tensors):
            return {}
        return {
            name: f"{list(tensor.shape)} {tensor.dtype} {tensor_digest(tensor).tolist()}"
            for name, tensor in layout.views(buffer)
            if tuple(tensor.shape) in shapes
        }

    def finish(self) -> LoadPlan:
        """Return the plan of the sync, all of whose buckets must have been recorded.

        Raises:
            PlanRefused: the sync has no plan.
        """
        assert self._destinations is not None, "a plan needs at least one bucket"
        return join_buckets(self._buckets, self._destinations)


def naming_tensors(model: Any) -> LoadWeights:
    """Wrap the model's `load_weights`, so that its errors name the tensor at fault.

    The note has the name and shape of the tensor, or of each candidate.
    """

    # SGLang's own message is often just an assertion about two shapes.
    def load_weights(named_tensors: Iterable[NamedTensor]) -> None:
        read: list[NamedTensor] = []

        def recorded() -> Iterator[NamedTensor]:
            for pair in named_tensors:
                read.append(pair)
                yield pair

        try:
            model.load_weights(recorded())
        except Exception as error:
            suspects = read[-1:]
            with suppress(Exception):  # not every tensor has an address. Raise `error` anyway.
                suspects = _suspects(error, read) or suspects
            named = " or ".join(f"{name} {list(tensor.shape)}" for name, tensor in suspects)
            error.add_note(f"load_weights failed at {named or 'no tensor'}: {error!r}")
            raise

    return load_weights


def _suspects(error: Exception, read: list[NamedTensor]) -> list[NamedTensor]:
    """Return the tensors of `read` that are local variables of the innermost function with any."""
    # The last tensor read is not always at fault: a loader may read all before it loads the first.
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    for frame in reversed(frames[2:]):
        values = list(frame.f_locals.values())
        addresses = [t.data_ptr() for t in values if isinstance(t, torch.Tensor)]
        suspects = [pair for pair in read if any(_holds(pair[1], at) for at in addresses)]
        if suspects:
            return suspects
    return []


def _holds(tensor: torch.Tensor, address: int) -> bool:
    return 0 <= address - tensor.data_ptr() < tensor.numel() * tensor.element_size()
