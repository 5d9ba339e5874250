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
    return torch.stack([_by_torch(data) for data in aligned])


def digests_on_host(storages: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `digests` of tensors on any devices, or of no tensors: int64 `[n, 2]` on the host."""
    rows = torch.empty(len(storages), 2, dtype=torch.int64)
    for device in dict.fromkeys(data.device for data in storages):
        members = [i for i, data in enumerate(storages) if data.device == device]
        rows[members] = digests([storages[i] for i in members]).cpu()
    return rows


def _by_torch(data: torch.Tensor) -> torch.Tensor:
    """Compute the digest of one storage, a chunk at a time."""
    num_words, rest = divmod(data.numel(), 8)
    total = torch.zeros(2, dtype=torch.int64, device=data.device)
    for start in range(0, num_words + 1, CHUNK_WORDS):
        chunk = data[8 * start : 8 * (start + CHUNK_WORDS)]
        if start + CHUNK_WORDS > num_words:  # the last chunk, with the last word
            last = torch.zeros(8 * (num_words + 1 - start), dtype=torch.uint8, device=data.device)
            last[: len(chunk)] = chunk
            last[-1] = rest
            chunk = last
        total += _lane_sums(chunk.view(torch.int64), start)
    return total


def _lane_sums(words: torch.Tensor, start: int) -> torch.Tensor:
    """Return the sums that int64 words from position `start` on add to the two lanes."""
    factor, *factors = _FACTORS.values()
    keys = torch.arange(start, start + len(words), device=words.device).mul_(factor)
    lanes = torch.stack([words ^ keys, words + keys])
    halves = lanes.view(torch.int32)  # low, high, low, ...
    for first, second in zip(factors[:2], factors[2:], strict=True):
        halves[:, ::2] ^= halves[:, 1::2]
        lanes[0] *= first
        lanes[1] *= second
    halves[:, ::2] ^= halves[:, 1::2]
    return lanes.sum(dim=1)


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
        return torch.equal(_by_kernel([data])[0], _by_torch(data))

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
