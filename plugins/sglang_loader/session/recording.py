"""Makes a model's load plan while `load_weights` loads a sync, bucket by bucket.

New buckets are traced even if no plan is wanted or possible: the uses of their tensors tell whether
they fit the model.
"""

from __future__ import annotations

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
from sglang_loader.load_plan.plan import BucketPlan, LoadPlan, LoadWeights, PlanRefused
from sglang_loader.load_plan.trace import TracedBucket
from sglang_loader.load_plan.tracer import trace_bucket
from sglang_loader.load_plan.uses import BucketUses, uses_of
from sglang_loader.load_plan.verify import Digests, check_bucket


class PlanRecorder:
    """Observes a model's `load_weights`, compares it with plans, and makes the plan of a sync.

    Attributes:
        load_weights: the model's; its errors name the tensor.
    """

    def __init__(self, model: Any) -> None:
        self.load_weights = naming_tensors(model)
        self._model = model
        self.restart()

    def restart(self) -> None:
        """Begin another sync: forget the last one, and digests of the model, which may be stale."""
        self._digests: Digests = {}
        self._destinations: Destinations | None = None  # after the last traced bucket
        self._buckets: list[BucketPlan] = []

    def trace(
        self, layout: BucketLayout, buffer: torch.Tensor
    ) -> tuple[TracedBucket | None, BucketUses]:
        """Load a bucket; returns its trace (None if it has none) and the uses of its tensors."""
        contents = contents_of(self._model, layout, buffer)  # before the loader may change them
        try:
            traced = trace_bucket(
                self._model, self.load_weights, layout, buffer, self._destinations
            )
        except PlanRefused as refused:
            return None, BucketUses(layout, problem=str(refused))
        self._destinations = traced.destinations
        return traced, replace(uses_of(traced), contents=contents)

    def why_unproven(
        self, bucket: BucketPlan, destinations: Destinations, buffer: torch.Tensor
    ) -> str | None:
        """Load a bucket eagerly and by its plan; returns how the results differ, or None."""
        return check_bucket(
            self._model, bucket, destinations, self.load_weights, buffer, self._digests
        )

    def record(self, layout: BucketLayout, buffer: torch.Tensor) -> tuple[BucketUses, str | None]:
        """Load the next bucket; returns its tensors' uses, and why it has no plan, or None."""
        traced, uses = self.trace(layout, buffer)
        if traced is None:
            return uses, str(uses.problem)
        try:
            bucket = compile_bucket(traced)
        except PlanRefused as refused:
            return uses, str(refused)
        reason = self.why_unproven(bucket, traced.destinations, buffer)
        if reason is not None:
            return BucketUses(layout, problem=reason), f"bucket {len(self._buckets)}: {reason}"
        self._buckets.append(bucket)
        return uses, None

    def finish(self) -> LoadPlan:
        """The plan of the sync, all of whose buckets were recorded; raises PlanRefused if there is
        none.
        """
        assert self._destinations is not None, "a plan needs at least one bucket"
        return join_buckets(self._buckets, self._destinations)


def contents_of(model: Any, layout: BucketLayout, buffer: torch.Tensor) -> dict[str, str]:
    """The `BucketUses.contents` of a bucket."""
    # SGLang's vocabulary embeddings have these two attributes.
    shapes = {
        (module.org_vocab_size, module.embedding_dim)
        for module in model.modules()
        if hasattr(module, "org_vocab_size") and hasattr(module, "embedding_dim")
    }
    return {
        name: f"{list(tensor.shape)} {tensor.dtype} {tensor_digest(tensor).tolist()}"
        for name, tensor in layout.views(buffer)
        if tuple(tensor.shape) in shapes
    }


NamedTensor = tuple[str, torch.Tensor]


def naming_tensors(model: Any) -> LoadWeights:
    """The model's `load_weights`, whose errors get a note with the name and shape of the tensor at
    fault, or of the candidates: SGLang's own message is often just an assertion about two shapes.
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
            with suppress(Exception):  # not every tensor has an address; raise `error` in any case
                suspects = _suspects(error, given) or suspects
            named = " or ".join(f"{name} {list(tensor.shape)}" for name, tensor in suspects)
            error.add_note(f"load_weights failed at {named or 'no tensor'}: {error!r}")
            raise

    return load_weights


def _suspects(error: Exception, given: list[NamedTensor]) -> list[NamedTensor]:
    """The given tensors among the local variables of the innermost function that has any; the last
    one given is not always at fault, as a loader may take all before it loads the first.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    for frame in reversed(frames[2:]):
        values = list(frame.f_locals.values())
        addresses = [t.data_ptr() for t in values if isinstance(t, torch.Tensor)]
        found = [pair for pair in given if any(_holds(pair[1], at) for at in addresses)]
        if found:
            return found
    return []


def _holds(tensor: torch.Tensor, address: int) -> bool:
    return 0 <= address - tensor.data_ptr() < tensor.numel() * tensor.element_size()
