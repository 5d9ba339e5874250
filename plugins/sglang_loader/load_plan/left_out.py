"""What `load_weights` does without a tensor of the bucket, and a plan leaves out. Pure.

Zeros in a padded row stay as they are. So does what is made of other weights (MLA's `w_kc`, which
some models make for all layers whenever they are called) if it is up to date: the last bucket of a
sync that writes those weights then makes it of them, too. The proof of one bucket cannot tell this:
the other buckets of the sync must be looked at.

    steps = makings(...)           # of one bucket; of those that the plan does, `remade`
    why_stale(buckets, destinations)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from sglang_loader.common.regions.intervals import Interval, meets, merge, num_bytes
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.plan import BucketPlan, Making
from sglang_loader.load_plan.trace import Space, Step, TensorRef, in_space

Writes = Mapping[int, Sequence[Interval]]
"""Byte ranges by destination storage."""


def makings(steps: Iterable[Step]) -> Iterator[Making]:
    """Those that write to the model, and need no data but the model's."""
    for step in steps:
        made = tuple(in_space(step.writes, Space.DESTINATION))
        if made and all(origin.space is Space.DESTINATION for origin in step.origins):
            yield Making(step.op, made, frozenset(step.origins))


def remade(steps: Sequence[Step]) -> frozenset[Making]:
    """Those after which no other step writes what they write or read."""
    found: set[Making] = set()
    later: dict[int, list[Interval]] = defaultdict(list)
    for step in reversed(steps):
        for making in makings([step]) if step.origins else ():
            if not is_written((*making.made, *making.of), later):
                found.add(making)
        for ref in in_space(step.writes, Space.DESTINATION):
            later[ref.index].append(ref.region.bounds())
    return frozenset(found)


def is_written(refs: Iterable[TensorRef], writes: Writes) -> bool:
    """True if any byte of these may be."""
    return any(meets(writes.get(ref.index, ()), ref.region.bounds()) for ref in refs)


def why_stale(buckets: Sequence[BucketPlan], destinations: Destinations) -> str | None:
    """What would not be as `load_weights` leaves it, after a sync by these plans; None: all is."""
    left_out: dict[Making, list[int]] = defaultdict(list)  # by step the buckets
    never: dict[int, list[Interval]] = defaultdict(list)  # made, once the plans are used
    for number, bucket in enumerate(buckets):
        for step in bucket.left_out:
            left_out[step].append(number)
    for ref in (ref for step in left_out for ref in step.made):
        never[ref.index].append(ref.region.bounds())
    for storage, ranges in never.items():
        if num_bytes(ranges) > num_bytes(merge(ranges)):  # the last one counts, if both are done
            return f"load_weights writes {destinations.storages[storage].name} again without data"
    for step, numbers in left_out.items():
        name = destinations.storages[step.made[0].index].name
        done = [number for number, bucket in enumerate(buckets) if step in bucket.remade]
        writing = [i for i, bucket in enumerate(buckets) if is_written(step.made, bucket.writes)]
        changing = [i for i, bucket in enumerate(buckets) if is_written(step.of, bucket.writes)]
        is_read = any(is_written(step.made, bucket.live_in) for bucket in buckets)
        for number in numbers:
            others = [i for i in writing if i < number or (is_read and i > number)]
            if _last_before(number, others) not in (None, *done):
                return f"load_weights writes {name} again in another bucket"
            is_changed = _last_before(number, changing) not in (None, *done)
            if is_changed or is_written(step.of, never):
                return f"load_weights makes {name} of what other buckets change"
    return None


def _last_before(number: int, buckets: Sequence[int]) -> int | None:
    """The one of some buckets that came last before bucket `number`, in this sync or, from that
    bucket on, in the sync before; None: there are none.
    """
    return max(buckets, key=lambda i: (i < number, i), default=None)
