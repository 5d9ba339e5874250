"""Map from exported tensors to the trainer ranks' parameters, traced once for all routes.

    source_map = SourceMap(ranks, device)
    reason = source_map.trace(export)             # collective: None, or why there is no trace
    source_map.traced.tensors["lm_head.weight"]   # which bytes of which parameter
    parameters = source_map.parameters(export, traced)    # raises if the parameters were replaced
    comparison = source_map.begin_comparison(export)    # collective: trace, and prove the trace
    comparison = source_map.compare_while_exported(export)   # the same, later if possible

All FSDP2 ranks trace the export as it runs (`export_trace`), with the same result. Sources with a
method `trace` (FSDP1, Megatron) make the trace in their own way. A Megatron rank traces its own
pipeline stage, and names the ranks that it would gather from: the shards of its own copy of the
model. The traces of a tensor by several ranks must be the same but for the ranks. The ranks in the
same position hold copies:

    rank 0: "q_proj" is these bytes of "qkv", whose shards are on ranks 0 and 1
    rank 2: "q_proj" is these bytes of "qkv", whose shards are on ranks 2 and 3
    merged: "q_proj" is these bytes of "qkv", whose shards are on ranks (0, 2) and (1, 3)

Ranks with the same trace but for the ranks send it once: one of them sends the whole trace, and the
others send only the ranks. Of 512 ranks with 1 T parameters one for each pipeline stage sends all.

A trace holds while the parameters keep their dtypes, shapes and layouts (`SourcesSnapshot`). Values
and addresses may change, as by an optimizer, or by offloading.
"""

from __future__ import annotations

import logging
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from sglang_loader.common.ranks import Ranks, Reason, attempt
from verl_sglang_sync.sources.comparison import Comparison
from verl_sglang_sync.sources.export import NamedTensor, quantization_of, unquantized
from verl_sglang_sync.sources.export_trace import (
    NotTraceable,
    TracedExport,
    TracedParameter,
    TracedTensor,
    trace_export,
)
from verl_sglang_sync.sources.host_memory import HOST_MEMORY
from verl_sglang_sync.sources.owners import Origin, Owners
from verl_sglang_sync.sources.snapshot import (
    SourcesChanged,
    SourcesSnapshot,
    is_offloaded,
    require_sources,
    sources_of,
)
from verl_sglang_sync.trainer_ranks import own_rank, world_size

logger = logging.getLogger(__name__)

RETRACES = (
    "weight sync: %s. So every parameter's export is traced, and the export made once more to be "
    "compared, which makes this sync some 30 s longer for 30 B. Later syncs are as fast as ever"
)

Trace: TypeAlias = tuple[TracedExport, SourcesSnapshot]
"""A traced export, and a snapshot of the parameters that it was traced for, without addresses."""

_Claim: TypeAlias = tuple[TracedTensor, list[TracedParameter]]
"""A tensor's trace by some ranks, and the parameter of each of its origins."""


class SourceMap:
    """Map from one trainer rank's exports to the parameters of all ranks, for all syncs.

    Attributes:
        off_reason: the lasting reason why the export cannot be traced, equal on all ranks, or None
            if it may be traced.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.off_reason: Reason | None = None
        self._ranks = ranks
        self._device = device
        self._trace: Trace | None = None
        self._own_trace: Trace | None = None  # not merged with the other ranks' traces yet
        self._merged_own: TracedExport | None = None  # this rank's own part of `_trace`

    @property
    def traced(self) -> TracedExport:
        """The trace that all ranks have merged."""
        assert self._trace is not None, "nothing was traced"
        return self._trace[0]

    def begin_comparison(self, export: Iterable[NamedTensor]) -> Comparison:
        """Trace the export, and begin to compare it with the parameters. Collective.

        Returns:
            The comparison, with a `problem` if there is no trace.
        """
        if (reason := self.trace(export)) is not None:
            return Comparison(None, dict, self._device, reason)
        return Comparison(self.traced, partial(self.parameters, export, self.traced), self._device)

    def compare_while_exported(self, export: Iterable[NamedTensor]) -> Comparison:
        """Begin to compare an export that is about to be made.

        If possible, this rank traces the export alone, when the first tensors have been exported:
        the first bucket need not wait for a trace. `trace` merges the ranks' traces later. Else
        this is `begin_comparison`, which is collective.
        """
        if not _can_trace_while_exported(export):
            return self.begin_comparison(export)
        if _traces_in_export(export):
            self._own_trace = None  # it may be of an export that was made before
        trace = partial(self._own_traced, export, in_export=True)
        return Comparison(None, require_sources(export), self._device, trace=trace)

    def settle(self, comparison: Comparison, export: Iterable[NamedTensor]) -> Reason | None:
        """Merge the ranks' traces once the export has been compared. Collective.

        If a trace that was made in the export has failed its comparison on any rank, each rank
        traces every conversion. Then `was_compared` is False, and a new export must be compared.

        Returns:
            As `trace`.
        """
        if _traces_in_export(export):
            own = None if self._own_trace is None else self._own_trace[0]
            was_in_export = own is not None and own is comparison.traced
            problem = comparison.finish()
            # An empty trace and a rank's older one have not been compared.
            is_good = was_in_export and problem is None and bool(own and own.tensors)
            if not self._ranks.all(is_good) and was_in_export:
                self._own_trace = None
            if problem is not None and not self.is_traced(export):
                logger.warning(RETRACES, problem.text)
        return self.trace(export)

    def was_compared(self, comparison: Comparison, export: Iterable[NamedTensor]) -> bool:
        """Return True if a comparison was one with the last trace, on all ranks. Collective."""
        return self._ranks.all(self._stands(comparison) and self.is_traced(export))

    def _stands(self, comparison: Comparison) -> bool:
        traced = comparison.traced
        if self._trace is None or traced is None:
            return False
        if traced is self._trace[0]:
            return True
        # With this rank's own trace, before it was merged with the others. If in doubt, this rank
        # compares once more.
        if traced is not self._merged_own or comparison.finish() is not None:
            return False
        if comparison.names != self._trace[0].tensors.keys():
            return False
        return _compared_shards(self._trace[0]) == _compared_shards(traced)

    def end_sync(self) -> None:
        """Drop this rank's own traces if they keep parameters alive."""
        self._merged_own = None
        if self._own_trace is not None and not self._own_trace[0].is_whole:
            self._own_trace = None

    def is_traced(self, export: Iterable[NamedTensor]) -> bool:
        """Return True if the last trace matches this rank's parameters."""
        return _holds(self._trace, export)

    def trace_alone(self, export: Iterable[NamedTensor]) -> TracedExport | None:
        """Run the part of the next `trace` that needs no other rank. Raise nothing.

        Returns:
            What the trace will be, if that is known without the other ranks.
        """
        if self.off_reason is not None:
            return None
        # After an error `trace` traces again, and returns the reason.
        own, _ = attempt(partial(self._own_traced, export), NotTraceable)
        # The ranks of these exports make the same trace.
        return own if _is_traced_alike(export) or self.is_traced(export) else None

    def _own_traced(
        self, export: Iterable[NamedTensor], *, in_export: bool = False
    ) -> TracedExport:
        """Return the merged trace if it holds, else this rank's own.

        Args:
            in_export: the export is being made, and is compared with the trace.

        Raises:
            NotTraceable, SourcesChanged: as `_make_trace`.
        """
        return self.traced if self.is_traced(export) else self._own(export, in_export)[0]

    def _own(self, export: Iterable[NamedTensor], in_export: bool = False) -> Trace:
        """Return this rank's own trace, which is made if the last one does not hold."""
        if self._own_trace is None or not _holds(self._own_trace, export):
            self._own_trace = self._make_trace(export, in_export)
        return self._own_trace

    def _own_whole(self, export: Iterable[NamedTensor]) -> tuple[TracedExport, Trace]:
        """Return this rank's own trace, as it is and as a whole, see `TracedExport.whole`."""
        traced, snapshot = self._own(export)
        return traced, (traced.whole(), snapshot)

    def trace(self, export: Iterable[NamedTensor]) -> Reason | None:
        """Trace the export, unless the last trace holds on all ranks. Collective.

        Returns:
            The reason why the export cannot be traced, the same on all ranks, or None.
        """
        if self.off_reason is not None:
            return self.off_reason
        if self._ranks.all(self.is_traced(export)):
            return None
        # If one rank must trace anew, all ranks do: `_merged` is collective. `trace_alone` may have
        # made this rank's trace already.
        work = partial(self._own_whole, export)
        own, reason = attempt(work, NotTraceable, passing=(SourcesChanged,))
        # None until all ranks have merged: one of them may fail.
        self._trace = self._own_trace = self._merged_own = None
        reason = self._ranks.common_reason(reason)
        if reason is None:
            assert own is not None, "no rank has a reason"
            traced, whole = own
            self._trace, reason = self._merged(whole)
            self._merged_own = traced if reason is None else None
        if reason is not None:
            self.off_reason = reason if reason.is_final else None
        return reason

    def _merged(self, own: Trace) -> tuple[Trace | None, Reason | None]:
        """Merge all ranks' traces, or return the reason if they do not fit. Collective."""
        traced, snapshot = own
        own_summary = TraceSummary.of(traced)
        summaries: list[TraceSummary] = self._ranks.gather(own_summary)
        # FSDP's ranks have equal summaries, and their traces are complete already.
        if len(set(summaries)) == 1:
            return own, None
        checksums = [summary.structure_checksum for summary in summaries]
        # The first rank of each structure sends its trace for all ranks with this structure.
        is_first = checksums.index(own_summary.structure_checksum) == own_rank()
        traces = self._ranks.gather(traced if is_first else None)
        try:
            merged = merge_traces(summaries, traces)
        except NotTraceable as error:
            return None, Reason(str(error), is_final=True)
        return (replace(merged, quantization=traced.quantization), snapshot), None

    def parameters(self, export: object, traced: TracedExport) -> Mapping[str, torch.Tensor]:
        """Return this rank's parameters by name, wherever they lie.

        Args:
            traced: the trace for which the parameters are needed.

        Raises:
            SourcesChanged: `traced` is not the last trace, or a parameter's dtype, shape or layout
                has changed.
        """
        if self._trace is None or self._trace[0] is not traced:
            raise SourcesChanged("the export was traced anew")
        parameters = require_sources(export)()
        self._trace[1].require_unchanged(parameters)
        return parameters

    def _make_trace(self, export: Iterable[NamedTensor], in_export: bool) -> Trace:
        """Trace the export on this rank, without waiting for another rank."""
        sources = require_sources(export)
        if is_offloaded(export) and (problem := HOST_MEMORY.problem) is not None:
            text = f"engines cannot map the offloaded parameters: {problem.text}"
            raise NotTraceable(text) if problem.is_final else SourcesChanged(text)
        trace = getattr(sources, "trace", None)
        if in_export and _traces_in_export(export):
            trace = sources.trace_in_export  # type: ignore[attr-defined]
        if trace is not None:
            traced = trace(self._device)
        else:
            traced = trace_export(
                unquantized(export), sources=sources, world_size=world_size(), device=self._device
            )
        traced = replace(traced, quantization=quantization_of(export))
        return traced, SourcesSnapshot(sources(), with_addresses=False)


def _can_trace_while_exported(export: Iterable[NamedTensor]) -> bool:
    """Return True if an export can be traced while it is made.

    An export that loads parameters, merges adapters or quantises is not to be begun a second time.
    """
    sources = sources_of(export)
    if getattr(sources, "trace", None) is not None:
        return _traces_in_export(export)
    has_more = getattr(export, "adapter", None) is not None or quantization_of(export) is not None
    return sources is not None and not has_more and not is_offloaded(export)


def _traces_in_export(export: Iterable[NamedTensor]) -> bool:
    """Return True if an export's sources can trace it as it is made, see `snapshot.Sources`."""
    return hasattr(sources_of(export), "trace_in_export")


def _is_traced_alike(export: Iterable[NamedTensor]) -> bool:
    """Return True if an export can be traced while it is made, with the same result on all ranks.

    That is FSDP2's. Sources that trace themselves name the ranks of their own copy of the model.
    """
    is_run = getattr(sources_of(export), "trace", None) is None
    return is_run and _can_trace_while_exported(export)


def _compared_shards(traced: TracedExport) -> dict[str, list[list[int]]]:
    """Return the shards with which this rank compares tensors, by name, origin by origin."""
    own = own_rank()
    shards = [
        [shard for shard, ranks in enumerate(owners.holders) if own in ranks]
        for owners in traced.owners
    ]
    compared = {
        name: [shards[origin.parameter] for origin in tensor.origins]
        for name, tensor in traced.tensors.items()
    }
    return {name: numbers for name, numbers in compared.items() if any(numbers)}


def _holds(trace: Trace | None, export: Iterable[NamedTensor]) -> bool:
    """Return True if the parameters still match the trace. An error counts as False."""
    if trace is None:
        return False
    # The same error comes back when the export is traced anew, and is reported there.
    try:
        trace[1].require_unchanged(require_sources(export)())
    except Exception:
        return False
    return True


@dataclass(frozen=True)
class TraceSummary:
    """The part of a trace that every rank sends. Of equal structures only one rank sends the rest.

    Attributes:
        structure_checksum: checksum of the trace without its ranks.
        holders: the ranks that hold each parameter's shards, in order, as int32.
    """

    structure_checksum: int
    holders: bytes

    @classmethod
    def of(cls, traced: TracedExport) -> TraceSummary:
        """Make the summary of a trace."""
        owners = traced.owners
        ranks = [rank for o in owners for holders in o.holders for rank in holders]
        pairs = zip(traced.parameters, owners, strict=True)
        shards = [(p.source, o.starts, o.nbytes, [*map(len, o.holders)]) for p, o in pairs]
        # Plain tuples: `repr` of 18,867 dataclasses takes longer than the rest of the trace.
        tensors = [
            (name, str(t.dtype), t.shape, o.parameter, o.bytes.offset, o.bytes.dims)
            for name, t in traced.tensors.items()
            for o in t.origins
        ]
        checksum = zlib.crc32(repr((shards, tensors)).encode())
        return cls(checksum, np.array(ranks, dtype=np.int32).tobytes())


def merge_traces(
    summaries: Sequence[TraceSummary], traces: Sequence[TracedExport | None]
) -> TracedExport:
    """Merge the ranks' traces to the trace of the whole export, equal on all ranks.

    Args:
        summaries: the summaries of all ranks, by rank.
        traces: the traces, by rank. One for each structure checksum is enough, the others may be
            None.

    Raises:
        NotTraceable: two ranks traced a tensor as different bytes.
    """
    copies: defaultdict[int, list[bytes]] = defaultdict(list)
    for summary in summaries:
        copies[summary.structure_checksum].append(summary.holders)
    # By name of a tensor, its traces: one for each structure that has the tensor.
    claims: defaultdict[str, list[_Claim]] = defaultdict(list)
    for summary, traced in zip(summaries, traces, strict=True):
        if traced is not None:
            parameters = _with_copies(traced.parameters, copies[summary.structure_checksum])
            for name, tensor in traced.tensors.items():
                read = [parameters[origin.parameter] for origin in tensor.origins]
                claims[name].append((tensor, read))
    numbers: dict[TracedParameter, int] = {}
    tensors: dict[str, TracedTensor] = {}
    for name, claimed in claims.items():
        tensor, read = claimed[0]
        if len(claimed) > 1:
            if len({_without_ranks(*claim) for claim in claimed}) > 1:
                raise NotTraceable(f"the ranks traced different exports: {name} differs")
            # Structures that differ elsewhere agree on this tensor: their ranks hold copies.
            read = [_merged(same) for same in zip(*(read for _, read in claimed), strict=True)]
        origins = tuple(
            Origin(numbers.setdefault(parameter, len(numbers)), origin.bytes)
            for parameter, origin in zip(read, tensor.origins, strict=True)
        )
        tensors[name] = TracedTensor(tensor.dtype, tensor.shape, origins)
    return TracedExport(tuple(numbers), tensors)


def _with_copies(
    parameters: Sequence[TracedParameter], copies: Sequence[bytes]
) -> list[TracedParameter]:
    """Return the parameters with the holders of all copies.

    Args:
        copies: for each copy of the model the ranks that it names, in the order of the shards.
    """
    by_copy = np.stack([np.frombuffer(holders, dtype=np.int32) for holders in copies])
    # The ranks that the copies name in the same place hold the same shard.
    by_holder, merged = iter(by_copy.T.tolist()), []
    for parameter in parameters:
        shards = [
            [rank for _ in holders for rank in next(by_holder)]
            for holders in parameter.owners.holders
        ]
        merged.append(_with_holders(parameter, shards))
    return merged


def _merged(parameters: Sequence[TracedParameter]) -> TracedParameter:
    """Return a parameter with the holders of all its traces."""
    by_shard = zip(*(parameter.owners.holders for parameter in parameters), strict=True)
    return _with_holders(parameters[0], [sum(holders, ()) for holders in by_shard])


def _with_holders(parameter: TracedParameter, shards: Sequence[Iterable[int]]) -> TracedParameter:
    holders = tuple(tuple(sorted(set(ranks))) for ranks in shards)
    owners = parameter.owners
    return TracedParameter(parameter.source, Owners(owners.starts, holders, owners.nbytes))


def _without_ranks(tensor: TracedTensor, read: Sequence[TracedParameter]) -> tuple[object, ...]:
    """Return all of a tensor's trace but the ranks, to be compared with `==`."""
    return (
        *(tensor.dtype, tensor.shape),
        *(origin.bytes for origin in tensor.origins),
        *((p.source, p.owners.starts, p.owners.nbytes) for p in read),
    )
