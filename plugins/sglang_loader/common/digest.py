"""128-bit digests of storages, taken on their device.

    digests(storages)        # int64 [n, 2]; on a GPU one launch reads each word of all once

A storage counts as its 64-bit words and one more word. This last word holds the remaining bytes, up
to 7, and their number in the top byte. Each of two lanes mixes every word with the word's position,
and adds the results modulo 2**64. Any changed bit of a word or a position changes about half of the
result. Sums do not depend on the order, so the Triton kernel and torch's operators give the same
digest. In each lane the mixing is one-to-one: the change of a single word always shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain

import torch

from sglang_loader.common.copies.kernel import tile_table
from sglang_loader.common.copies.triton_kernels import kernel_works, tl, triton

PART_WORDS = 64 << 10
"""Words of one program of the kernel. With more words, few storages would use few multiprocessors.
"""
BLOCK_WORDS = 1024
NUM_WARPS = 4
CHUNK_WORDS = 1 << 20
"""Words of one run of torch's operators. The temporaries are a few times as large."""
TOGETHER_WORDS = 16 << 10
"""Words of small storages that torch's operators read in one run. Larger ones have their own."""
# Odd and below 2**63: the multipliers of xorshift64*, of Evensen's moremur, of MurmurHash3 and PCG.
_FACTORS = {
    "PLACE": 0x2545F4914F6CDD1D,
    "A": 0x3C79AC492BA7B653,
    "B": 0x1C69B3F74AC4AE35,
    "C": 0x4CF5AD432745937F,
    "D": 0x5851F42D4C957F2D,
}


def tensor_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the digest of one tensor's elements: int64 of shape `[2]`. Asynchronous."""
    return digests([tensor.detach().contiguous().reshape(-1).view(torch.uint8)])[0]


def digests(storages: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the digests of storages on one device: int64 `[n, 2]` on that device. Asynchronous.

    Args:
        storages: flat contiguous uint8 tensors, at least one.
    """
    # 64-bit words can only be read at multiples of 8 bytes.
    aligned = [
        data.clone() if data.data_ptr() % 8 or data.storage_offset() % 8 else data
        for data in storages
    ]
    if is_available(aligned[0].device):
        return _by_kernel(aligned)
    return _by_torch(aligned)


def digests_on_host(storages: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `digests` of tensors on any devices, or of no tensors: int64 `[n, 2]` on the host."""
    rows = torch.empty(len(storages), 2, dtype=torch.int64)
    for device in dict.fromkeys(data.device for data in storages):
        members = [i for i, data in enumerate(storages) if data.device == device]
        rows[members] = digests([storages[i] for i in members]).cpu()
    return rows


def _by_torch(storages: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute the digests of storages that are aligned to 8 bytes, with torch's operators."""
    # The full chunks of a storage come one by one. What is left of many storages comes together:
    # a model has hundreds of small ones.
    sums: list[torch.Tensor] = []
    rests: list[tuple[torch.Tensor, int]] = []  # each with the position of its first word
    num_left = 0
    for data in storages:
        num_chunked = data.numel() // 8 // CHUNK_WORDS * CHUNK_WORDS
        rest = data[8 * num_chunked :]
        num_left += rest.numel() // 8 + 1
        if rests and num_left > TOGETHER_WORDS:
            sums.append(_sums_of_rests(rests))
            rests, num_left = [], rest.numel() // 8 + 1
        rests.append((rest, num_chunked))
    totals = torch.cat([*sums, _sums_of_rests(rests)])
    for total, data in zip(totals, storages, strict=True):
        for start in range(0, data.numel() // 8 - CHUNK_WORDS + 1, CHUNK_WORDS):
            words = data[8 * start : 8 * (start + CHUNK_WORDS)].view(torch.int64)
            places = torch.arange(start, start + CHUNK_WORDS, device=data.device)
            total += _lanes_of(words, places).sum(dim=1)
    return totals


def _sums_of_rests(rests: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """Return what the last words of some storages add to their digests: int64 `[n, 2]`.

    Args:
        rests: the last bytes of each storage, with the position of their first word.
    """
    device = rests[0][0].device
    # Behind the remaining bytes of a storage come zeros, and the number of these bytes.
    fillings = {}
    for num in {rest.numel() % 8 for rest, _ in rests}:
        fillings[num] = torch.zeros(8 - num, dtype=torch.uint8, device=device)
        fillings[num][-1] = num
    filled = chain.from_iterable((rest, fillings[rest.numel() % 8]) for rest, _ in rests)
    words = torch.cat(list(filled)).view(torch.int64)
    if len(rests) == 1:
        start = rests[0][1]
        places = torch.arange(start, start + len(words), device=device)
        return _lanes_of(words, places).sum(dim=1).unsqueeze(0)
    sizes = torch.tensor([rest.numel() // 8 + 1 for rest, _ in rests])
    ends = sizes.cumsum(0)
    shifts = torch.tensor([start for _, start in rests]) - (ends - sizes)
    places = torch.arange(len(words)) + shifts.repeat_interleave(sizes)
    # Up to and with each storage: the difference of two is what one storage adds.
    running = _lanes_of(words, places.to(device)).cumsum(dim=1)[:, (ends - 1).to(device)]
    return running.diff(dim=1, prepend=running.new_zeros(2, 1)).t()


def _lanes_of(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return what int64 words at these positions add to the two lanes: int64 `[2, n]`."""
    factor, *factors = _FACTORS.values()
    keys = places.mul_(factor)
    lanes = torch.stack([words ^ keys, words + keys])
    halves = lanes.view(torch.int32)  # low, high, low, ...
    for first, second in zip(factors[:2], factors[2:], strict=True):
        halves[:, ::2] ^= halves[:, 1::2]
        lanes[0] *= first
        lanes[1] *= second
    halves[:, ::2] ^= halves[:, 1::2]
    return lanes


def _by_kernel(storages: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute the digests of storages that are aligned to 8 bytes, in one launch."""
    # One program for each part of each storage. The last word makes a storage one word longer.
    device = storages[0].device
    places = [(data.data_ptr(), data.numel()) for data in storages]
    parts = tile_table([nbytes // 8 // PART_WORDS + 1 for _, nbytes in places])
    table = torch.tensor(places, dtype=torch.int64).to(device)
    sums = torch.zeros(len(places), 2, dtype=torch.int64, device=device)
    with torch.cuda.device_of(sums):
        _add_parts[(len(parts),)](
            sums,
            table,
            torch.from_numpy(parts).to(device),
            PART=PART_WORDS,
            BLOCK=BLOCK_WORDS,
            **_FACTORS,
            num_warps=NUM_WARPS,
        )
    return sums


@cache
def is_available(device: torch.device) -> bool:
    """Return True if the kernel and torch give the same digest on `device`. Tried once."""

    def agrees_with_torch() -> bool:
        data = torch.arange(8 * PART_WORDS + 13, device=device).to(torch.uint8)
        return torch.equal(_by_kernel([data]), _by_torch([data]))

    return kernel_works("computes digests", device, agrees_with_torch)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _mixed(word, FIRST: tl.constexpr, SECOND: tl.constexpr):  # type: ignore[no-untyped-def]
        word = (word ^ (word >> 32)) * FIRST
        word = (word ^ (word >> 32)) * SECOND
        return word ^ (word >> 32)

    @triton.jit  # type: ignore[untyped-decorator]
    def _add_parts(  # type: ignore[no-untyped-def]
        sums,
        storages,
        parts,
        PART: tl.constexpr,
        BLOCK: tl.constexpr,
        PLACE: tl.constexpr,
        A: tl.constexpr,
        B: tl.constexpr,
        C: tl.constexpr,
        D: tl.constexpr,
    ):
        # This program's part: the storage's number, and the part's first word.
        part = parts + tl.program_id(0).to(tl.int64) * 2
        storage = tl.load(part).to(tl.int64) * 2
        first = tl.load(part + 1).to(tl.int64) * PART
        address = tl.load(storages + storage)
        nbytes = tl.load(storages + storage + 1)
        words = address.to(tl.pointer_type(tl.uint64))
        num_words = nbytes // 8
        near = tl.arange(0, BLOCK)
        first_lane = tl.zeros([BLOCK], tl.uint64)
        second_lane = tl.zeros([BLOCK], tl.uint64)
        # Blocks that are full need no mask.
        whole = (tl.minimum(PART, num_words - first) // BLOCK) * BLOCK
        for start in range(first, first + whole, BLOCK):
            place = start + near
            key = place.to(tl.uint64) * PLACE
            word = tl.load(words + place)
            first_lane += _mixed(word ^ key, A, B)
            second_lane += _mixed(word + key, C, D)
        if whole < PART:  # the storage ends here
            byte = tl.arange(0, 8)
            rest = nbytes - num_words * 8
            tail = address.to(tl.pointer_type(tl.uint8)) + num_words * 8 + byte
            value = tl.load(tail, mask=byte < rest, other=0).to(tl.uint64)
            value = tl.where(byte == 7, rest.to(tl.uint64), value)
            end = tl.sum(value << (byte * 8).to(tl.uint64))
            # The last block: the remaining words, then the storage's last word.
            place = first + whole + near
            key = place.to(tl.uint64) * PLACE
            word = tl.load(words + place, mask=place < num_words, other=0)
            word = tl.where(place == num_words, end, word)
            within = place <= num_words
            first_lane += tl.where(within, _mixed(word ^ key, A, B), 0)
            second_lane += tl.where(within, _mixed(word + key, C, D), 0)
        lanes = sums + storage
        tl.atomic_add(lanes, tl.sum(first_lane).to(tl.int64, bitcast=True))
        tl.atomic_add(lanes + 1, tl.sum(second_lane).to(tl.int64, bitcast=True))
