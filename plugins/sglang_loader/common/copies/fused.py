"""Many strided copies between memories, in a few launches, to be repeated in every sync.

    copies = FusedCopies([(copy, number), ...])           # `copy` reads the memory of this number
    for launch in copies.between(memories, targets, device):    # and writes `targets[copy.storage]`
        launch()                                          # asynchronous on a GPU

The kernel (`kernel`) runs the copies of whole words, torch's fused copies run the others. The
copies are divided once. For other memories only the addresses change. If memories lie on several
GPUs, all of these GPUs are read at the same time, see `kernel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from sglang_loader.common.bucket_source import CopyFrom
from sglang_loader.common.copies.kernel import (
    WORD,
    interleaved_order,
    is_available,
    launch,
    rows_of,
    tables_of,
)
from sglang_loader.common.copies.strided import copy_views
from sglang_loader.common.shared_memory import peer_gpu_of


class FusedCopies:
    """A set of copies, of which no two may write the same byte. See the module.

    Attributes:
        numbers: the numbers of the memories that are read, ascending.
    """

    def __init__(self, copies: Sequence[CopyFrom]) -> None:
        self._targets = {copy.storage for copy, _ in copies}
        self.numbers = sorted({number for _, number in copies})
        place = {number: i for i, number in enumerate(self.numbers)}
        self._copies = [(copy, place[number]) for copy, number in copies]
        self._divided: dict[object, tuple[_WordCopies, list[CopyFrom]]] = {}

    def between(
        self,
        memories: Mapping[int, torch.Tensor] | Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        device: torch.device,
    ) -> list[Callable[[], object]]:
        """Return functions that launch the copies between these memories and targets.

        The function of the kernel does not keep `memories` and `targets` alive. Those of torch's
        copies do.

        Args:
            memories: by number, flat contiguous uint8. Memories that no copy reads are ignored.
            targets: flat uint8, each at the beginning of its storage.
            device: on which the kernel runs.
        """
        memories = [memories[number] for number in self.numbers]
        _, gpus = np.unique([peer_gpu_of(memory) or "" for memory in memories], return_inverse=True)

        def is_for_kernel(tensor: torch.Tensor) -> bool:
            return tensor.device == device and tensor.data_ptr() % WORD.itemsize == 0

        # Each copy goes to the kernel if both of its sides are whole words on `device`.
        launches: list[Callable[[], object]] = []
        torch_copies: Sequence[CopyFrom] = self._copies
        with torch.inference_mode(False), torch.no_grad():
            if is_available(device):
                target = frozenset(i for i in self._targets if is_for_kernel(targets[i]))
                source = frozenset(i for i, memory in enumerate(memories) if is_for_kernel(memory))
                words, torch_copies = self._divide(target, source)
                if len(words.rows):
                    launches.append(words.between(memories, targets, gpus, device))
            alike: dict[object, tuple[list[torch.Tensor], list[torch.Tensor], list[int]]] = {}
            for copy, number in torch_copies:
                dst, src = copy_views(copy, memories[number], targets[copy.storage])
                # torch's fused kernel takes a list of copies only if all of them are dense.
                key = (dst.dtype, src.dtype, not copy.dims, dst.device, src.device)
                dsts, srcs, src_gpus = alike.setdefault(key, ([], [], []))
                dsts.append(dst)
                srcs.append(src)
                src_gpus.append(int(gpus[number]))
            for dsts, srcs, src_gpus in alike.values():
                order = interleaved_order(src_gpus)
                ordered = [dsts[i] for i in order], [srcs[i] for i in order]
                launches.append(partial(torch._foreach_copy_, *ordered))
        return launches

    def _divide(
        self, targets: frozenset[int], memories: frozenset[int]
    ) -> tuple[_WordCopies, list[CopyFrom]]:
        """Divide the copies into those of whole words between these memories, and the rest."""
        key = targets, memories
        if key not in self._divided:
            words: list[CopyFrom] = []
            rest: list[CopyFrom] = []
            for copy, number in self._copies:
                strides = chain.from_iterable(dim[1:] for dim in copy.dims)
                aligned = math.gcd(WORD.itemsize, copy.src, copy.dst, copy.run, *strides)
                are_words = copy.unit.cast is None and aligned == WORD.itemsize
                is_taken = are_words and copy.storage in targets and number in memories
                (words if is_taken else rest).append((copy, number))
            self._divided[key] = _WordCopies(words), rest
        return self._divided[key]


class _WordCopies:
    """The copies for the kernel, as rows whose addresses are offsets in memories and targets."""

    def __init__(self, copies: Sequence[CopyFrom]) -> None:
        entries, places = [], []
        for copy, number in copies:
            rows = list(rows_of(copy)) if copy.run else []
            entries += rows
            places += [(number, copy.storage)] * len(rows)
        self.rows, self._tiles = tables_of(entries)
        self._numbers, self._targets = np.array(places, dtype=np.int64).reshape(-1, 2).T
        # Both are kept on the device, because an upload waits for the stream: the tiles with the
        # GPUs that they were ordered for, and the rows with their addresses.
        self._device_tiles: tuple[list[int], torch.Tensor] | None = None
        self._device_rows: tuple[list[int], torch.Tensor] | None = None

    def between(
        self,
        memories: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        gpus: npt.NDArray[np.int64],
        device: torch.device,
    ) -> Callable[[], object]:
        """Return a function that launches the kernel.

        Args:
            gpus: for each memory the number of its GPU.
        """
        read_from = gpus.tolist()
        if self._device_tiles is None or self._device_tiles[0] != read_from:
            order = interleaved_order(gpus[self._numbers][self._tiles[:, 0]])
            self._device_tiles = read_from, torch.from_numpy(self._tiles[order]).to(device)
        addresses = [tensor.data_ptr() for tensor in (*memories, *targets)]
        if self._device_rows is None or self._device_rows[0] != addresses:
            rows = self.rows.copy()
            rows[:, 0] += np.array(addresses[: len(memories)])[self._numbers]
            rows[:, 1] += np.array(addresses[len(memories) :])[self._targets]
            self._device_rows = addresses, torch.from_numpy(rows).to(device)
        return partial(launch, self._device_tiles[1], self._device_rows[1])
