"""Whether, and how, the trainer's ranks fill arranged buffers from their shards.

    exchange = ShardExchange(group, device, source_map, piece_nbytes=512 << 20)
    reason = exchange.prepare(export, arrangements, layouts)      # once; None: it can be done
    reason = exchange.prove(export, batches)                      # after a good sync
    if exchange.ready(export, layouts):                           # in every sync
        exchange.fill(index, buffer)                              # instead of the export
        exchange.drain()                                          # also after a failure
    exchange.free()
    exchange.forget()                                             # after a sync that failed

All of these are collective: all ranks call them in the same order, and each decision is one that
all ranks agree on. Nothing is exchanged before every bucket was compared with the full export, bit
for bit.
"""

from __future__ import annotations

import logging
import traceback
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.arrangement import Arrangement
from verl_sglang_sync.collective import TrainerGroup, common_reason
from verl_sglang_sync.routes.exchange.all_to_all import AllToAll
from verl_sglang_sync.routes.exchange.exchange_plan import (
    BucketExchange,
    pieces_of,
    plan_bucket,
)
from verl_sglang_sync.routes.exchange.self_check import first_difference, gather_arranged
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sources.export_trace import NotTraceable, TracedExport
from verl_sglang_sync.sources.known_sources import SourcesChanged, memory_of
from verl_sglang_sync.sources.source_map import SourceMap

logger = logging.getLogger(__name__)


class ShardExchange:
    """Of one trainer rank.

    Args:
        group: the trainer's ranks; torch's default group must be the same ranks.
        device: of the engine on this rank, and of the shards.
        source_map: of the export.
        piece_nbytes: that a rank sends, or receives, at a time; the scratch is four times that.
        recheck_every_n_syncs: compare again in every n-th sync; 0: never.
    """

    def __init__(
        self,
        group: TrainerGroup,
        device: torch.device,
        source_map: SourceMap,
        *,
        piece_nbytes: int,
        recheck_every_n_syncs: int = 0,
    ) -> None:
        self._group = group
        self._device = device
        self._source_map = source_map
        self._piece_nbytes = piece_nbytes
        self._recheck_every_n_syncs = recheck_every_n_syncs
        self._prepared: _Prepared | None = None
        self._is_proof_due = False
        self._num_syncs = 0
        self.off: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of scratch held at present."""
        return 0 if self._prepared is None else self._prepared.exchange.nbytes

    @property
    def is_prepared(self) -> bool:
        """True if `ready` may find that the shards can be exchanged; equal on all ranks."""
        return self._prepared is not None

    @property
    def needs_proof(self) -> bool:
        """True if nothing is exchanged before the next `prove`; equal on all ranks."""
        return self._prepared is not None and self._is_proof_due

    def prepare(
        self,
        export: Iterable[NamedTensor],
        arrangements: Sequence[Sequence[Arrangement]],
        layouts: Sequence[BucketLayout],
    ) -> str | None:
        """Trace the export and plan every bucket.

        Args:
            export: what a full sync sends.
            arrangements: by trainer rank, then by bucket.
            layouts: by bucket.

        Returns:
            Why shards cannot be exchanged, equal on all ranks; None if they can.
        """
        self.forget()
        if self.off is not None:
            return self.off
        if (reason := self._source_map.trace(export)) is not None:
            return self._switch_off(reason)
        draft, prepared = None, None
        try:
            draft = self._draft(arrangements, layouts)
        except NotTraceable as error:
            reason = str(error)
        except Exception:
            reason = traceback.format_exc()
        own = draft and [bucket.scratch_nbytes for bucket in draft.buckets]
        needs = self._group.all_gather(own)
        try:
            if draft is not None and None not in needs:
                largest = [max(of_bucket) for of_bucket in zip(*needs, strict=True)]
                prepared = draft.in_pieces(largest, self._piece_nbytes, self._device)
        except Exception:
            reason = traceback.format_exc()
        agreed = common_reason(self._group, reason, draft.signature if draft is not None else 0)
        if agreed is None:
            self._prepared, self._is_proof_due = prepared, True
            return None
        return self._switch_off(agreed)

    def ready(self, export: Iterable[NamedTensor], layouts: Sequence[BucketLayout]) -> bool:
        """True if all ranks can exchange the shards in this sync, instead of exporting in full.

        Args:
            export: of this sync.
            layouts: of its buckets, as far as they are known.
        """
        if self._prepared is None or not self._take_shards(export, layouts):
            return False
        self._num_syncs += 1
        every = self._recheck_every_n_syncs
        if every and self._num_syncs % every == 0:
            self._is_proof_due = True
        if self._is_proof_due:
            self.free()
        return not self._is_proof_due

    def fill(self, index: int, buffer: torch.Tensor | None) -> None:
        """Fill one bucket's arranged buffer, asynchronously on the current stream.

        Args:
            index: of the bucket.
            buffer: flat uint8, as long as the arrangement that was prepared; None: only send what
                the other ranks need.

        Raises:
            ValueError: the buffer is of another length, and would be filled in part.
        """
        assert self._prepared is not None, "nothing was prepared"
        needed = self._prepared.known.arrangements[index].nbytes
        if buffer is not None and buffer.numel() != needed:
            raise ValueError(
                f"bucket {index} has a buffer of {buffer.numel()} bytes, was prepared for {needed}"
            )
        self._prepared.exchange.fill(index, buffer)

    def drain(self) -> None:
        """Send what the other ranks still wait for."""
        assert self._prepared is not None, "nothing was prepared"
        self._prepared.exchange.drain()

    def prove(
        self,
        export: Iterable[NamedTensor],
        batches: Iterable[tuple[BucketLayout, Sequence[torch.Tensor]]],
    ) -> str | None:
        """Exchange every bucket and compare it with the full export.

        Args:
            export: what was prepared for.
            batches: the full export again, in its buckets.

        Returns:
            Why shards are not exchanged, equal on all ranks; None if they are from now on.
        """
        self._is_proof_due = True
        if self._prepared is None or not self._take_shards(export, self._prepared.known.layouts):
            return self.off or "the parameters were replaced by others"
        problem, source = None, iter(batches)
        for index, layout in enumerate(self._prepared.known.layouts):
            batch = None
            try:
                batch = next(source, None)
                if batch is None or batch[0] != layout:
                    batch, problem = None, problem or f"bucket {index} is not what it was"
            except Exception:
                problem = problem or traceback.format_exc()
            found = self._compare(index, batch[1] if batch is not None else None)
            problem = problem or found
            del batch
        for _ in source:  # the export's collectives need every rank
            problem = problem or "the export has more buckets than it had"
        self.drain()
        self.free()
        agreed = common_reason(self._group, problem)
        if agreed is not None:
            return self._switch_off(agreed)
        self._is_proof_due = False
        return None

    def _compare(self, index: int, tensors: Sequence[torch.Tensor] | None) -> str | None:
        """Exchange one bucket; what differs from the full export's tensors, if it came."""
        assert self._prepared is not None
        known = self._prepared.known
        arrangement, layout = known.arrangements[index], known.layouts[index]
        found, expected, problem = None, None, None
        try:
            if tensors is not None:
                expected = gather_arranged(tensors, arrangement, self._device)
                found = torch.zeros(arrangement.nbytes, dtype=torch.uint8, device=self._device)
        except Exception as error:  # the other ranks wait for this one's shards
            found, problem = None, f"bucket {index} could not be compared: {error}"
        try:
            self.fill(index, found)
            if found is not None and expected is not None:
                problem = first_difference(expected, found, arrangement, layout)
        except Exception:  # such as a backend that cannot do this: then it fails on every rank
            problem = traceback.format_exc()
        return problem

    def _take_shards(self, export: Iterable[NamedTensor], layouts: Sequence[BucketLayout]) -> bool:
        """Look whether the shards are of the kinds that they were; make ready what `fill` needs."""
        assert self._prepared is not None
        reason = None
        try:
            if tuple(layouts) != self._prepared.known.layouts:
                raise SourcesChanged("the export is cut into other buckets")
            traced = self._prepared.known.traced
            now = self._source_map.current(export, traced)
            self._prepared.exchange.begin(_Shards(traced.names, now))
        except Exception as error:
            reason = str(error)
        agreed = common_reason(self._group, reason)
        if agreed is not None:
            self.forget()
            logger.info("shards are not exchanged in this sync: %s", agreed)
        return agreed is None

    def free(self) -> None:
        """Give the scratch back and let go of the shards; what was exchanged must be done."""
        if self._prepared is not None:
            self._prepared.exchange.end()

    def forget(self) -> None:
        """Nothing is exchanged until all was prepared, and proven, anew."""
        self.free()
        self._prepared = None

    def _draft(
        self, arrangements: Sequence[Sequence[Arrangement]], layouts: Sequence[BucketLayout]
    ) -> _Draft:
        rank, traced = dist.get_rank(), self._source_map.traced
        owners, buckets = traced.owners, []
        for index, layout in enumerate(layouts):
            by_rank = [arranged[index] for arranged in arrangements]
            buckets.append(plan_bucket(rank, by_rank, traced.origins_of(layout), owners))
        known = _Known(traced, tuple(arrangements[rank]), tuple(layouts))
        return _Draft(tuple(buckets), known, zlib.crc32(repr(arrangements).encode()))

    def _switch_off(self, reason: str) -> str:
        self.forget()
        self.off = reason
        logger.warning("every rank exports all weights in full, nothing is exchanged: %s", reason)
        return reason


@dataclass(frozen=True)
class _Known:
    """What an exchange was planned for.

    Attributes:
        traced: the export.
        arrangements: this rank's, by bucket.
        layouts: by bucket.
    """

    traced: TracedExport
    arrangements: tuple[Arrangement, ...]
    layouts: tuple[BucketLayout, ...]


@dataclass(frozen=True)
class _Draft:
    """What this rank has to do, before all ranks know in how many pieces.

    Attributes:
        buckets: all of them.
        known: what they were planned for.
        signature: equal on ranks that were given the same arrangements.
    """

    buckets: tuple[BucketExchange, ...]
    known: _Known
    signature: int

    def in_pieces(
        self, largest: Sequence[int], piece_nbytes: int, device: torch.device
    ) -> _Prepared:
        """Cut every bucket, on all ranks alike.

        Args:
            largest: by bucket, what any rank sends or receives, in bytes.
            piece_nbytes: of that at a time.
            device: of the shards and the buffers.
        """
        numbers = [max(1, -(-nbytes // piece_nbytes)) for nbytes in largest]
        plans = [pieces_of(bucket, n) for bucket, n in zip(self.buckets, numbers, strict=True)]
        return _Prepared(AllToAll(plans, device), self.known)


@dataclass(frozen=True)
class _Prepared:
    """What `prepare` found: an exchange, and what it was planned for."""

    exchange: AllToAll
    known: _Known


class _Shards:
    """This rank's shards; each one's bytes are looked up when they are first asked for, while
    others travel.
    """

    def __init__(self, names: Sequence[str], now: Mapping[str, torch.Tensor]) -> None:
        self._names = names
        self._now = now
        self._known: dict[int, torch.Tensor] = {}

    def __getitem__(self, position: int, /) -> torch.Tensor:
        found = self._known.get(position)
        if found is None:
            found = self._known[position] = memory_of(self._now[self._names[position]])
        return found
