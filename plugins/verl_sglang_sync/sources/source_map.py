"""Where every exported tensor lies in the trainer ranks' parameters: traced once, for all routes.

    source_map = SourceMap(ranks, device)
    reason = source_map.trace(export)             # collective; why it cannot be traced, or None
    source_map.traced.tensors["lm_head.weight"]   # which bytes of which parameter
    now = source_map.current(export, traced)      # the parameters; raises if they were replaced
    comparison = source_map.begin_comparison(export)    # collective: trace, and prove the trace

FSDP2's exports are traced as they run (`export_trace`), the same on all ranks. Sources that have a
method `trace` (FSDP1, Megatron) know better how. A Megatron rank traces its own pipeline stage, and
names the ranks that it would gather from: the shards of its data parallel replica. What several
ranks say of a tensor must be the same but for the ranks, and these hold replicas:

    rank 0: "q_proj" is these bytes of "qkv", whose shards ranks 0 and 1 have
    rank 2: "q_proj" is these bytes of "qkv", whose shards ranks 2 and 3 have
    merged:                                 whose shards ranks (0, 2) and (1, 3) have

Of ranks that trace the same but for the ranks that they name, one says all of it, and the others
name those ranks: of 512 that hold 1 T parameters, one for each pipeline stage.

An optimizer changes what is in the memory, and parameters that were offloaded come back at other
addresses. A trace holds as long as their dtypes, shapes and layouts do (`SourcesSnapshot`).
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch

from sglang_loader.common.ranks import Ranks, Reason, attempt
from verl_sglang_sync.ranks import own_rank, world_size
from verl_sglang_sync.sources.comparison import Comparison
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sources.export_trace import (
    NotTraceable,
    TracedExport,
    TracedParameter,
    TracedTensor,
    trace_export,
)
from verl_sglang_sync.sources.snapshot import (
    SourcesChanged,
    SourcesSnapshot,
    require_sources,
    sources_of,
)
from verl_sglang_sync.sources.transfer_plan import Origin

Trace: TypeAlias = tuple[TracedExport, SourcesSnapshot]
"""An export, and the parameters that it was traced for, wherever they lie."""


class SourceMap:
    """Of one trainer rank, for all its syncs.

    Attributes:
        off_reason: the reason for which the export cannot be traced, however often it is tried,
            equal on all ranks; None: it may be traced.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.off_reason: Reason | None = None
        self._ranks = ranks
        self._device = device
        self._trace: Trace | None = None
        self._own_trace: Trace | None = None  # not merged yet with those of the other ranks

    @property
    def traced(self) -> TracedExport:
        assert self._trace is not None, "nothing was traced"
        return self._trace[0]

    def can_trace_before_export(self, export: Iterable[NamedTensor]) -> bool:
        """False if an export must be made before it is traced; collective."""
        if not getattr(sources_of(export), "needs_an_export", False):
            return True
        return self._ranks.all(self.is_traced(export))

    def begin_comparison(self, export: Iterable[NamedTensor]) -> Comparison:
        """`trace`, to compare what is exported next with the parameters; collective."""
        if (reason := self.trace(export)) is not None:
            return Comparison(None, {}, self._device, reason)
        now, problem = attempt(lambda: self.current(export, self.traced), passing=(SourcesChanged,))
        return Comparison(self.traced, now or {}, self._device, problem)

    def is_current(self, comparison: Comparison, export: Iterable[NamedTensor]) -> bool:
        """True if what was traced for a comparison still holds; collective."""
        is_last = self._trace is not None and self._trace[0] is comparison.traced
        return self._ranks.all(is_last and self.is_traced(export))

    def is_traced(self, export: Iterable[NamedTensor]) -> bool:
        """True if the last trace is of this export, and of parameters like this rank's now."""
        return _holds(self._trace, export)

    def trace_alone(self, export: Iterable[NamedTensor]) -> None:
        """Do the part of the next `trace` that needs no other rank; that reports what fails."""
        if self.off_reason is not None or self.is_traced(export) or _holds(self._own_trace, export):
            return
        self._own_trace, _ = attempt(lambda: self._traced_anew(export), NotTraceable)

    def trace(self, export: Iterable[NamedTensor]) -> Reason | None:
        """Trace the export, unless the last trace holds; collective; returns why it failed."""
        if self.off_reason is not None:
            return self.off_reason
        if self._ranks.all(self.is_traced(export)):
            return None
        self._trace, self._own_trace, reason = self._own_trace, None, None
        if not self.is_traced(export):
            self._trace, reason = attempt(
                lambda: self._traced_anew(export), NotTraceable, passing=(SourcesChanged,)
            )
        reason = self._ranks.joined(self._ranks.gather(reason)) or self._merge()
        if reason is not None:
            self._trace = None
            self.off_reason = reason if reason.is_final else None
        return reason

    def _merge(self) -> Reason | None:
        """Put together what the ranks have traced; collective; returns why it does not fit."""
        assert self._trace is not None
        traced, snapshot = self._trace
        own = TraceSummary.of(traced)
        summaries: list[TraceSummary] = self._ranks.gather(own)
        if len(set(summaries)) > 1:
            checksums = [each.structure_checksum for each in summaries]
            is_first = checksums.index(own.structure_checksum) == own_rank()
            traces = self._ranks.gather(traced if is_first else None)
            try:
                self._trace = merge_traces(summaries, traces), snapshot
            except NotTraceable as error:
                return Reason(str(error), is_final=True)
        return None

    def current(self, export: object, traced: TracedExport) -> Mapping[str, torch.Tensor]:
        """The parameters as they are now, by name, wherever they lie.

        Raises:
            SourcesChanged: the export was traced anew since `traced`, or a parameter's dtype, shape
                or layout is another.
        """
        if self._trace is None or self._trace[0] is not traced:
            raise SourcesChanged("the export was traced anew")
        now = require_sources(export)()
        self._trace[1].require_unchanged(now)
        return now

    def _traced_anew(self, export: Iterable[NamedTensor]) -> Trace:
        """This rank's trace, for which it waits for no other rank."""
        sources = require_sources(export)
        if (trace := getattr(sources, "trace", None)) is not None:
            traced = trace(self._device)
        else:
            traced = trace_export(
                export, sources=sources, world_size=world_size(), device=self._device
            )
        return traced, SourcesSnapshot(sources(), with_addresses=False)


def _holds(trace: Trace | None, export: Iterable[NamedTensor]) -> bool:
    """True if a trace is of parameters like those now; if asking fails, so will tracing anew."""
    if trace is None:
        return False
    _, reason = attempt(lambda: trace[1].require_unchanged(require_sources(export)()))
    return reason is None


@dataclass(frozen=True)
class TraceSummary:
    """What each rank tells of its trace; of those with the same structure, one tells the rest.

    Attributes:
        structure_checksum: of all but the ranks.
        holders: the ranks that hold each parameter's shards, in order, each an int32.
    """

    structure_checksum: int
    holders: bytes

    @classmethod
    def of(cls, traced: TracedExport) -> TraceSummary:
        owners = traced.owners
        ranks = [rank for each in owners for holders in each.holders for rank in holders]
        pairs = zip(traced.parameters, owners, strict=True)
        shards = [(p.source, o.starts, o.nbytes, [*map(len, o.holders)]) for p, o in pairs]
        checksum = zlib.crc32(repr((shards, [*traced.tensors.items()])).encode())
        return cls(checksum, np.array(ranks, dtype=np.int32).tobytes())


def merge_traces(
    summaries: Sequence[TraceSummary], traces: Sequence[TracedExport | None]
) -> TracedExport:
    """The whole export, equal on all ranks; pure.

    Args:
        summaries: by rank.
        traces: by rank; one for each structure checksum is enough.

    Raises:
        NotTraceable: two ranks traced a tensor as different bytes.
    """
    replicas: defaultdict[int, list[bytes]] = defaultdict(list)
    for each in summaries:
        replicas[each.structure_checksum].append(each.holders)
    claims: defaultdict[str, list[tuple[TracedTensor, TracedParameter]]] = defaultdict(list)
    for summary, traced in zip(summaries, traces, strict=True):
        if traced is not None:
            parameters = _with_replicas(traced.parameters, replicas[summary.structure_checksum])
            for name, tensor in traced.tensors.items():
                claims[name].append((tensor, parameters[tensor.origin.parameter]))
    numbers: dict[TracedParameter, int] = {}
    tensors: dict[str, TracedTensor] = {}
    for name, claimed in claims.items():
        tensor, parameter = claimed[0]
        if len(claimed) > 1:
            if len({_without_ranks(*claim) for claim in claimed}) > 1:
                raise NotTraceable(f"the ranks traced different exports: {name} differs")
            by_shard = zip(*(each.owners.holders for _, each in claimed), strict=True)
            parameter = _held_by(parameter, [sum(holders, ()) for holders in by_shard])
        number = numbers.setdefault(parameter, len(numbers))
        tensors[name] = replace(tensor, origin=Origin(number, tensor.origin.bytes))
    return TracedExport(tuple(numbers), tensors)


def _with_replicas(
    parameters: Sequence[TracedParameter], replicas: Sequence[bytes]
) -> list[TracedParameter]:
    """The parameters, each shard held by the ranks that any replica names in its place."""
    by_replica = np.stack([np.frombuffer(holders, dtype=np.int32) for holders in replicas])
    by_holder, found = iter(by_replica.T.tolist()), []
    for parameter in parameters:
        shards = [
            [rank for _ in holders for rank in next(by_holder)]
            for holders in parameter.owners.holders
        ]
        found.append(_held_by(parameter, shards))
    return found


def _held_by(parameter: TracedParameter, shards: Sequence[Iterable[int]]) -> TracedParameter:
    holders = tuple(tuple(sorted(set(ranks))) for ranks in shards)
    return replace(parameter, owners=replace(parameter.owners, holders=holders))


def _without_ranks(tensor: TracedTensor, parameter: TracedParameter) -> tuple[object, ...]:
    owners = parameter.owners
    return (
        *(tensor.dtype, tensor.shape, tensor.origin.bytes),
        *(parameter.source, owners.starts, owners.nbytes),
    )
