"""Replay of a load plan: a few fused copies, and `load_weights` for the plan's `rest`.

A copy table of a quantised model also quantises, between its copies and the rest.

The executor launches work and never waits.

    executor = PlanExecutor(plan, model.load_weights)
    executor.replay(0, BucketSource.flat(staging))   # one bucket; on the current stream
    run = executor.table_run(shards, num_ranks, round_bytes)   # a whole sync by the copy table
    run.begin()                                      # the steps before the first round
    run.load_round(buffer)                           # for each of `run.rounds`, if there are any

Copies are computed once per `BucketMap` or `WeightMap`, and bound to addresses once per
`BucketSource` or `ShardMemory`. They are kept as long as their map or memory lives. So dropping a
source frees its memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from sglang_loader.common.bucket_source import BucketMap, BucketSource
from sglang_loader.common.copies.fused import FusedCopies
from sglang_loader.common.copies.quantizer import MatrixQuantizer
from sglang_loader.common.layout import BucketLayout, check_buffer
from sglang_loader.common.weight_map import ShardMemory, WeightMap
from sglang_loader.load_plan.copy_table import CopyTable
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.plan import BucketPlan, LoadPlan, LoadWeights
from sglang_loader.load_plan.rounds import Round, WiredStep, wired_steps


@dataclass(frozen=True)
class _Bound:
    """The launches of some copies, and of what follows when all bytes have come.

    Attributes:
        quantized: quantise in `scratch`, and copy the results from there.
        rest: the tensors in `scratch` that `load_weights` loads then.
    """

    copies: list[Callable[[], object]]
    rest: list[tuple[str, torch.Tensor]]
    scratch: torch.Tensor
    quantized: Sequence[Callable[[], object]] = ()

    def copy(self) -> None:
        with torch.no_grad():
            for launch in self.copies:
                launch()

    def end(self, load_weights: LoadWeights) -> None:
        """Launch what follows when all bytes have come."""
        with torch.no_grad():
            for launch in self.quantized:
                launch()
        if self.rest:
            load_weights(iter(self.rest))


class PlanExecutor:
    """The executor of one plan. `guard` checks whether the plan still holds."""

    def __init__(self, plan: LoadPlan, load_weights: LoadWeights) -> None:
        self._plan = plan
        self._load_weights = load_weights
        # The same source may be of another bucket, so its plan stands beside what was made of it.
        self._copies: WeakKeyDictionary[BucketMap, tuple[BucketPlan, _Copies]]
        self._copies = WeakKeyDictionary()
        self._bound: WeakKeyDictionary[BucketSource, tuple[BucketPlan, _Bound]]
        self._bound = WeakKeyDictionary()
        self._tables: WeakKeyDictionary[WeightMap, tuple[int, CopyTable]] = WeakKeyDictionary()
        self._wired: WeakKeyDictionary[WeightMap, tuple[object, list[_Step]]] = WeakKeyDictionary()
        self._bound_steps: WeakKeyDictionary[ShardMemory, _BoundSteps] = WeakKeyDictionary()
        self._scratch: WeakValueDictionary[tuple[torch.device, int], torch.Tensor]
        self._scratch = WeakValueDictionary()
        self._rest_nbytes = max((bucket.rest.nbytes for bucket in plan.buckets), default=0)

    def replay(self, index: int, source: BucketSource) -> None:
        """Load a bucket from `source`, asynchronously on the current stream.

        Only the tensors of `rest`, which `load_weights` loads, may wait for the device.

        Raises:
            IndexError: there is no such bucket.
            ValueError: the source does not hold what the plan reads.
            Exception: what `load_weights` raises.
        """
        # Bound once per source: a later sync with the same memory only launches.
        plan = self._plan.buckets[index]
        of_plan, bound = self._bound.get(source, (None, None))
        if bound is None or of_plan is not plan:
            of_plan, copies = self._copies.get(source.map, (None, None))
            if copies is None or of_plan is not plan:
                copies = _Copies.of_bucket(plan, source.map)
                self._copies[source.map] = plan, copies
            scratch = self._scratch_on(source.device, self._rest_nbytes)
            bound = copies.bind(self._memory, source.memories, scratch)
            self._bound[source] = plan, bound
        bound.copy()
        bound.end(self._load_weights)

    def table_run(self, shards: ShardMemory, num_ranks: int, round_bytes: int) -> TableRun:
        """Prepare a whole sync from the trainer ranks' shards.

        Args:
            num_ranks: the number of trainer ranks.
            round_bytes: about the largest size of a round, and of what is quantised in a step.

        Raises:
            RuntimeError: this device cannot quantise as the trainer does.
            ValueError: the map of the shards does not hold what the plan reads.
        """
        # Three stages, each kept until what it was made of changes: the table of the map, its
        # division by wire, and the launches at these addresses. Most syncs repeat only launches.
        # `round_bytes` counts without rounds, too: as the limit of what is quantised in a step.
        weight_map, division = shards.weight_map, (shards.senders, num_ranks, round_bytes)
        wired_for, steps = self._wired.get(weight_map, (None, []))
        if wired_for != division:
            limit, table = self._tables.get(weight_map, (0, None))
            if table is None or limit != round_bytes:
                table = CopyTable.of(self._plan, weight_map, round_bytes)
                self._tables[weight_map] = round_bytes, table
            steps = [_Step.of(step) for step in wired_steps(table, *division)]
            self._wired[weight_map] = division, steps
        nbytes = max((step.scratch_nbytes for step in steps), default=0)
        scratch = self._scratch_on(shards.device, nbytes)
        # Scratch memory that was freed may return at another address.
        bound = self._bound_steps.get(shards)
        if bound is None or not bound.is_of(steps, scratch):
            bound = _BoundSteps.of(steps, self._memory, shards, scratch)
            self._bound_steps[shards] = bound
        return TableRun(steps, bound.steps, self._memory, self._load_weights)

    def free_scratch(self) -> None:
        """Free the memory that quantisation needs, until the next sync.

        The device must have finished.
        """
        for bound in self._bound_steps.values():
            bound.free_scratch()

    @property
    def _memory(self) -> Sequence[torch.Tensor]:
        return self._plan.destinations.memory

    def _scratch_on(self, device: torch.device, nbytes: int) -> torch.Tensor:
        """Return scratch memory of this size. Buckets and steps use it one after the other."""
        scratch = self._scratch.get((device, nbytes))
        if scratch is None:
            scratch = self._scratch[device, nbytes] = _empty(nbytes, device)
        elif scratch.untyped_storage().nbytes() < nbytes:  # freed after the last sync
            scratch.untyped_storage().resize_(nbytes)
        return scratch


def replay_once(
    plan: BucketPlan, destinations: Destinations, load_weights: LoadWeights, buffer: torch.Tensor
) -> None:
    """Replay one bucket's plan as `PlanExecutor.replay` does, without keeping the binding."""
    source = BucketSource.flat(buffer)
    scratch = _empty(plan.rest.nbytes, source.device)
    bound = _Copies.of_bucket(plan, source.map).bind(destinations.memory, source.memories, scratch)
    bound.copy()
    bound.end(load_weights)


def _empty(nbytes: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class _Copies:
    """A set of copies from numbered memories to storages or scratch, and the scratch's tensors."""

    fused: FusedCopies
    rest: BucketLayout

    @classmethod
    def of_bucket(cls, plan: BucketPlan, bucket_map: BucketMap) -> _Copies:
        copies = [part for copy in plan.copies for part in bucket_map.copies(copy)]
        return cls(FusedCopies(copies), plan.rest)

    def bind(
        self,
        storages: Sequence[torch.Tensor],
        memories: Mapping[int, torch.Tensor],
        scratch: torch.Tensor,
    ) -> _Bound:
        """Bind the copies to memories. The kernel runs on the device of the scratch."""
        # `SCRATCH` is -1, the index of the last target.
        targets = *storages, scratch  # the last is number `SCRATCH`
        copies = self.fused.between(memories, targets, scratch.device)
        with torch.inference_mode(False), torch.no_grad():
            return _Bound(copies, self.rest.views(scratch), scratch)


@dataclass(frozen=True)
class _Step:
    """A `WiredStep`, with its copies fused.

    Attributes:
        quantized: the quantiser, and the copies of its results. None if nothing is quantised.
        scratch_nbytes: the scratch memory that the step needs.
    """

    mapped: _Copies
    rounds: list[tuple[Round, FusedCopies]]
    quantized: tuple[MatrixQuantizer, FusedCopies] | None
    scratch_nbytes: int

    @classmethod
    def of(cls, step: WiredStep) -> _Step:
        # A round has one source, its buffer: number 0.
        rounds = [(r, FusedCopies([(copy, 0) for copy in r.copies])) for r in step.rounds]
        quantized, part = None, step.quantized
        if part is not None:
            quantizer = MatrixQuantizer(part.quantization, part.matrices)
            quantized = quantizer, FusedCopies([(copy, 0) for copy in part.copies])
        nbytes = max(step.rest.nbytes, part.nbytes if part is not None else 0)
        return cls(_Copies(FusedCopies(step.mapped), step.rest), rounds, quantized, nbytes)

    def bind(
        self, storages: Sequence[torch.Tensor], shards: ShardMemory, scratch: torch.Tensor
    ) -> _Bound:
        """Bind the step to memories.

        Raises:
            RuntimeError: this device cannot quantise as the trainer does.
        """
        bound = self.mapped.bind(storages, shards.of(self.mapped.fused.numbers), scratch)
        if self.quantized is None:
            return bound
        quantizer, results = self.quantized
        targets = *storages, scratch  # the last is number `SCRATCH`
        copies = results.between({0: scratch}, targets, scratch.device)
        return replace(bound, quantized=[*quantizer.on(scratch), *copies])


@dataclass(frozen=True)
class _BoundSteps:
    """The steps of a table, bound to the memory of one sync.

    Attributes:
        unbound: the steps that were bound.
        address: of the scratch memory.
    """

    unbound: list[_Step]
    steps: list[_Bound]
    scratch: torch.Tensor
    address: int

    @classmethod
    def of(
        cls,
        steps: list[_Step],
        storages: Sequence[torch.Tensor],
        shards: ShardMemory,
        scratch: torch.Tensor,
    ) -> _BoundSteps:
        bound = [step.bind(storages, shards, scratch) for step in steps]
        return cls(steps, bound, scratch, scratch.data_ptr())

    def is_of(self, steps: list[_Step], scratch: torch.Tensor) -> bool:
        """Return True if these steps are bound to this scratch memory, where it is."""
        is_same = self.unbound is steps and self.scratch is scratch
        return is_same and scratch.data_ptr() == self.address

    def free_scratch(self) -> None:
        if any(step.quantized is not None for step in self.unbound):
            self.scratch.untyped_storage().resize_(0)


class TableRun:
    """One sync by a copy table, while its rounds come.

    Attributes:
        rounds: all rounds, in the order in which they must come.
        num_loaded: the rounds that have been loaded.
    """

    def __init__(
        self,
        steps: Sequence[_Step],
        bound: Sequence[_Bound],
        memory: Sequence[torch.Tensor],
        load_weights: LoadWeights,
    ) -> None:
        self.rounds = [each for step in steps for each, _ in step.rounds]
        self.num_loaded = 0
        self._memory = memory
        self._load_weights = load_weights
        pairs = zip(steps, bound, strict=True)
        self._left = deque((of_step, deque(step.rounds)) for step, of_step in pairs)

    @property
    def is_complete(self) -> bool:
        """True if every step has run."""
        return not self._left

    def begin(self) -> None:
        """Run the steps before the first round, asynchronously on the current stream."""
        # The mapped copies of a step need no round, so they run before its first one.
        if self._left:
            # If all shards are mapped, no step has rounds, and `_advance` runs the whole load.
            self._left[0][0].copy()
            self._advance()

    def load_round(self, buffer: torch.Tensor) -> None:
        """Load the next round, asynchronously, and run the steps before the round after it.

        Args:
            buffer: flat uint8, with the bytes of the round.

        Raises:
            ValueError: no round is left, or the buffer is too short.
        """
        if not self._left:
            raise ValueError(f"another round came after all {len(self.rounds)}")
        bound, rounds = self._left[0]
        each, fused = rounds.popleft()
        check_buffer(buffer, each.nbytes)
        targets = *self._memory, bound.scratch  # the last is number `SCRATCH`
        with torch.no_grad():
            for launch in fused.between({0: buffer}, targets, buffer.device):
                launch()
        self.num_loaded += 1
        self._advance()

    def _advance(self) -> None:
        """End the steps of which all rounds have been loaded, and begin the next one."""
        # A step without rounds ends at once, and so may several in a row.
        while self._left and not self._left[0][1]:
            bound, _ = self._left.popleft()
            bound.end(self._load_weights)
            if self._left:
                self._left[0][0].copy()
