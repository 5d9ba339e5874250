"""Check that a plan loads the same bytes as `load_weights` into every storage of the model.

    reason = check_bucket(model, bucket_plan, traced.destinations, model.load_weights, buffer)
    if reason is not None:
        log(reason)        # the weights are as loaded eagerly, the plan is not to be used

The check of one bucket:

1. Load the bucket eagerly and take a digest of every reachable storage.
2. Load a scrambled copy of the bucket eagerly. All bytes that the loader writes, seen or unseen by
   the tracer, now differ.
3. Fill the bytes that the plan claims to write with a pattern.
4. Replay the plan from the true bucket and compare the digests.

A write that the trace did not see (another thread, a kernel outside the dispatcher) leaves
scrambled bytes behind. A missing or misplaced copy leaves the pattern. Digests are taken on the
device. No host copy is made.

A plan that was inferred (`layer_templates`) may also copy from another tensor of the same content.
So each tensor is scrambled in a way of its own, and after step 2 the plan is replayed from the
scrambled bucket, too. It may also write what `load_weights` never writes. So these bytes are saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

import torch
from torch import nn

from sglang_loader.common.digest import digests_on_host
from sglang_loader.common.layout import BucketLayout, BucketTensor
from sglang_loader.common.regions.intervals import subtract
from sglang_loader.load_plan.destinations import (
    Destinations,
    StorageEntry,
    collect_destinations,
    first_difference,
)
from sglang_loader.load_plan.executor import replay_once
from sglang_loader.load_plan.plan import BucketPlan, LoadWeights

POISON = 0xA5
_KEPT_BITS = {
    torch.bfloat16: 0x7F00,
    torch.float16: 0x7800,
    torch.float32: 0x7F000000,
    torch.float64: 0x7FE0 << 48,
    torch.bool: ~1,
}
_MIRRORS = {  # infinities and NaNs lie above the finite numbers, or at 0x80
    torch.float8_e4m3fn: 0xFE,
    torch.float8_e5m2: 0xFB,
    torch.float8_e8m0fnu: 0xFD,
    torch.float8_e4m3fnuz: 0,
    torch.float8_e5m2fnuz: 0,
}
_ONE_IN_EACH_BYTE = 0x0101010101010101
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Digests: TypeAlias = dict[StorageEntry, tuple[int, ...]]
"""128 bits for the content of each storage after an eager load."""


def check_bucket(
    model: nn.Module,
    bucket: BucketPlan,
    destinations: Destinations,
    load_weights: LoadWeights,
    buffer: torch.Tensor,
    known: Digests | None = None,
    *,
    is_inferred: bool = False,
) -> str | None:
    """Prove one bucket's plan against the eager loader. Return the difference, or None.

    The check takes scratch copies on the device: of the bucket, and of the model's bytes that its
    loading reads. In the end the model holds the bucket's weights.

    Args:
        known: digests after the last check, if nothing was loaded since. Storages that the plan
            does not touch must still have these digests. Updated in place, and empty after a failed
            check.
        is_inferred: no trace has seen how this bucket is loaded. See the module.
    """
    source = buffer[: bucket.layout.nbytes]
    # The reference is a load without the tracer. A loader may change its tensors: load a copy.
    load_weights(iter(bucket.layout.views(source.clone())))
    known = {} if known is None else known
    storages, touched = destinations.storages, bucket.touched
    new = [i for i, storage in enumerate(storages) if i in touched or storage not in known]
    known.update(_digests(destinations, new))
    saved: list[tuple[torch.Tensor, torch.Tensor]] = []  # a part of the model, and its old content

    def differs() -> str | None:
        # Bytes that `load_weights` reads cannot be poisoned. They are saved for a failed check.
        for storage, ranges in (bucket.written if is_inferred else bucket.live_in).items():
            parts = [destinations.memory[storage][start:stop] for start, stop in ranges]
            saved.extend((part, part.clone()) for part in parts)
        # Steps 2 to 4 of the module's docstring.
        scrambled = scramble(bucket.layout, source)
        if is_inferred:
            set_apart(bucket.layout, scrambled)
        # An inferred plan is replayed from `scrambled` next, which the loader must not change.
        load_weights(iter(bucket.layout.views(scrambled.clone() if is_inferred else scrambled)))
        if is_inferred:
            expected = _digests(destinations, sorted(touched))
            poison(bucket, destinations)
            replay_once(bucket, destinations, load_weights, scrambled)
            if _digests(destinations, sorted(touched)) != expected:
                return "load_weights loads this layer otherwise than another one"
        poison(bucket, destinations)
        replay_once(bucket, destinations, load_weights, source)
        moved = first_difference(destinations, collect_destinations(model))
        if moved is not None:
            return f"load_weights rebinds tensors: {moved}"
        # Of all storages: a write that the trace did not see may be in any of them.
        digests = _digests(destinations, range(len(storages)))
        different = [i for i, storage in enumerate(storages) if digests[storage] != known[storage]]
        names = [name for i in different for name in destinations.names_of(i)]
        if not names:
            return None
        return f"{len(names)} tensors differ from what load_weights loads: {', '.join(names[:3])}"

    try:
        reason = differs()
    except Exception as error:
        reason = f"the check of the load plan failed: {error!r}"
    if reason is not None:
        # `load_weights` may combine a tensor with the old content: a maximum of both, for example.
        # So the old content is put back before the last load.
        for part, content in saved:
            part.copy_(content)
        load_weights(iter(bucket.layout.views(source.clone())))
        known.clear()
    return reason


def _digests(destinations: Destinations, storages: Sequence[int]) -> Digests:
    """Return the digests of these storages. There is one transfer to the host per device."""
    values = digests_on_host([destinations.memory[i] for i in storages]).tolist()
    return {
        destinations.storages[i]: tuple(digest) for i, digest in zip(storages, values, strict=True)
    }


def scramble(layout: BucketLayout, buffer: torch.Tensor) -> torch.Tensor:
    """Copy a bucket so that every element differs from the original.

    The parts of an element that a loader may use differ, too: its upper bits, its magnitude, its
    exponent. Finite numbers stay finite, so that a loader can compute with them. Exceptions are
    numbers from 32768 on in float16, from 2**127 on in wider types, and scales of 8 bits.
    """
    copy = buffer[: layout.nbytes].clone()
    for dtype, tensors in groupby(layout.tensors, key=_real_dtype):
        # Padding between the tensors is scrambled, too: one operator serves thousands of tensors.
        run = list(tensors)
        start, stop = run[0].offset, run[-1].offset + run[-1].nbytes
        words = copy[start:stop].view(_INTEGERS[dtype.itemsize])
        if dtype in _MIRRORS:
            # Floats of 8 bits get another sign, and the largest becomes the smallest. NaNs, and the
            # zeros of fnuz types, stay.
            words.neg_().add_(_MIRRORS[dtype])
        else:
            # Integers become their complement, so that an index counts from the end. Floats get
            # another sign, fraction and lowest bit of the exponent.
            words.bitwise_xor_(~_KEPT_BITS.get(dtype, 0))
    return copy


def set_apart(layout: BucketLayout, scrambled: torch.Tensor) -> None:
    """Change every byte of a scrambled bucket, so that no two tensors have the same content."""
    # Two numbers for each tensor, one for each half of its bytes. None has the highest bit, which
    # `scramble` has changed in wider types than fp8: so no byte is as it was.
    pairs = [divmod(position, 126) for position in range(len(layout.tensors))]
    numbers = torch.tensor(pairs).remainder_(126).add_(1).mul_(_ONE_IN_EACH_BYTE)
    numbers = numbers.to(scrambled.device)
    for positions in _alike_in_a_row(layout.tensors):
        first = layout.tensors[positions.start]
        middle = -(-first.nbytes // 2)
        # The widest words of which both halves are whole numbers: few elements are quick.
        begin = scrambled.storage_offset() + first.offset
        word = _INTEGERS[math.gcd(8, begin, first.nbytes, middle)]
        data = scrambled[first.offset : first.offset + len(positions) * first.nbytes].view(word)
        rows = data.view(len(positions), first.nbytes // word.itemsize)
        of_rows = numbers[positions.start : positions.stop].to(word)
        rows[:, : middle // word.itemsize].bitwise_xor_(of_rows[:, :1])
        rows[:, middle // word.itemsize :].bitwise_xor_(of_rows[:, 1:])


def _alike_in_a_row(tensors: Sequence[BucketTensor]) -> Iterator[range]:
    """Yield the positions of tensors of one size that follow each other without a gap."""
    start = 0
    for stop in range(1, len(tensors) + 1):
        if stop < len(tensors):
            nbytes = tensors[start].nbytes
            place = tensors[start].offset + (stop - start) * nbytes, nbytes
            if (tensors[stop].offset, tensors[stop].nbytes) == place:
                continue
        yield range(start, stop)
        start = stop


def _real_dtype(tensor: BucketTensor) -> torch.dtype:
    return tensor.dtype.to_real()


def poison(bucket: BucketPlan, destinations: Destinations) -> None:
    """Fill every byte that the bucket's plan writes, and does not read first, with a pattern."""
    for storage, ranges in bucket.written.items():
        target = destinations.memory[storage]
        for start, stop in subtract(ranges, bucket.live_in.get(storage, ())):
            target[start:stop].fill_(POISON)
