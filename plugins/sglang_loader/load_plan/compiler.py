"""From the traces of a sync's buckets to its load plan. Pure: reads traces, runs nothing.

The plan copies a tensor that `load_weights` only copies. All other tensors are the plan's `rest`,
which `load_weights` itself loads after the copies. A tensor belongs to the rest if `load_weights`
computes something from the tensor, also through the model (a buffer derived from a parameter). A
tensor also belongs to the rest if its copies may not run first:

- two copies write the same bytes (the later must win), or
- an earlier step reads or writes bytes that the copy writes.

Steps that need no tensor of the bucket are left out. The bytes that they write (zeros in a padded
row) stay as they are, see `left_out`. `verify` proves afterwards that the plan does what
`load_weights` does. If that could never be proved, the plan is refused here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.coalesce import coalesce, find_overlapping
from sglang_loader.common.regions.geometry import BYTES, StridedCopy, Unit, describe_copy
from sglang_loader.common.regions.intervals import (
    Interval,
    contains,
    meets,
    merge,
    merge_runs,
    subtract,
)
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.left_out import derived_writes, recomputed, stale_weight
from sglang_loader.load_plan.plan import SCRATCH, BucketPlan, LoadPlan, PlanRefused
from sglang_loader.load_plan.trace import Space, Step, TracedBucket, in_space


def compile_bucket(traced: TracedBucket) -> BucketPlan:
    """Compile the plan for one bucket.

    Raises:
        PlanRefused: a replay would not do the same as `load_weights`.
    """
    # Refuse a trace that a replay cannot repeat.
    host_reads = _judge_host_reads(traced)
    if traced.problems:
        raise PlanRefused(traced.problems[0])
    live = _live_steps(traced.steps)
    _refuse_unsafe(live)
    # Divide the bucket's tensors into those that are only copied, and the rest.
    # First forwards, from reads to writes. Then backwards: a temporary belongs to the tensors of
    # the steps that read the temporary.
    with_tensors = _with_temporaries(list(_with_tensors(live, traced.layout)))
    steps = [(step, tensors) for step, tensors in with_tensors if tensors]
    candidates = [as_copy(step) for step, _ in steps]
    copies, rest = _split_copies(steps, candidates)
    loaded = [step for step, tensors in steps if tensors & rest]
    coalesced = coalesce(copies)
    written, live_in = effects_of(coalesced, loaded)
    # The rest goes through the scratch buffer to `load_weights`, which may change its arguments.
    left = [traced.layout.tensors[i] for i in sorted(rest)]
    scratch = BucketLayout.pack((t.name, t.shape, t.dtype) for t in left)
    to_scratch = (
        StridedCopy(SCRATCH, tensor.offset, place.offset, (), tensor.nbytes)
        for tensor, place in zip(left, scratch.tensors, strict=True)
        if tensor.nbytes
    )
    # All that the bucket may write, also by steps of the rest.
    writes: dict[int, list[Interval]] = defaultdict(list)
    for step, _ in steps:
        for ref in in_space(step.writes, Space.DESTINATION):
            writes[ref.index].append(ref.region.bounds())
    return BucketPlan(
        layout=traced.layout,
        copies=(*coalesced, *to_scratch),
        rest=scratch,
        written=written,
        live_in=live_in,
        writes={storage: tuple(merge(ranges)) for storage, ranges in writes.items()},
        left_out=tuple(derived_writes(step for step, tensors in with_tensors if not tensors)),
        recomputed=recomputed([step for step, _ in steps]),
        host_reads=host_reads,
    )


def _judge_host_reads(traced: TracedBucket) -> tuple[tuple[str, int, Interval], ...]:
    """Return `(method, storage, byte range)` of each read of the model's data by Python."""
    # A read of a constant (a shape table, an index made from Python numbers) has no origins and is
    # harmless. A read of the model's data is harmless only if no bucket of the sync writes this
    # data, which `join_buckets` checks.
    reads: dict[tuple[str, int, Interval], None] = {}
    for method, tensor in traced.host_reads:
        for origin in traced.origins.of(tensor):
            if origin.space is Space.BUCKET:  # a decision by new data cannot be replayed
                name = traced.layout.tensors[traced.layout.tensor_at(origin.region.offset)].name
                raise PlanRefused(f"Python reads the data of {name} ({method})")
            reads[method, origin.index, origin.region.bounds()] = None
    return tuple(reads)


def _live_steps(steps: Sequence[Step]) -> list[Step]:
    """Return the steps that write more than temporaries, and the steps on which they depend."""
    # Backwards: a step that makes a temporary comes before the steps that need the temporary.
    needed: set[int] = set()
    live: list[Step] = []
    for step in reversed(steps):
        targets = {w.index for w in step.writes if w.space is Space.TEMPORARY}
        escapes = any(
            w.space is not Space.TEMPORARY and 0 not in w.region.shape for w in step.writes
        )
        if escapes or needed & targets:
            live.append(step)
            needed |= targets
            needed.update(r.index for r in step.reads if r.space is Space.TEMPORARY)
    return live[::-1]


def _refuse_unsafe(steps: Iterable[Step]) -> None:
    for step in steps:
        if step.traits.random:  # every replay would need other numbers
            raise PlanRefused(f"a random operator decides weights: {step.op}")
        for target in step.writes:
            if target.space is Space.CONSTANT:  # a replay would not write there
                raise PlanRefused(f"{step.op} writes a tensor that the model does not reach")


def _with_tensors(
    steps: Sequence[Step], layout: BucketLayout
) -> Iterator[tuple[Step, frozenset[int]]]:
    """Yield each step with the positions of the tensors that the step changes or depends on.

    A step may depend on a tensor through earlier writes to the model.
    """
    written: dict[tuple[Space, int], list[tuple[Interval, frozenset[int]]]] = defaultdict(list)
    for step in steps:
        # The tensors that the step reads or changes in the bucket, and those that went into the
        # parts of the model that it reads.
        positions: set[int] = set()
        changed = in_space(step.writes, Space.BUCKET)
        for origin in (*step.origins, *changed):
            bounds = origin.region.bounds()
            if origin.space is Space.BUCKET:
                positions.add(layout.tensor_at(bounds[0]))
            for place, tensors in written[origin.space, origin.index]:
                if meets([place], bounds):
                    positions |= tensors
        needed = frozenset(positions)
        for ref in step.writes:
            written[ref.space, ref.index].append((ref.region.bounds(), needed))
        yield step, needed


def _with_temporaries(
    steps: Sequence[tuple[Step, frozenset[int]]],
) -> list[tuple[Step, frozenset[int]]]:
    """Add to each step that makes a temporary the tensors of the steps that read the temporary."""
    made_for: dict[int, frozenset[int]] = defaultdict(frozenset)
    extended = []
    for step, tensors in reversed(steps):
        made = in_space(step.writes, Space.TEMPORARY)
        tensors = tensors.union(*(made_for[ref.index] for ref in made))
        for ref in in_space(step.reads, Space.TEMPORARY):
            made_for[ref.index] |= tensors
        extended.append((step, tensors))
    return extended[::-1]


def _split_copies(
    steps: Sequence[tuple[Step, frozenset[int]]], candidates: Sequence[StridedCopy | None]
) -> tuple[list[StridedCopy], set[int]]:
    """Split the steps into copies that may run first, in any order, and the rest.

    If a step needs a tensor of the rest, all of the step's tensors belong to the rest. So do the
    tensors of a copy to bytes that an earlier step of the rest reads or writes.

    Returns:
        The copies, and the tensors of the rest.
    """
    # Copies that write the same bytes must keep their order, so they are not free.
    positions = [i for i, copy in enumerate(candidates) if copy is not None]
    overlapping = find_overlapping([copy for copy in candidates if copy is not None])
    free = set(positions) - {positions[i] for i in overlapping}
    rest: set[int] = set()
    # A tensor that moves to the rest may take others with it. Repeat until the rest is stable.
    while True:
        copies: list[StridedCopy] = []
        touched: dict[int, list[Interval]] = defaultdict(list)
        left: set[int] = set()
        for i, ((step, tensors), copy) in enumerate(zip(steps, candidates, strict=True)):
            # A copy runs first only if no step of the rest before it touches its target.
            if (
                copy is not None
                and i in free
                and rest.isdisjoint(tensors)
                and not meets(touched[copy.storage], copy.dst_bounds())
            ):
                copies.append(copy)
                continue
            left |= tensors
            for ref in in_space((*step.reads, *step.writes), Space.DESTINATION):
                touched[ref.index].append(ref.region.bounds())
        if left <= rest:
            return copies, rest
        rest |= left


def as_copy(step: Step) -> StridedCopy | None:
    """Return the step as a copy from the bucket into a destination, or None for another step."""
    if step.copied is None:
        return None
    src, dst = step.copied
    # Complex numbers have no place in a strided copy of bytes or elements.
    if (
        src.space is not Space.BUCKET
        or dst.space is not Space.DESTINATION
        or src.dtype.is_complex
        or dst.dtype.is_complex
    ):
        return None
    unit = BYTES
    if src.dtype != dst.dtype:
        cast = (src.dtype, dst.dtype)
        unit = Unit(src.region.itemsize, dst.region.itemsize, cast)
    return describe_copy(dst.index, src.region, dst.region, unit)


def effects_of(
    copies: Iterable[StridedCopy], steps: Iterable[Step]
) -> tuple[dict[int, tuple[Interval, ...]], dict[int, tuple[Interval, ...]]]:
    """Return two mappings from destination storages to byte ranges.

    Returns:
        The bytes that are surely written, and the bytes of which the old content is read.
    """
    # The copies run first, so their bytes count as written before any step of the rest.
    by_storage: dict[int, list[StridedCopy]] = defaultdict(list)
    for copy in copies:
        by_storage[copy.storage].append(copy)
    written = {
        storage: merge_runs(copy.dst_runs() for copy in storage_copies)
        for storage, storage_copies in by_storage.items()
    }
    live_in: dict[int, list[Interval]] = defaultdict(list)
    for step in steps:
        # A read of bytes that nothing has written yet is a read of the old content.
        for ref in in_space(step.reads, Space.DESTINATION):
            ranges = written.get(ref.index, [])
            runs = merge_runs([ref.region.runs()])
            live_in[ref.index].extend(run for run in runs if not contains(ranges, run))
        for ref in in_space(step.writes if step.traits.overwrites else (), Space.DESTINATION):
            runs = merge_runs([ref.region.runs()])
            written[ref.index] = merge([*written.get(ref.index, []), *runs])
    exposed = {key: tuple(merge(ranges)) for key, ranges in live_in.items() if ranges}
    return {key: tuple(ranges) for key, ranges in written.items()}, exposed


def join_buckets(buckets: Sequence[BucketPlan], destinations: Destinations) -> LoadPlan:
    """Join the plans of a sync's buckets, in order, into the plan of the sync.

    Args:
        destinations: of the last bucket's trace, which has the storages of all traces.

    Raises:
        PlanRefused: Python reads the data of a tensor that the sync writes, or the plan of a bucket
            leaves out a write that is needed.
    """
    # One bucket's plan may be right by itself and still wrong in the sync: check them together.
    storages = destinations.storages
    if (stale := stale_weight(buckets, destinations)) is not None:
        raise PlanRefused(stale)
    writes = _merge_all(bucket.writes for bucket in buckets)
    # A decision by data that the sync itself changes cannot be replayed.
    for method, storage, interval in (read for bucket in buckets for read in bucket.host_reads):
        if meets(writes.get(storage, []), interval):
            name = storages[storage].name
            raise PlanRefused(f"Python reads the data of {name} ({method}), which the sync writes")
    # The coverage is what the sync writes, without bytes whose old content the sync reads.
    written = _merge_all(bucket.written for bucket in buckets)
    exposed = _read_before_written(buckets)
    # What depends on its old content stays out: a release must save these bytes.
    left = {i: subtract(written[i], exposed.get(i, ())) for i in sorted(written)}
    return LoadPlan(
        buckets=tuple(buckets),
        coverage={storages[i].name: tuple(ranges) for i, ranges in left.items() if ranges},
        destinations=destinations,
    )


def _read_before_written(buckets: Sequence[BucketPlan]) -> Mapping[int, Sequence[Interval]]:
    """Return the bytes that are read before this sync has written them, by storage."""
    so_far: dict[int, list[Interval]] = {}
    exposed: dict[int, list[Interval]] = defaultdict(list)
    for bucket in buckets:
        for storage, ranges in bucket.live_in.items():
            exposed[storage] += subtract(ranges, so_far.get(storage, []))
        so_far = _merge_all([so_far, bucket.written])
    return exposed


def _merge_all(parts: Iterable[Mapping[int, Sequence[Interval]]]) -> dict[int, list[Interval]]:
    collected: dict[int, list[Interval]] = defaultdict(list)
    for part in parts:
        for storage, ranges in part.items():
            collected[storage].extend(ranges)
    return {storage: merge(ranges) for storage, ranges in collected.items()}
