"""128-bit digests of storages, taken on their device.

    digests(storages)        # int64 [n, 2]; on a GPU one launch reads each word of all once

A storage counts as its 64-bit words and one more word. This last word holds the remaining bytes, up
to 7, and their number in the top byte. Each of two lanes mixes every word with the word's position,
and adds the results modulo 2**64. Any changed bit of a word or a position changes about half of the
result. Sums do not depend on the order, so the Triton kernel and torch's operators give the same
digest. In each lane the mixing is one-to-one: the change of a single word always shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    groups = _groups(storages)
    return torch.cat([_of_small(group) if group[1:] else _of_one(group[0]) for group in groups])


def _groups(storages: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the storages in groups: small ones together, as a model has hundreds of these."""
    group: list[torch.Tensor] = []
    num_words = 0
    for data in storages:
        size = data.numel() // 8 + 1
        if group and num_words + size > TOGETHER_WORDS:
            yield group
            group, num_words = [], 0
        group.append(data)
        num_words += size
    yield group


def _of_one(data: torch.Tensor) -> torch.Tensor:
    """Compute the digest of one storage, a chunk at a time: int64 `[1, 2]`."""
    num_words = data.numel() // 8
    total = torch.zeros(1, 2, dtype=torch.int64, device=data.device)
    for start in range(0, num_words + 1, CHUNK_WORDS):
        chunk = data[8 * start : 8 * (start + CHUNK_WORDS)]
        is_last = start + CHUNK_WORDS > num_words
        words = _with_last_word(chunk) if is_last else chunk.view(torch.int64)
        places = torch.arange(start, start + len(words), device=data.device)
        total += _lanes_of(words, places).sum(dim=1)
    return total


def _of_small(storages: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute the digests of storages together: int64 `[n, 2]`."""
    by_storage = [_with_last_word(data) for data in storages]
    words = torch.cat(by_storage)
    sizes = torch.tensor([len(own) for own in by_storage])
    ends = sizes.cumsum(0)
    places = torch.arange(len(words)) - (ends - sizes).repeat_interleave(sizes)
    # Up to and with each storage: the difference of two is what one storage adds.
    lanes = _lanes_of(words, places.to(words.device))
    running = lanes.cumsum(dim=1)[:, (ends - 1).to(words.device)]
    return running.diff(dim=1, prepend=running.new_zeros(2, 1)).t()


def _with_last_word(data: torch.Tensor) -> torch.Tensor:
    """Copy the end of a storage into int64 words, of which the last is that of the module."""
    copied = torch.zeros(data.numel() // 8 * 8 + 8, dtype=torch.uint8, device=data.device)
    copied[: data.numel()] = data
    copied[-1] = data.numel() % 8
    return copied.view(torch.int64)


def _lanes_of(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return what int64 words at these positions add to the two lanes: int64 `[2, n]`."""
    factor, *factors = _FACTORS.values()
    keys = places * factor
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
