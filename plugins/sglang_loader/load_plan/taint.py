"""Which host reads of a trace saw data that a sync changes: those cannot be replayed.

A read of a constant (a shape table, an index made from Python numbers) is harmless. A read of the
bucket, or of anything computed from it, refuses the plan at once. A read of a destination is
harmless only if no bucket of the sync writes it, which is known later: such reads are handed on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.intervals import Interval
from sglang_loader.load_plan.plan import PlanRefused
from sglang_loader.load_plan.trace import Space, TensorRef, Trace


def judge_host_reads(trace: Trace, layout: BucketLayout) -> tuple[tuple[str, int, Interval], ...]:
    """`(what, storage, byte range)` of the destination data that reached Python.

    Raises:
        PlanRefused: data of the bucket reached Python.
    """
    if not trace.host_reads:
        return ()
    origins = _slot_origins(trace)
    reads: list[tuple[str, int, Interval]] = []
    for read in trace.host_reads:
        for origin in _origins_of(read.tensor, origins):
            if origin.space is Space.BUCKET:
                name = _source_name(layout, origin)
                raise PlanRefused(f"Python reads the data of {name} ({read.what})")
            reads.append((read.what, origin.index, origin.region.bounds()))
    return tuple(dict.fromkeys(reads))


def _slot_origins(trace: Trace) -> dict[int, set[TensorRef]]:
    """For each temporary, the bucket and destination regions that its data comes from."""
    origins: dict[int, set[TensorRef]] = defaultdict(set)
    for step in trace.steps:
        found = {o for ref in step.reads for o in _origins_of(ref, origins)}
        targets = [w.index for w in step.writes if w.space is Space.SLOT]
        targets += [slot for slot in step.outputs if slot is not None]
        for slot in targets:
            origins[slot] |= found
    return origins


def _origins_of(ref: TensorRef, origins: dict[int, set[TensorRef]]) -> Iterable[TensorRef]:
    if ref.space is Space.SLOT:
        return sorted(origins[ref.index], key=lambda r: (r.space.value, r.index, r.region.offset))
    return () if ref.space is Space.CONSTANT else (ref,)


def _source_name(layout: BucketLayout, ref: TensorRef) -> str:
    at = ref.region.offset
    for tensor in layout.tensors:
        if tensor.offset <= at < tensor.offset + max(tensor.nbytes, 1):
            return tensor.name
    return f"bucket bytes at {at}"
