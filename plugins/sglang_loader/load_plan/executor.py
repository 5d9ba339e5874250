"""Replays a load plan: a few fused copies per bucket, and `load_weights` for the tensors that are
left. Launches work, never waits for it.

    executor = PlanExecutor(plan, model.load_weights)
    executor.replay(0, BucketSource.flat(staging))      # on the current stream; the caller
    synchronises

Binding (turning descriptors into tensors that view concrete memory) is done once per source, and
lasts as long as that does: whoever lets go of a source lets go of its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch

from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.copies import copy_views
from sglang_loader.common.copy_kernel import WORD, BatchedCopy, is_available, mixed
from sglang_loader.common.regions.geometry import StridedCopy
from sglang_loader.common.shared_memory import peer_of
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.plan import BucketPlan, LoadPlan, LoadWeights


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
            scratch = self._scratch_on(source.device)
            binding = self._bound[source] = _bind(plan, self._plan.destinations, source, scratch)
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
    scratch = _empty(plan.rest_layout().nbytes, buffer.device)
    _bind(plan, destinations, BucketSource.flat(buffer), scratch).run(load_weights)


def _empty(nbytes: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _bind(
    plan: BucketPlan, destinations: Destinations, source: BucketSource, scratch: torch.Tensor
) -> _Binding:
    groups: _Groups = {}
    rest = plan.rest_layout()
    with torch.inference_mode(False), torch.no_grad():
        for copy in plan.copies:
            _add(groups, source, copy, destinations.memory[copy.storage])
        for src, tensor in zip(plan.rest.values(), rest.tensors, strict=True):
            if tensor.nbytes:
                whole = StridedCopy(0, src, tensor.offset, (), tensor.nbytes)
                _add(groups, source, whole, scratch)
        copies = [_bind_copies(*group) for group in groups.values()]
        return _Binding(plan, copies, rest.views(scratch), scratch)


_Groups: TypeAlias = dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]]
"""Targets and sources of copies, grouped by how these are made."""


def _add(groups: _Groups, source: BucketSource, copy: StridedCopy, base: torch.Tensor) -> None:
    """A copy out of the bucket to `base`."""
    for part, memory in source.copies(copy):
        target, origin = copy_views(part, memory, base)
        # torch's fused kernel takes a group only if all of it is dense.
        words = target.dtype == origin.dtype == WORD and is_available(target.device)
        is_dense = None if words else not part.dims
        key = (target.dtype, origin.dtype, is_dense, target.device, origin.device)
        targets, origins = groups.setdefault(key, ([], []))
        targets.append(target)
        origins.append(origin)


def _bind_copies(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Callable[[], object]:
    """What makes all copies of a group: our kernel where it takes them, else torch's. Either reads
    from all GPUs on which sources lie at the same time, see `copy_kernel`.
    """
    devices = {targets[0].device, sources[0].device}
    is_words = targets[0].dtype == sources[0].dtype == WORD
    _, gpus = np.unique([peer_of(source) or "" for source in sources], return_inverse=True)
    if is_words and len(devices) == 1 and is_available(targets[0].device):
        return BatchedCopy(targets, sources, gpus).run
    order = mixed(gpus)
    return partial(torch._foreach_copy_, [targets[i] for i in order], [sources[i] for i in order])
