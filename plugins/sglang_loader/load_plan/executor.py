"""Replay of a load plan: a few fused copies per bucket, and `load_weights` for the plan's `rest`.

The executor launches work and never waits.

    executor = PlanExecutor(plan, model.load_weights)
    executor.replay(0, BucketSource.flat(staging))   # on the current stream; asynchronous

Copies are computed once per `BucketMap`, and bound to addresses once per `BucketSource`. Both are
kept as long as their map or source lives. So dropping a source frees its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from sglang_loader.common.bucket_source import BucketMap, BucketSource
from sglang_loader.common.copies.fused import FusedCopies
from sglang_loader.common.layout import BucketLayout
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.plan import SCRATCH, BucketPlan, LoadPlan, LoadWeights

NO_TENSORS = BucketLayout((), 0)


@dataclass(frozen=True)
class _Binding:
    """The launches of one bucket's copies, and the tensors in `scratch` for `load_weights`."""

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
    """The executor of one plan. `guard` checks whether the plan still holds."""

    def __init__(self, plan: LoadPlan, load_weights: LoadWeights) -> None:
        self._plan = plan
        self._load_weights = load_weights
        self._copies: WeakKeyDictionary[BucketMap, _Copies] = WeakKeyDictionary()
        self._bound: WeakKeyDictionary[BucketSource, _Binding] = WeakKeyDictionary()
        self._scratch: WeakValueDictionary[torch.device, torch.Tensor] = WeakValueDictionary()
        self._scratch_nbytes = max((bucket.rest.nbytes for bucket in plan.buckets), default=0)

    def replay(self, index: int, source: BucketSource, arranged: BucketPlan | None = None) -> None:
        """Load a bucket from `source`, asynchronously on the current stream.

        Only the tensors of `rest`, which `load_weights` loads, may wait for the device.

        Args:
            arranged: the plan of an arranged bucket, or None for a whole bucket.

        Raises:
            IndexError: there is no such bucket.
            ValueError: the source does not hold what the plan reads.
            Exception: what `load_weights` raises.
        """
        # Bound once per source: a later sync with the same memory only launches.
        plan = arranged or self._plan.buckets[index]
        binding = self._bound.get(source)
        if binding is None or binding.plan is not plan:
            copies = self._copies.get(source.map)
            if copies is None or copies.plan is not plan:
                copies = self._copies[source.map] = _Copies(plan, source.map)
            scratch = self._scratch_on(source.device)
            memory = self._plan.destinations.memory
            binding = self._bound[source] = copies.bind(memory, source, scratch)
        binding.run(self._load_weights)

    def _scratch_on(self, device: torch.device) -> torch.Tensor:
        """Return memory for the `rest` of any bucket. Buckets use it one after the other."""
        scratch = self._scratch.get(device)
        if scratch is None:
            scratch = self._scratch[device] = _empty(self._scratch_nbytes, device)
        return scratch


def replay_once(
    plan: BucketPlan, destinations: Destinations, load_weights: LoadWeights, buffer: torch.Tensor
) -> None:
    """Replay one bucket's plan as `PlanExecutor.replay` does, without keeping the binding."""
    scratch, source = _empty(plan.rest.nbytes, buffer.device), BucketSource.flat(buffer)
    _Copies(plan, source.map).bind(destinations.memory, source, scratch).run(load_weights)


def copy_to_new_memory(
    plan: BucketPlan, storage: int, memory: Sequence[torch.Tensor], buffer: torch.Tensor
) -> torch.Tensor:
    """Run a plan's copies to one storage, or to the `SCRATCH`, into new memory.

    Args:
        memory: the model's storages, which are not written.

    Returns:
        The new memory, zero where no copy writes.
    """
    copies = tuple(copy for copy in plan.copies if copy.storage == storage)
    plan = replace(plan, copies=copies, rest=plan.rest if storage == SCRATCH else NO_TENSORS)
    # All other targets are bound, too, but no copy of this plan writes them.
    source, scratch = BucketSource.flat(buffer), _empty(plan.rest.nbytes, buffer.device)
    target = torch.zeros_like(scratch if storage == SCRATCH else memory[storage])
    targets = [*memory, scratch]
    targets[storage] = target
    for copy in _Copies(plan, source.map).bind(targets[:-1], source, targets[-1]).copies:
        copy()
    return target


def _empty(nbytes: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


class _Copies:
    """The copies of a bucket, from the numbered memories of its map to storages or scratch."""

    def __init__(self, plan: BucketPlan, bucket_map: BucketMap) -> None:
        self.plan = plan
        copies = [part for copy in plan.copies for part in bucket_map.copies(copy)]
        self._fused = FusedCopies(copies)

    def bind(
        self, storages: Sequence[torch.Tensor], source: BucketSource, scratch: torch.Tensor
    ) -> _Binding:
        """Bind the copies to the memory of `source`."""
        targets = *storages, scratch  # the last is number `SCRATCH`
        copies = self._fused.between(source.memories, targets, source.device)
        with torch.inference_mode(False), torch.no_grad():
            return _Binding(self.plan, copies, self.plan.rest.views(scratch), scratch)
