"""Mode "compiled": buckets that are read in place, without the export that would show where.

A trainer that keeps its full tensors exports the same bytes of the same parameters at every sync;
going through 18,867 tensors to see that costs more than to copy them. The export is traced once,
and compared with where its tensors were found; from then on it is enough that the parameters are
still there:

    unexported.learn(export, source, cuts)              # after a good sync that was exported
    if unexported.is_due():                             # in the next ones
        buckets = unexported.buckets(export, report)    # the engine reads
        for _ in unexported.confirm(export, cuts): ...  # meanwhile; before the commit

Nothing counts before `confirm`: where it raises, the sync is made again, with the export.
`learn` and `has_failed` are collective.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from verl_sglang_sync.bucket_stream import Batch, Bucket, Cut
from verl_sglang_sync.collective import TrainerGroup
from verl_sglang_sync.packing import NamedTensor
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.session_buckets import ReadyBucket, wait_for_export
from verl_sglang_sync.source import InPlaceSource, LocatedBucket
from verl_sglang_sync.traced_export.agreement import common_reason, holds_everywhere
from verl_sglang_sync.traced_export.export_trace import NotTraceable, TracedExport, trace_export
from verl_sglang_sync.traced_export.known_sources import (
    KnownSources,
    Sources,
    SourcesChanged,
    local_of,
    memory_of,
    sources_of,
)

logger = logging.getLogger(__name__)

MAX_TRACES = 4
"""How often parameters may move before it is not worth the tracing."""


@dataclass(frozen=True)
class _TracedBucket:
    """A bucket whose place the trace confirms.

    Attributes:
        bucket: what it is.
        located: where it lies.
        sources: by position of a tensor, the parameter whose memory it is part of; for as many as
            show every block.
    """

    bucket: Bucket
    located: LocatedBucket
    sources: Mapping[int, str]


@dataclass(frozen=True)
class _Traced:
    """An export of which every tensor was found where its parameter is."""

    sources: KnownSources
    buckets: tuple[_TracedBucket, ...]


class _Holders:
    """Parameters by position in a bucket, asked for only where a block is new to the engine."""

    def __init__(self, names: Mapping[int, str], now: Callable[[], Mapping[str, Any]]) -> None:
        self._names = names
        self._now = now

    def __getitem__(self, position: int, /) -> torch.Tensor:
        return local_of(self._now()[self._names[position]])


class UnexportedBuckets:
    """The buckets of one sync.

    Args:
        buckets: what was traced.
        now: the parameters, by name.
        device: where they are.
        report: gets the counts.
    """

    def __init__(
        self,
        buckets: Sequence[_TracedBucket],
        now: Callable[[], Mapping[str, torch.Tensor]],
        device: torch.device,
        report: SyncReport,
    ) -> None:
        self._buckets = buckets
        self._now = now
        self._device = device
        self._report = report

    def __iter__(self) -> Iterator[ReadyBucket]:
        report = self._report
        wait_for_export(self._device)
        for index, traced in enumerate(self._buckets):
            bucket = traced.bucket
            report.count_bucket(len(bucket.layout.tensors), bucket.payload_bytes)
            report.num_in_place += 1
            report.num_unexported += 1
            holders = _Holders(traced.sources, self._now)
            yield ReadyBucket(Batch(index, bucket, []), traced.located, holders=holders)

    def drain(self) -> None:
        """Nothing is left to do: no other rank waits for an export."""


class UnexportedSource:
    """Of one trainer rank, for all its sessions.

    Args:
        group: the trainer's ranks.
        device: of the engine on this rank, and of the parameters.
        recheck_every_n_syncs: go through the export in every n-th sync; 0: never.
    """

    def __init__(
        self, group: TrainerGroup, device: torch.device, *, recheck_every_n_syncs: int = 0
    ) -> None:
        self._group = group
        self._device = device
        self._recheck_every_n_syncs = recheck_every_n_syncs
        self._traced: _Traced | None = None
        self._now: Mapping[str, torch.Tensor] = {}
        self._num_syncs = self._num_traces = 0
        self._has_failed = False
        self.off: str | None = None

    def can_learn(self, weights: Iterable[NamedTensor]) -> bool:
        """True if `learn` may find something; equal on all ranks, whose exports are of a kind."""
        return self._traced is None and self.off is None and sources_of(weights) is not None

    def learn(
        self, weights: Iterable[NamedTensor], source: InPlaceSource | None, cuts: Sequence[Cut]
    ) -> None:
        """Trace the export, if all of it was read in place on all ranks.

        Args:
            weights: the export of the sync before.
            source: where its buckets were found; None: they were packed.
            cuts: those buckets.
        """
        located = [None if source is None else source.located(i) for i in range(len(cuts))]
        if not holds_everywhere(self._group, bool(located) and None not in located):
            return
        traced, reason = None, None
        try:
            traced = self._trace(weights, [place for place in located if place], cuts)
        except NotTraceable as error:
            reason = str(error)
        except Exception:
            reason = traceback.format_exc()
        self._num_traces += 1
        if self._num_traces > MAX_TRACES:
            reason = reason or f"the parameters moved {MAX_TRACES} times"
        agreed = common_reason(self._group, reason)
        if agreed is None:
            self._traced = traced
            return
        self.off = agreed
        logger.warning("every sync goes through the export, though it is read in place: %s", agreed)

    def is_due(self) -> bool:
        """True if this sync is to leave the export out; equal on all ranks."""
        if self._traced is None:
            return False
        self._num_syncs += 1
        every = self._recheck_every_n_syncs
        return not every or self._num_syncs % every != 0

    def buckets(self, weights: Iterable[NamedTensor], report: SyncReport) -> UnexportedBuckets:
        """The buckets of a sync that is due.

        Args:
            weights: the export that is left out.
            report: gets the counts.
        """
        assert self._traced is not None, "nothing was traced"

        def now() -> Mapping[str, torch.Tensor]:
            self._now = self._now or _sources(weights)()
            return self._now

        return UnexportedBuckets(self._traced.buckets, now, self._device, report)

    def confirm(self, weights: Iterable[NamedTensor], cuts: Sequence[Cut]) -> Iterator[None]:
        """What the engine is told to read is what the export would have given.

        In small steps, for moments in which the engine is waited for; nothing is confirmed before
        the last is taken.

        Args:
            weights: the export that was left out.
            cuts: how it would have been cut.

        Raises:
            SourcesChanged: it may be something else.
        """
        assert self._traced is not None, "nothing was traced"
        try:
            if [cut.bucket for cut in cuts] != [traced.bucket for traced in self._traced.buckets]:
                raise SourcesChanged("the export is cut into other buckets")
            yield from self._traced.sources.checks(_sources(weights))
        except Exception:
            self._has_failed = True
            raise

    def has_failed(self) -> bool:
        """True if on any rank the last sync could not be confirmed; the next one is exported."""
        is_confirmed, self._has_failed = not self._has_failed, False
        return not holds_everywhere(self._group, is_confirmed)

    def rest(self) -> None:
        """The sync is over: let go of the parameters."""
        self._now = {}

    def forget(self) -> None:
        """The next sync goes through the export; equal on all ranks."""
        self._traced = None
        self.rest()

    def _trace(
        self,
        weights: Iterable[NamedTensor],
        located: Sequence[LocatedBucket],
        cuts: Sequence[Cut],
    ) -> _Traced:
        sources = sources_of(weights)
        assert sources is not None, "see can_learn"
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        traced = trace_export(weights, sources=sources, world_size=world_size, device=self._device)
        now = sources()
        addresses = {
            i: memory_of(now[parameter.source]).data_ptr()
            for i, parameter in enumerate(traced.parameters)
        }
        buckets = []
        for cut, place in zip(cuts, located, strict=True):
            names = [tensor.name for tensor in cut.bucket.layout.tensors]
            _check_places(traced, addresses, cut.bucket, place)
            members = {
                member: traced.parameters[traced.tensors[names[member]].origin.parameter].source
                for _, member in place.blocks
            }
            buckets.append(_TracedBucket(cut.bucket, place, members))
        return _Traced(KnownSources(now, sources), tuple(buckets))


def _check_places(
    traced: TracedExport, addresses: Mapping[int, int], bucket: Bucket, located: LocatedBucket
) -> None:
    """Every tensor was found where the trace says.

    Raises:
        NotTraceable: one was not, or is no run of bytes of one parameter.
    """
    tensors = bucket.layout.tensors
    for tensor, address in zip(tensors, located.addresses, strict=True):
        found = traced.find(tensor)
        source = found.origin.bytes
        expected = addresses[found.origin.parameter] + source.offset
        if tensor.nbytes and not (source.is_dense and address == expected):
            raise NotTraceable(f"{tensor.name} was not found where its parameter is")


def _sources(weights: Iterable[NamedTensor]) -> Sources:
    sources = sources_of(weights)
    if sources is None:
        raise SourcesChanged("the export does not say which tensors it reads")
    return sources
