"""Check of the writes that a plan leaves out: those that need no tensor of the bucket. Pure.

Zeros in a padded row stay as they are. Some weights are derived from other weights: MLA's `w_kc`,
which some models compute for all layers in every call. Derived weights may stay as they are if they
are up to date. So the last bucket of a sync that writes their sources must derive them, too. The
proof of one bucket cannot show this. `stale_weight` therefore looks at all buckets of a sync.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from sglang_loader.common.regions.intervals import Interval, meets, merge, num_bytes
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.plan import BucketPlan, DerivedWrite
from sglang_loader.load_plan.trace import Space, Step, TensorRef, in_space

Writes = Mapping[int, Sequence[Interval]]
"""Byte ranges, by destination storage."""


def derived_writes(steps: Iterable[Step]) -> Iterator[DerivedWrite]:
    """Yield the steps that write to the model and need no data but the model's."""
    for step in steps:
        targets = tuple(in_space(step.writes, Space.DESTINATION))
        if targets and all(origin.space is Space.DESTINATION for origin in step.origins):
            yield DerivedWrite(step.op, targets, frozenset(step.origins))


def recomputed(steps: Sequence[Step]) -> frozenset[DerivedWrite]:
    """Return the derived writes after which no other step writes their targets or sources."""
    repeated: set[DerivedWrite] = set()
    later: dict[int, list[Interval]] = defaultdict(list)
    for step in reversed(steps):
        for write in derived_writes([step]) if step.origins else ():
            if not is_written((*write.targets, *write.sources), later):
                repeated.add(write)
        for ref in in_space(step.writes, Space.DESTINATION):
            later[ref.index].append(ref.region.bounds())
    return frozenset(repeated)


def is_written(refs: Iterable[TensorRef], writes: Writes) -> bool:
    """Return True if any byte of these tensors may be written."""
    return any(meets(writes.get(ref.index, ()), ref.region.bounds()) for ref in refs)


def stale_weight(buckets: Sequence[BucketPlan], destinations: Destinations) -> str | None:
    """Return a text about the first weight that a sync by these plans would leave stale, or None.

    A weight is stale if `load_weights` would leave other bytes.
    """
    # An example: bucket 0 has `kv_b` of layer 0, bucket 1 has `kv_b` of layer 1. If every call of
    # `load_weights` derives `w_kc` of both layers, bucket 0 may leave out `w_kc` of layer 1. Bucket
    # 1 of the last sync was the last to write `kv_b` of layer 1, and derived `w_kc`. If only the
    # second call derives `w_kc`, of both layers, `w_kc` of layer 0 is stale. Bucket 1 would leave
    # it out, and bucket 0, which writes `kv_b` of layer 0, derives nothing.
    left_out: dict[DerivedWrite, list[int]] = defaultdict(list)  # and the buckets that leave it out
    unwritten: dict[int, list[Interval]] = defaultdict(list)  # bytes by destination storage
    for number, bucket in enumerate(buckets):
        for write in bucket.left_out:
            left_out[write].append(number)
    for ref in (ref for write in left_out for ref in write.targets):
        unwritten[ref.index].append(ref.region.bounds())
    for storage, ranges in unwritten.items():
        if num_bytes(ranges) > num_bytes(merge(ranges)):  # the last one counts, if both are done
            name = destinations.storages[storage].name
            return f"load_weights writes {name} more than once without a tensor of the sync"
    for write, numbers in left_out.items():
        targets, sources = write.targets, write.sources
        name = destinations.storages[targets[0].index].name
        done = [i for i, bucket in enumerate(buckets) if write in bucket.recomputed]
        to_targets = [i for i, bucket in enumerate(buckets) if is_written(targets, bucket.writes)]
        to_sources = [i for i, bucket in enumerate(buckets) if is_written(sources, bucket.writes)]
        is_read = any(is_written(targets, bucket.live_in) for bucket in buckets)
        for number in numbers:
            # The left-out write would set the targets. The bucket that wrote them last must have
            # done so by the same write.
            writers = [i for i in to_targets if i < number or (is_read and i > number)]
            if _last_before(number, writers) not in (None, *done):
                return f"load_weights writes {name} again in a bucket without its tensors"
            is_changed = _last_before(number, to_sources) not in (None, *done)
            if is_changed or is_written(sources, unwritten):
                return f"load_weights computes {name} from weights that other buckets change"
    return None


def _last_before(number: int, buckets: Sequence[int]) -> int | None:
    """Return the bucket of `buckets` that was loaded last before bucket `number`, or None."""
    # A bucket before `number` was loaded in this sync, any other in the sync before.
    return max((i for i in buckets if i < number), default=max(buckets, default=None))
