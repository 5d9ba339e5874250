"""The sending of shards in rounds: what each trainer rank packs, as engine ranks have listed it.

plan = SendPlan.of(traced, parts, destinations, num_ranks)     # pure, once
sender = Sender(plan, device)
sender.begin(shards)                       # at the beginning of a sync
for number in range(plan.num_rounds):
    sender.pack(number)                    # into one of two scratch buffers
    work = sender.launch(number, received, sizes, group)
sender.end()
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from msgspec.structs import replace

from sglang_loader.common.broadcast.broadcast import all_to_all
from sglang_loader.common.bucket_source import CopyFrom
from sglang_loader.common.copies.fused import FusedCopies
from sglang_loader.common.layout import WireError
from sglang_loader.common.ranks import Ranks
from sglang_loader.common.rounds import RoundPart
from verl_sglang_sync.routes.broadcast import NUM_TRAVELLING
from verl_sglang_sync.routes.table.weight_map_builder import first_shards
from verl_sglang_sync.sources.export_trace import TracedExport
from verl_sglang_sync.sources.host_memory import HOST_MEMORY
from verl_sglang_sync.trainer_ranks import own_rank

WORD_BYTES = 8
"""The unit of an all-to-all."""

NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class PackedRound:
    """The bytes that one trainer rank sends in one round.

    Attributes:
        copies: from the rank's shards, by the number of the parameter, into the scratch.
        sizes: bytes of the scratch, by rank of the group.
    """

    copies: list[CopyFrom]
    sizes: list[int]


@dataclass(frozen=True)
class SendPlan:
    """The bytes that one trainer rank sends and its engine ranks receive, in every sync.

    Attributes:
        packed: by round, the bytes that the rank sends.
        num_ranks: the number of ranks in the group.
    """

    packed: list[PackedRound]
    num_ranks: int

    @property
    def num_rounds(self) -> int:
        """The number of rounds, equal on all ranks."""
        return len(self.packed)

    @classmethod
    def of(
        cls,
        traced: TracedExport,
        readers: Sequence[Sequence[RoundPart]],
        destinations: Sequence[int],
        num_ranks: int,
    ) -> SendPlan:
        """Plan what a trainer rank packs.

        Args:
            readers: the rank's part of each round, for each engine rank that is sent to.
            destinations: the rank in the group of each of these engine ranks.
            num_ranks: the number of ranks in the group.
        """
        firsts = first_shards(traced)
        packed = []
        for number in range(max(map(len, readers), default=0)):
            sizes = [0] * num_ranks
            copies: list[CopyFrom] = []
            start = 0
            # The scratch has the bytes for one rank of the group after those for the other.
            for destination, rounds in sorted(zip(destinations, readers, strict=True), key=_first):
                if number >= len(rounds):
                    continue
                # Shards are numbered by parameter, so the number leads to the parameter.
                for read in rounds[number].reads:
                    parameter = bisect_right(firsts, read.memory) - 1
                    copies.append((replace(read, start=start + read.start).as_copy(), parameter))
                sizes[destination] = rounds[number].size
                start += sizes[destination]
            packed.append(PackedRound(copies, sizes))
        return cls(packed, num_ranks)

    @property
    def largest(self) -> int:
        """The most bytes that the rank packs at a time."""
        return max((sum(each.sizes) for each in self.packed), default=0)


def check_parts(traced: TracedExport, parts: Iterable[RoundPart], rank: int) -> None:
    """Check what engine ranks have listed for a trainer rank to send.

    Raises:
        WireError: bytes outside of the shards that the trainer rank holds.
    """
    firsts = first_shards(traced)
    for read in chain.from_iterable(part.reads for part in parts):
        parameter = bisect_right(firsts, read.memory) - 1
        owners, shard = traced.owners[parameter], read.memory - firsts[parameter]
        if shard >= len(owners.starts) or rank not in owners.holders[shard]:
            raise WireError(f"shard {read.memory} is to be sent, and rank {rank} does not hold it")
        start, stop = owners.range_of(shard)
        if read.stop > stop - start:
            raise WireError(
                f"shard {read.memory} is to be sent up to byte {read.stop}, and it has "
                f"{stop - start} bytes"
            )


def _first(pair: tuple[int, object]) -> int:
    return pair[0]


def all_to_all_bytes(parts: Sequence[bytes], ranks: Ranks, device: torch.device) -> list[bytes]:
    """Send each trainer rank its bytes, and return what all ranks send to this one. Collective.

    Args:
        parts: by rank, what is sent to it.
    """
    # Of 512 ranks each sends and receives megabytes so. Gathered by all, that were gigabytes.
    sizes = ranks.gather(list(map(len, parts)))
    own = own_rank()
    words = [[-(-size // WORD_BYTES) * WORD_BYTES for size in of_rank] for of_rank in sizes]
    incoming = [of_rank[own] for of_rank in words]

    def allocate() -> tuple[torch.Tensor, torch.Tensor]:
        pairs = zip(parts, words[own], strict=True)
        padded = bytearray(b"".join(part.ljust(size, b"\0") for part, size in pairs))
        sent = torch.frombuffer(padded, dtype=torch.uint8) if padded else NOTHING
        return sent.to(device), torch.empty(sum(incoming), dtype=torch.uint8, device=device)

    # No rank may fail alone from here on: the others would wait in the all-to-all.
    buffers, reason = ranks.step(allocate)
    if buffers is None:
        raise RuntimeError(f"the lists of rounds could not be sent: {reason}")
    sent, received = buffers
    if len(parts) > 1:
        all_to_all(sent, words[own], received, incoming, None).wait()
    else:
        received = sent
    data, start, result = received.cpu().numpy().tobytes(), 0, []
    for rank, size in enumerate(incoming):
        result.append(data[start : start + sizes[rank][own]])
        start += size
    return result


class Sender:
    """The all-to-alls of one trainer rank, equal in all syncs.

    The rank must launch every round, even after a failure. Otherwise the other ranks hang.
    """

    def __init__(self, plan: SendPlan, device: torch.device) -> None:
        self.plan = plan
        self._device = device
        self._copies = [FusedCopies(each.copies) for each in plan.packed]
        self._scratch: list[torch.Tensor] = []
        self._memories: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """The present size of the scratch."""
        return sum(scratch.numel() for scratch in self._scratch)

    def begin(self, shards: Sequence[torch.Tensor]) -> None:
        """Set this rank's shards by parameter, and allocate the scratch.

        No collective can then fail for a lack of scratch.
        """
        # One round is packed while another is on its way.
        while len(self._scratch) < NUM_TRAVELLING:
            size = self.plan.largest
            self._scratch.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        # Shards of host memory are read through a view that the GPU has of it.
        with torch.no_grad():
            flat = [shard.contiguous().view(-1).view(torch.uint8) for shard in shards]
            self._memories = list(map(HOST_MEMORY.view_of, flat))

    def end(self) -> None:
        """Free the scratch and drop the shards. All launched work must be done."""
        self._memories.clear()
        self._scratch.clear()

    def pack(self, number: int) -> None:
        """Pack a round into scratch.

        The round `NUM_TRAVELLING` before used the same scratch. Its all-to-all must be done.
        """
        sent = self._scratch_of(number)
        with torch.no_grad():
            for launch in self._copies[number].between(self._memories, [sent], sent.device):
                launch()

    def launch(
        self, number: int, received: torch.Tensor, sizes: Sequence[int], group: Any = None
    ) -> Any:
        """Start the all-to-all of a packed round, and return torch's work.

        Args:
            received: flat uint8 buffer for the bytes of all ranks, one rank after the other.
            sizes: bytes from each rank of the group. The sum is the size of `received`.
            group: the group, or None for torch's default group.
        """
        sent = self._scratch_of(number)
        return all_to_all(sent, self.plan.packed[number].sizes, received, sizes, group)

    def _scratch_of(self, number: int) -> torch.Tensor:
        return self._scratch[number % NUM_TRAVELLING][: sum(self.plan.packed[number].sizes)]
