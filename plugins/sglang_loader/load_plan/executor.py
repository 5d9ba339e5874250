"""Replays a load plan: a few fused copies per bucket, and `load_weights` for the tensors that are
left. Launches work, never waits for it.

    executor = PlanExecutor(plan, model.load_weights)
    executor.replay(0, BucketSource.flat(staging))      # on the current stream; the caller
    synchronises

Binding (turning descriptors into addresses of concrete memory) is done once per source, and lasts
as long as that does: whoever lets go of a source lets go of its memory. Which bytes of which memory
the copies read is found once per map of a bucket, however often that memory is another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch

from sglang_loader.common.bucket_source import BucketMap, BucketSource, CopyFrom
from sglang_loader.common.copies import copy_views
from sglang_loader.common.copy_kernel import (
    WORD,
    BatchedCopy,
    is_available,
    mixed,
    rows_between,
    tables_of,
)
from sglang_loader.common.regions.geometry import StridedCopy
from sglang_loader.common.shared_memory import peer_of
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.plan import BucketPlan, LoadPlan, LoadWeights

SCRATCH = -1
"""In a storage's place: what the loader is given."""


@dataclass(frozen=True)
class _Binding:
    """Concrete views for one bucket: the copies, and the tensors that are left for the loader, in
    `scratch`.
    """

    plan: BucketPlan
    copies: list[Callable[[], object]]
    rest: list[tuple[str, torch.Tensor]]
    scratch: torch.Tensor

    def run(self, load_weights: LoadWeights) -> None:
        with torch.no_grad():
            for copy in self.copies:
                copy()
        if self.rest:
            load_weights(iter(self.rest))


class PlanExecutor:
    """Executes the buckets of one plan. Whether the plan still holds is for `guard` to say."""

    def __init__(self, plan: LoadPlan, load_weights: LoadWeights) -> None:
        self._plan = plan
        self._load_weights = load_weights
        self._found: WeakKeyDictionary[BucketMap, _Copies] = WeakKeyDictionary()
        self._bound: WeakKeyDictionary[BucketSource, _Binding] = WeakKeyDictionary()
        self._scratch: WeakValueDictionary[torch.device, torch.Tensor] = WeakValueDictionary()
        rest = (bucket.rest_layout().nbytes for bucket in plan.buckets)
        self._scratch_nbytes = max(rest, default=0)

    def replay(self, index: int, source: BucketSource, arranged: BucketPlan | None = None) -> None:
        """Load a bucket from `source`, on any device that copies reach, asynchronously on the
        current stream, but for what the model's loader loads. `arranged`: the bucket's plan where
        the source has what that reads alone.

        Raises:
            IndexError: there is no such bucket.
            ValueError: the source does not hold what the plan reads.
            Exception: what `load_weights` raises.
        """
        plan = arranged or self._plan.buckets[index]
        binding = self._bound.get(source)
        if binding is None or binding.plan is not plan:
            copies = self._found.get(source.map)
            if copies is None or copies.plan is not plan:
                copies = self._found[source.map] = _Copies(plan, source.map)
            scratch = self._scratch_on(source.device)
            memory = self._plan.destinations.memory
            binding = self._bound[source] = copies.bind(memory, source, scratch)
        binding.run(self._load_weights)

    def _scratch_on(self, device: torch.device) -> torch.Tensor:
        """Memory for what the loader loads of any bucket: they take turns."""
        scratch = self._scratch.get(device)
        if scratch is None:
            scratch = self._scratch[device] = _empty(self._scratch_nbytes, device)
        return scratch


def replay_once(
    plan: BucketPlan, destinations: Destinations, load_weights: LoadWeights, buffer: torch.Tensor
) -> None:
    """`PlanExecutor.replay` of one bucket's plan; the binding is not kept."""
    scratch, source = _empty(plan.rest_layout().nbytes, buffer.device), BucketSource.flat(buffer)
    _Copies(plan, source.map).bind(destinations.memory, source, scratch).run(load_weights)


def copied_apart(
    plan: BucketPlan, storage: int, memory: Sequence[torch.Tensor], buffer: torch.Tensor
) -> torch.Tensor:
    """What a plan copies out of a bucket to one storage, in memory of its own, which is zero where
    it writes nothing; of `SCRATCH`: what the loader would be given. `memory`: the model's storages,
    which stay as they are.
    """
    is_scratch = storage == SCRATCH
    copies = tuple(copy for copy in plan.copies if copy.storage == storage)
    plan = replace(plan, copies=copies, rest=plan.rest if is_scratch else {})
    source, scratch = BucketSource.flat(buffer), _empty(plan.rest_layout().nbytes, buffer.device)
    apart = scratch.zero_() if is_scratch else torch.zeros_like(memory[storage])
    targets = [apart if number == storage else other for number, other in enumerate(memory)]
    for copy in _Copies(plan, source.map).bind(targets, source, scratch).copies:
        copy()
    return apart


def _empty(nbytes: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


class _Copies:
    """A bucket's copies out of the memories that its map names, to storages or to the scratch: the
    same wherever those memories are.
    """

    def __init__(self, plan: BucketPlan, bucket_map: BucketMap) -> None:
        self.plan = plan
        self._rest = plan.rest_layout()
        copies = list(plan.copies)
        for src, tensor in zip(plan.rest.values(), self._rest.tensors, strict=True):
            if tensor.nbytes:
                copies.append(StridedCopy(SCRATCH, src, tensor.offset, (), tensor.nbytes))
        self._storages = sorted({copy.storage for copy in copies})
        self._all = [found for copy in copies for found in bucket_map.copies(copy)]
        self._found: dict[frozenset[int], tuple[_WordCopies, list[CopyFrom]]] = {}

    def bind(
        self, storages: Sequence[torch.Tensor], source: BucketSource, scratch: torch.Tensor
    ) -> _Binding:
        """The copies out of this memory, asynchronous on a GPU. Whichever way they are made, they
        read from all GPUs on which memories lie at the same time, see `copy_kernel`.
        """
        targets, memories = (*storages, scratch), source.memories
        _, gpus = np.unique([peer_of(memory) or "" for memory in memories], return_inverse=True)

        def takes(memory: torch.Tensor) -> bool:
            return memory.device == source.device and memory.data_ptr() % WORD.itemsize == 0

        groups: dict[object, tuple[list[torch.Tensor], list[torch.Tensor], list[int]]] = {}
        made: list[Callable[[], object]] = []
        with torch.inference_mode(False), torch.no_grad():
            left = self._all
            if is_available(source.device) and all(map(takes, memories)):
                words, left = self._words(frozenset(i for i in self._storages if takes(targets[i])))
                if len(words.table):
                    made.append(words.copy(targets, memories, gpus, source.device).run)
            for copy, number in left:
                target, origin = copy_views(copy, memories[number], targets[copy.storage])
                # torch's fused kernel takes a group only if all of it is dense.
                key = (target.dtype, origin.dtype, not copy.dims, target.device, origin.device)
                to, of, on = groups.setdefault(key, ([], [], []))
                to.append(target)
                of.append(origin)
                on.append(int(gpus[number]))
            for to, of, on in groups.values():
                order = mixed(on)
                ordered = [to[i] for i in order], [of[i] for i in order]
                made.append(partial(torch._foreach_copy_, *ordered))
            return _Binding(self.plan, made, self._rest.views(scratch), scratch)

    def _words(self, storages: frozenset[int]) -> tuple[_WordCopies, list[CopyFrom]]:
        """Those that the copy kernel takes, to these storages, and the others."""
        if storages not in self._found:
            kernel: list[CopyFrom] = []
            others: list[CopyFrom] = []
            for copy, number in self._all:
                strides = chain.from_iterable(dim[1:] for dim in copy.dims)
                aligned = math.gcd(WORD.itemsize, copy.src, copy.dst, copy.run, *strides)
                are_words = copy.unit.cast is None and aligned == WORD.itemsize
                is_taken = are_words and copy.storage in storages
                (kernel if is_taken else others).append((copy, number))
            self._found[storages] = _WordCopies.of(kernel), others
        return self._found[storages]


@dataclass(frozen=True)
class _WordCopies:
    """Copies for the kernel: rows whose addresses count in a memory and a storage, by number."""

    table: npt.NDArray[np.int64]
    tiles: npt.NDArray[np.int32]
    numbers: npt.NDArray[np.int64]
    storages: npt.NDArray[np.int64]

    @classmethod
    def of(cls, copies: Sequence[CopyFrom]) -> _WordCopies:
        entries, places = [], []
        for copy, number in copies:
            shape = *(count for count, _, _ in copy.dims), copy.run // WORD.itemsize
            src = *(src // WORD.itemsize for _, src, _ in copy.dims), 1
            dst = *(dst // WORD.itemsize for _, _, dst in copy.dims), 1
            found = list(rows_between(copy.src, copy.dst, shape, src, dst)) if copy.run else []
            entries += found
            places += [(number, copy.storage)] * len(found)
        numbers, storages = np.array(places, dtype=np.int64).reshape(-1, 2).T
        return cls(*tables_of(entries), numbers, storages)

    def copy(
        self,
        targets: Sequence[torch.Tensor],
        memories: Sequence[torch.Tensor],
        gpus: npt.NDArray[np.int64],
        device: torch.device,
    ) -> BatchedCopy:
        table = self.table.copy()
        table[:, 0] += np.array([memory.data_ptr() for memory in memories])[self.numbers]
        table[:, 1] += np.array([target.data_ptr() for target in targets])[self.storages]
        return BatchedCopy(table, self.tiles, device, gpus[self.numbers])
