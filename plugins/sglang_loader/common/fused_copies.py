"""Many strided copies between memories, in a few launches, time and again.

    copies = FusedCopies([(copy, number), ...])           # `copy` reads the memory of this number
    for launch in copies.between(memories, targets, device):    # and writes `targets[copy.storage]`
        launch()                                          # asynchronous on a GPU

What is of whole words is copied by the kernel of `copy_kernel`, the rest by torch, which fuses what
it can. That is found once; where the memory is another, only its addresses are new. Where memories
lie on several GPUs, all of them are read from at a time, see `copy_kernel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from sglang_loader.common.bucket_source import CopyFrom
from sglang_loader.common.copies import copy_views
from sglang_loader.common.copy_kernel import (
    WORD,
    in_mixed_order,
    is_available,
    launch,
    mixed,
    rows_between,
    tables_of,
)
from sglang_loader.common.shared_memory import peer_of


class FusedCopies:
    """See the module. No byte is written twice."""

    def __init__(self, copies: Sequence[CopyFrom]) -> None:
        self._targets = {copy.storage for copy, _ in copies}
        self._numbers = sorted({number for _, number in copies})
        place = {number: i for i, number in enumerate(self._numbers)}
        self._copies = [(copy, place[number]) for copy, number in copies]
        self._divided: dict[object, tuple[_WordCopies, list[CopyFrom]]] = {}

    def between(
        self,
        memories: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        device: torch.device,
    ) -> list[Callable[[], object]]:
        """The launches, which do not keep what the kernel reads and writes alive.

        Args:
            memories: flat contiguous uint8; only those that are read are looked at.
            targets: flat uint8, each at the beginning of its storage.
            device: on which the kernel runs.
        """
        memories = [memories[number] for number in self._numbers]
        _, gpus = np.unique([peer_of(memory) or "" for memory in memories], return_inverse=True)

        def takes(tensor: torch.Tensor) -> bool:
            return tensor.device == device and tensor.data_ptr() % WORD.itemsize == 0

        found: list[Callable[[], object]] = []
        left: Sequence[CopyFrom] = self._copies
        with torch.inference_mode(False), torch.no_grad():
            if is_available(device):
                to = frozenset(number for number in self._targets if takes(targets[number]))
                of = frozenset(i for i, memory in enumerate(memories) if takes(memory))
                words, left = self._divide(to, of)
                if len(words.rows):
                    found.append(words.between(memories, targets, gpus, device))
            groups: dict[object, tuple[list[torch.Tensor], list[torch.Tensor], list[int]]] = {}
            for copy, number in left:
                target, origin = copy_views(copy, memories[number], targets[copy.storage])
                # torch's fused kernel takes a group only if all of it is dense.
                key = (target.dtype, origin.dtype, not copy.dims, target.device, origin.device)
                into, out_of, on = groups.setdefault(key, ([], [], []))
                into.append(target)
                out_of.append(origin)
                on.append(int(gpus[number]))
            for into, out_of, on in groups.values():
                order = mixed(on)
                ordered = [into[i] for i in order], [out_of[i] for i in order]
                found.append(partial(torch._foreach_copy_, *ordered))
        return found

    def _divide(
        self, targets: frozenset[int], memories: frozenset[int]
    ) -> tuple[_WordCopies, list[CopyFrom]]:
        """Those that the kernel takes, between these, and the others."""
        key = targets, memories
        if key not in self._divided:
            words: list[CopyFrom] = []
            others: list[CopyFrom] = []
            for copy, number in self._copies:
                strides = chain.from_iterable(dim[1:] for dim in copy.dims)
                aligned = math.gcd(WORD.itemsize, copy.src, copy.dst, copy.run, *strides)
                are_words = copy.unit.cast is None and aligned == WORD.itemsize
                is_taken = are_words and copy.storage in targets and number in memories
                (words if is_taken else others).append((copy, number))
            self._divided[key] = _WordCopies(words), others
        return self._divided[key]


class _WordCopies:
    """Copies for the kernel: rows whose addresses count in a memory and a target, by number."""

    def __init__(self, copies: Sequence[CopyFrom]) -> None:
        entries, places = [], []
        for copy, number in copies:
            shape = *(count for count, _, _ in copy.dims), copy.run // WORD.itemsize
            src = *(src // WORD.itemsize for _, src, _ in copy.dims), 1
            dst = *(dst // WORD.itemsize for _, _, dst in copy.dims), 1
            found = list(rows_between(copy.src, copy.dst, shape, src, dst)) if copy.run else []
            entries += found
            places += [(number, copy.storage)] * len(found)
        self.rows, self._tiles = tables_of(entries)
        self._numbers, self._targets = np.array(places, dtype=np.int64).reshape(-1, 2).T
        # By GPU of each memory: the tiles on the device, in the order for these GPUs; and by
        # addresses the rows: to bring either there waits for what the stream has still to do.
        self._tiles_there: tuple[list[int], torch.Tensor] | None = None
        self._rows_there: tuple[list[int], torch.Tensor] | None = None

    def between(
        self,
        memories: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        gpus: npt.NDArray[np.int64],
        device: torch.device,
    ) -> Callable[[], object]:
        """See `FusedCopies`; `gpus`: by memory, a number of the GPU on which it lies."""
        read_from = gpus.tolist()
        if self._tiles_there is None or self._tiles_there[0] != read_from:
            tiles = in_mixed_order(self._tiles, gpus[self._numbers])
            self._tiles_there = read_from, torch.from_numpy(tiles).to(device)
        addresses = [tensor.data_ptr() for tensor in (*memories, *targets)]
        if self._rows_there is None or self._rows_there[0] != addresses:
            rows = self.rows.copy()
            rows[:, 0] += np.array(addresses[: len(memories)])[self._numbers]
            rows[:, 1] += np.array(addresses[len(memories) :])[self._targets]
            self._rows_there = addresses, torch.from_numpy(rows).to(device)
        return partial(launch, self._tiles_there[1], self._rows_there[1])
