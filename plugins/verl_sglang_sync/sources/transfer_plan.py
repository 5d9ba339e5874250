"""The transfer plan: in which rank's shard each byte lies that an engine rank reads.

An engine rank reads bytes of exported tensors (`Arrangement`), a tensor is bytes of a parameter
(`Origin`), and a parameter lies in shards on the trainer's ranks (`Owners`). Here the three are
composed:

    for part in shard_reads(arrangement, origins, owners):
        part.holders                    # these ranks hold,
        part.read.tensor                # of this parameter,
        part.read.offset                # in its shard, what goes to
        part.read.start                 # this byte of the arranged buffer

Route "exchange" sends what an engine has said it reads, route "pull" tells the engine where a
bucket as a whole is (`whole_bucket`). Pure: numbers in, numbers out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.arrangement import Arrangement, Read
from sglang_loader.common.regions.compose import compose_read
from sglang_loader.common.regions.geometry import split_copy
from verl_sglang_sync.sources.owners import Origin, Owners, nearest


@dataclass(frozen=True, slots=True)
class ShardRead:
    """Bytes that lie in one shard.

    Attributes:
        holders: the ranks that have it.
        read: `tensor` is the parameter, `offset` a byte of the shard.
    """

    holders: tuple[int, ...]
    read: Read

    def owner(self, reader: int) -> int:
        """Whose shard a rank reads."""
        return nearest(self.holders, reader)


def whole_bucket(layout: BucketLayout) -> Arrangement:
    """Of a bucket that is not arranged: all of its tensors, where its layout has them."""
    reads = tuple(
        Read(i, 0, (), tensor.nbytes, tensor.offset) for i, tensor in enumerate(layout.tensors)
    )
    return Arrangement(reads, layout.nbytes)


def shard_reads(
    arrangement: Arrangement,
    origins: Sequence[Origin],
    owners: Sequence[Owners],
    only: int | None = None,
) -> Iterator[ShardRead]:
    """An arrangement's reads, cut where shards end, in their order.

    Args:
        arrangement: of the engine rank.
        origins: of the bucket's tensors, by position in its layout.
        owners: by parameter.
        only: leave out parameters of which this rank holds nothing.
    """
    for read in arrangement.reads:
        if not read.nbytes:
            continue
        origin = origins[read.tensor]
        held = owners[origin.parameter]
        if only is not None and not held.is_held_by(only):
            continue
        wanted = Read(origin.parameter, read.offset, read.dims, read.run, read.start)
        for part in compose_read(origin.bytes, wanted):
            if part.stop <= held.range_of(held.shard_of(part.offset))[1]:
                yield _shard_read(part, held)
                continue
            for copy in split_copy(part.as_copy(), held.starts):
                yield _shard_read(Read.from_copy(copy, part.tensor), held)


def _shard_read(read: Read, held: Owners) -> ShardRead:
    """Of bytes of a parameter that lie in one shard."""
    shard = held.shard_of(read.offset)
    offset = read.offset - held.starts[shard]
    within = Read(read.tensor, offset, read.dims, read.run, read.start)
    return ShardRead(held.holders[shard], within)
