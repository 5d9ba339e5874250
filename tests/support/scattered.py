"""Exported tensors as random shards of trainer ranks, as a trace would have found them."""

from bisect import bisect_right
from collections.abc import Sequence
from random import Random

import torch

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.quantization import Quantization
from sglang_loader.common.regions.compose import ByteMap
from sglang_loader.common.rounds import SentRound
from sglang_loader.common.weight_map import ShardMemory, decode_bases, decode_weight_map
from verl_sglang_sync.routes.table.weight_map_builder import (
    NO_BYTES,
    MemoryTable,
    bases_for,
    first_shards,
    weight_map_of,
)
from verl_sglang_sync.routes.table.wires import Wires
from verl_sglang_sync.sources.bucket_cutter import Bucket
from verl_sglang_sync.sources.export_trace import TracedExport, TracedParameter, TracedTensor
from verl_sglang_sync.sources.owners import Origin, Owners, held_by_all, shards_of_rows

ALIGNMENT = 16


class Scattered:
    """A random division of the tensors of some buckets into parameters, and of these into shards.

    The shards are of as many trainer ranks as `num_ranks`. A tensor is a parameter of its own, a
    part of one that several tensors share, or spread by columns over the shards.

    Args:
        layouts: the buckets, before they are quantised.
        quantized: the buckets as the engine gets them, if tensors are quantised.

    Attributes:
        traced: the trace of the export.
        num_ranks: the number of trainer ranks.
    """

    def __init__(
        self,
        layouts: Sequence[BucketLayout],
        num_ranks: int,
        seed: int,
        quantization: Quantization | None = None,
        quantized: Sequence[BucketLayout] = (),
    ) -> None:
        self._layouts, self.num_ranks, self._random = layouts, num_ranks, Random(seed)
        parameters: list[TracedParameter] = []
        tensors: dict[str, TracedTensor] = {}
        waiting: list = []
        for tensor in (tensor for layout in layouts for tensor in layout.tensors):
            waiting.append(tensor)
            if self._random.random() < 0.5:
                self._add(waiting, parameters, tensors)
        self._add(waiting, parameters, tensors)
        self.traced = TracedExport(tuple(parameters), tensors, quantization)
        layouts = quantized or layouts
        buckets = [Bucket.of(layout, is_last=layout is layouts[-1]) for layout in layouts]
        self._weight_map = decode_weight_map(weight_map_of(buckets, self.traced).data)

    def _add(self, waiting, parameters, tensors) -> None:
        """Make one parameter of the tensors that wait, of which the first may be spread."""
        number, every = len(parameters), list(range(self.num_ranks))
        offset = 0
        if not waiting:
            return
        first = waiting[0]
        row = first.shape[-1] * first.dtype.itemsize if first.shape else 0
        part = row // self.num_ranks
        if len(waiting) == 1 and part and row % self.num_ranks == part % first.dtype.itemsize == 0:
            rows = first.nbytes // row
            dims = (rows, part), (self.num_ranks, rows * part), (part, 1)
            places = ByteMap(0, tuple(dim for dim in dims if dim[0] > 1) or ((1, 1),))
            starts = tuple(rank * rows * part for rank in every)
            owners = Owners(starts, tuple((rank,) for rank in every), first.nbytes)
            tensors[first.name] = TracedTensor(first.dtype, first.shape, (Origin(number, places),))
        else:
            for tensor in waiting:
                places = ByteMap(offset, ((max(1, tensor.nbytes), 1),))
                origin = Origin(number, places)
                tensors[tensor.name] = TracedTensor(tensor.dtype, tensor.shape, (origin,))
                offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
            owners = shards_of_rows(offset // ALIGNMENT, ALIGNMENT, every)
            if self._random.random() < 0.3:
                owners = held_by_all(offset, self.num_ranks)
        parameters.append(TracedParameter(f"p{number}", owners))
        waiting.clear()

    def shards(
        self, buffers: Sequence[torch.Tensor], reader: int = 0, num_mapped: int | None = None
    ) -> ShardMemory:
        """Lay the tensors of packed buckets out in the ranks' memory, and return what one reads.

        Args:
            num_mapped: the first trainer ranks, whose memory is mapped. None: all.
        """
        parts = [torch.zeros(owners.nbytes, dtype=torch.uint8) for owners in self.traced.owners]
        for layout, buffer in zip(self._layouts, buffers, strict=True):
            for tensor in layout.tensors:
                (origin,) = self.traced.tensors[tensor.name].origins
                sizes = [count for count, _ in origin.bytes.dims]
                strides = [stride for _, stride in origin.bytes.dims]
                if tensor.nbytes:
                    target = parts[origin.parameter].as_strided(sizes, strides, origin.bytes.offset)
                    source = buffer[tensor.offset : tensor.offset + tensor.nbytes]
                    target.copy_(source.view(sizes))
        tables, blocks = [], []
        for rank in range(self.num_ranks):
            memory, places = torch.zeros(0, dtype=torch.uint8), [NO_BYTES] * len(parts)
            for number in self._random.sample(range(len(parts)), len(parts)):
                owners = self.traced.owners[number]
                for shard, holders in enumerate(owners.holders):
                    if rank in holders:
                        start, stop = owners.range_of(shard)
                        gap = -memory.numel() % ALIGNMENT + ALIGNMENT
                        places[number] = 0, memory.numel() + gap
                        empty = torch.full((gap,), 0x5A, dtype=torch.uint8)
                        memory = torch.cat((memory, empty, parts[number][start:stop]))
            blocks += [(rank, memory)] if memory.numel() else []
            held = {f"rank {rank}": ()} if memory.numel() else {}
            tables.append(MemoryTable(held, tuple(places)))
        # Trainer ranks from `num_mapped` on are on another host. Their blocks are not mapped.
        num_mapped = self.num_ranks if num_mapped is None else num_mapped
        hosts = ["here"] * num_mapped + ["there"] * (self.num_ranks - num_mapped)
        wires = Wires(tuple(hosts), ("here",) * self.num_ranks, first_reader=0, can_map=True)
        bases = decode_bases(bases_for(self.traced, tables, wires, reader).data)
        mapped = [block for rank, block in blocks if rank < num_mapped]
        self._memory = dict(blocks), tables
        return ShardMemory(self._weight_map, bases, mapped, torch.device("cpu"))

    def sent(self, sent: SentRound) -> torch.Tensor:
        """Return the buffer of a round, as the trainer ranks pack it from the last `shards`."""
        memory, tables = self._memory
        firsts, parts = first_shards(self.traced), []
        for rank, part in enumerate(sent.parts):
            packed = torch.full((part.size,), 0x5A, dtype=torch.uint8)
            for read in part.reads:
                parameter = bisect_right(firsts, read.memory) - 1
                _, base = tables[rank].shards[parameter]
                sizes = [*(count for count, _ in read.dims), read.run]
                strides = [*(stride for _, stride in read.dims), 1]
                source = memory[rank].as_strided(sizes, strides, base + read.offset)
                packed[read.start : read.start + read.nbytes] = source.reshape(-1)
            parts.append(packed)
        return torch.cat(parts)
