"""What the data of a traced load was made of: bytes of the bucket, bytes of the model."""

from __future__ import annotations

from sglang_loader.common.regions.intervals import Interval
from sglang_loader.load_plan.plan import PlanRefused
from sglang_loader.load_plan.trace import Space, Step, TensorRef, TracedBucket

MEMORY = (Space.BUCKET, Space.DESTINATION)


class Origins:
    """Follows a trace step by step, in order."""

    def __init__(self) -> None:
        self._made_of: dict[tuple[Space, int], tuple[TensorRef, ...]] = {}

    def of(self, ref: TensorRef) -> tuple[TensorRef, ...]:
        """Parts of the bucket and of the model that went into a tensor."""
        if ref.space in MEMORY:
            return (ref,)
        return self._made_of.get((ref.space, ref.index), ())

    def follow(self, step: Step) -> tuple[TensorRef, ...]:
        """The next step; returns the origins of all that it reads."""
        found = tuple(origin for ref in step.reads for origin in self.of(ref))
        made = [(w.space, w.index) for w in step.writes if w.space not in MEMORY]
        made += [(Space.SLOT, slot) for slot in step.outputs if slot is not None]
        for key in made:
            self._made_of[key] = tuple(dict.fromkeys((*self._made_of.get(key, ()), *found)))
        return found


def judge_host_reads(traced: TracedBucket) -> tuple[tuple[str, int, Interval], ...]:
    """`(what, storage, byte range)` of the model's data that reached Python.

    A read of a constant (a shape table, an index made from Python numbers) is harmless. One of the
    model's data is harmless only if no bucket of the sync writes it, which is known later.

    Raises:
        PlanRefused: data of the bucket, or made of it, reached Python: that cannot be replayed.
    """
    if not traced.trace.host_reads:
        return ()
    origins = Origins()
    for step in traced.trace.steps:
        origins.follow(step)
    reads: dict[tuple[str, int, Interval], None] = {}
    for read in traced.trace.host_reads:
        for origin in origins.of(read.tensor):
            if origin.space is Space.BUCKET:
                name = traced.layout.tensors[traced.layout.tensor_at(origin.region.offset)].name
                raise PlanRefused(f"Python reads the data of {name} ({read.what})")
            reads[read.what, origin.index, origin.region.bounds()] = None
    return tuple(reads)
