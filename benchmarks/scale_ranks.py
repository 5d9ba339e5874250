"""What the ranks of a large trainer trace, and what those of its engines read; shapes alone.

case = CASES["kimi-k2-512"]
trace_of(case, rank)                        # as `conversion_trace` would find it
EngineRank(case, 3).plan(layouts)           # as it would be compiled from SGLang's loader
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeAlias

import numpy as np
import torch

from benchmarks.scale_models import ITEMSIZE, MODELS, Weight, weights_of
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.coalesce import coalesce
from sglang_loader.common.regions.compose import ByteMap
from sglang_loader.common.regions.geometry import BYTES, Region, StridedCopy, describe_copy
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.plan import NO_TENSORS, BucketPlan, LoadPlan
from verl_sglang_sync.sources.export_trace import TracedExport, TracedParameter, TracedTensor
from verl_sglang_sync.sources.owners import Origin, Owners
from verl_sglang_sync.sources.source_map import TraceSummary


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a trainer, and the engines on the same GPUs.

    Attributes:
        ranks: of the trainer; what its layout leaves over is data parallel.
        engine: ranks of one engine.
        cuts_experts: an engine's ranks have a part of every expert; else some of the experts.
    """

    model: str
    ranks: int
    tp: int
    pp: int
    ep: int
    engine: int
    cuts_experts: bool

    @cached_property
    def weights(self) -> list[Weight]:
        """Of the model."""
        return list(weights_of(MODELS[self.model]))

    @property
    def stage_size(self) -> int:
        """Ranks of a pipeline stage, which follow each other."""
        return self.ranks // self.pp

    def stage_of(self, weight: Weight) -> int:
        """The pipeline stage that has a weight; stages have as many layers, or one less."""
        layers = MODELS[self.model].layers
        return min(max(weight.layer, 0), layers - 1) * self.pp // layers


CASES = {
    "qwen3-235b-64": Case(
        model="qwen3-235b-a22b", ranks=64, tp=4, pp=4, ep=16, engine=8, cuts_experts=True
    ),
    "deepseek-v3-256": Case(
        model="deepseek-v3", ranks=256, tp=8, pp=8, ep=32, engine=16, cuts_experts=True
    ),
    "kimi-k2-256": Case(
        model="kimi-k2", ranks=256, tp=8, pp=8, ep=32, engine=32, cuts_experts=False
    ),
    "kimi-k2-512": Case(
        model="kimi-k2", ranks=512, tp=8, pp=8, ep=64, engine=32, cuts_experts=True
    ),
}


def trace_of(case: Case, rank: int) -> TracedExport:
    """What a rank knows of the export: its stage, and the ranks it would gather from."""
    tensors, kinds = _stage(case, rank // case.stage_size)
    parameters = []
    for source, shard, num_shards, nbytes in kinds:
        starts = tuple(i * nbytes // num_shards for i in range(num_shards))
        holders = _holders(case, rank, shard, num_shards)
        parameters.append(TracedParameter(source, Owners(starts, holders, nbytes)))
    return TracedExport(tuple(parameters), tensors)


def summary_of(case: Case, rank: int, structure_checksum: int) -> TraceSummary:
    """The summary of a rank's trace; its structure is that of the others of its stage."""
    _, kinds = _stage(case, rank // case.stage_size)
    ranks = [r for _, shard, n, _ in kinds for (r,) in _holders(case, rank, shard, n)]
    return TraceSummary(structure_checksum, np.array(ranks, dtype=np.int32).tobytes())


Kind: TypeAlias = tuple[str, int | None, int, int]
"""A parameter's name, the place of an expert's rank, how many shards, and bytes of all of them."""


@cache
def _stage(case: Case, stage: int) -> tuple[dict[str, TracedTensor], list[Kind]]:
    """What the ranks of a pipeline stage trace alike: tensors, and parameters by number."""
    local_experts = MODELS[case.model].experts // case.ep
    numbers: dict[Kind, int] = {}
    tensors: dict[str, TracedTensor] = {}
    for weight in case.weights:
        if case.stage_of(weight) != stage:
            continue
        source, shard = f"{weight.layer}.{weight.parameter}", None
        if weight.expert is not None:
            shard, local = divmod(weight.expert, local_experts)
            source = f"{source}{local}"
        num_shards = case.tp if weight.cut and shard is None else 1
        kind = source, shard, num_shards, weight.parameter_nbytes
        number = numbers.setdefault(kind, len(numbers))
        origin = Origin(number, ByteMap.of(weight.region(num_shards)))
        shape = (weight.rows, weight.columns)
        tensors[weight.name] = TracedTensor(torch.bfloat16, shape, (origin,))
    return tensors, list(numbers)


def _holders(
    case: Case, rank: int, shard: int | None, num_shards: int
) -> tuple[tuple[int, ...], ...]:
    """The ranks of a rank's own replica that have a parameter, by shard.

    Megatron's order: tensor parallel ranks follow each other, then data parallel ones, then
    pipeline stages; of experts the expert parallel ranks follow each other.
    """
    first = rank // case.stage_size * case.stage_size
    place = rank - first
    if shard is not None:
        return ((first + place // case.ep * case.ep + shard,),)
    if num_shards > 1:
        return tuple((first + place // case.tp * case.tp + i,) for i in range(case.tp))
    return ((rank,),)


class EngineRank:
    """Where one engine rank puts what it reads: SGLang's fused parameters.

    Args:
        case: of the engine.
        rank: within it.
    """

    def __init__(self, case: Case, rank: int) -> None:
        self._case, self._rank = case, rank
        self._by_name = {weight.name: weight for weight in case.weights}
        self._storages: dict[tuple[int, str], int] = {}

    def plan(self, layouts: Sequence[BucketLayout]) -> LoadPlan:
        """The load plan of all buckets."""
        nothing: dict[int, Any] = {}
        buckets = []
        for layout in layouts:
            buckets.append(
                BucketPlan(
                    layout,
                    tuple(coalesce(list(self._copies(layout)))),
                    rest=NO_TENSORS,
                    written=nothing,
                    live_in=nothing,
                    writes=nothing,
                    left_out=(),
                    recomputed=frozenset(),
                    host_reads=(),
                )
            )
        return LoadPlan(tuple(buckets), {}, Destinations((), (), (), ()))

    def _copies(self, layout: BucketLayout) -> Iterator[StridedCopy]:
        """Out of a bucket into this rank's parameters; none of what it does not have."""
        case, each = self._case, MODELS[self._case.model].experts // self._case.engine
        for tensor in layout.tensors:
            weight = self._by_name[tensor.name]
            expert, parts, part = weight.expert, case.engine, self._rank
            if expert is not None and not case.cuts_experts:
                owner, expert = divmod(expert, each)
                if owner != self._rank:
                    continue
                parts, part = 1, 0
            if weight.groups:  # heads are repeated where there are fewer than ranks
                parts = min(parts, weight.groups)
                part = self._rank * parts // case.engine
            yield self._copy(weight, tensor.offset, expert or 0, parts, part)

    def _copy(self, weight: Weight, start: int, expert: int, parts: int, part: int) -> StridedCopy:
        """One of `parts` parts of a weight that begins at a byte of the bucket."""
        rows, columns, row, column = weight.rows, weight.columns, 0, 0
        if weight.cut == "rows":
            rows, row = rows // parts, rows // parts * part
        elif weight.cut == "columns":
            columns, column = columns // parts, columns // parts * part
        of_an_expert = (weight.pitch or weight.rows) // (parts if weight.cut == "rows" else 1)
        place = expert * of_an_expert + weight.offset // (1 if weight.groups else parts)
        key = weight.layer, weight.parameter
        storage = self._storages.setdefault(key, len(self._storages))
        offset = start + (row * weight.columns + column) * ITEMSIZE
        source = Region(offset, (rows, columns), (weight.columns, 1), ITEMSIZE)
        there = Region(place * columns * ITEMSIZE, (rows, columns), (columns, 1), ITEMSIZE)
        return describe_copy(storage, source, there, BYTES)
