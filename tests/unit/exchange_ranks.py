"""What each rank does in the tests of the exchange of shards."""

import dataclasses
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.copies import copy_views
from sglang_loader.common.regions.arrangement import Arrangement, Read
from sglang_loader.common.regions.geometry import StridedCopy
from sglang_loader.session.state import _piece
from unit.route_ranks import BUCKET_BYTES, CPU, Rank, sharded

PIECE_BYTES = 2 << 10


def arrangement_of(layout, rank, world_size):
    """What an engine with tensor and expert parallelism might read of a bucket, and less even."""
    reads, start = [], 0
    for i, tensor in enumerate(layout.tensors):
        *_, width = tensor.shape or (1,)
        row = width * tensor.dtype.itemsize
        rows = tensor.nbytes // row if row else 0
        share = -(-rows // world_size)
        first, last = min(rank * share, rows), min((rank + 1) * share, rows)
        columns = width // world_size * tensor.dtype.itemsize
        if ".experts." in tensor.name:
            expert = int(tensor.name.partition(".experts.")[2].partition(".")[0])
            found = [(0, (), tensor.nbytes)] if expert % world_size == rank else []
        elif tensor.name.endswith(("o_proj.weight", "down_proj.weight")) and columns:
            found = [(rank * columns, ((rows, row),), columns)]
        elif len(tensor.shape) == 1:
            found = [(0, (), tensor.nbytes)]
        elif "lm_head" in tensor.name:  # every other row, then a column alone
            found = [(0, ((rows // 2, 2 * row),), row)]
            found += [(row - tensor.dtype.itemsize, ((rows, row),), tensor.dtype.itemsize)]
        else:
            found = [(first * row, (), (last - first) * row)]
        for offset, dims, run in found:
            reads.append(Read(i, offset, dims, run, start))
            start += reads[-1].nbytes
            start += -start % (256 if i % 3 else tensor.dtype.itemsize)
    return Arrangement(tuple(reversed(reads)), start)


class ExchangeRank(Rank):
    """A rank whose engine reads a part of each bucket, and says so after the first sync."""

    def make_route(self):
        from verl_sglang_sync.engine.arrangements import EngineArrangements, KnownArrangements
        from verl_sglang_sync.routes.exchange.route import Exchange
        from verl_sglang_sync.routes.staging_ring import StagingRing

        self.batches()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.own = [arrangement_of(b.layout, rank, world_size) for b in self.stream.buckets]
        named = [(b.digest, reads) for b, reads in zip(self.stream.buckets, self.own, strict=True)]
        arrangements = EngineArrangements(is_wanted=True)
        self.digest = f"arranged for rank {rank}"
        arrangements.known = KnownArrangements(self.digest, tuple(named))
        self.readers = [arrangements]
        self.ring = StagingRing(CPU, num_buffers=2, bucket_bytes=BUCKET_BYTES)
        self.num_read = None  # buckets after which this rank gives up
        payload = sum(bucket.payload_bytes for bucket in self.stream.buckets)
        arranged = sum(reads.nbytes for reads in self.own)
        self.seen.counts.update(arranged=arranged, payload=payload, scratch=0)
        route = Exchange(self.context, self.ring)
        route._piece_nbytes = PIECE_BYTES
        return route

    def give_up(self, on):
        """From now on one rank gives up after one bucket."""
        self.num_read = 1 if dist.get_rank() == on else None

    def move(self, on, offset=0):
        """Another storage for one rank's shard of one parameter, with the same values.

        Args:
            on: which rank's.
            offset: of the shard in its storage, in elements; another one makes it another
                parameter.
        """
        parameter = next(p for p in self.model.parameters() if p.to_local().numel())
        if dist.get_rank() == on:
            local = parameter.to_local().detach()
            moved = local.new_empty(local.numel() + offset)[offset:].view(local.shape)
            parameter._local_tensor = moved.copy_(local)

    def sync_failing(self, piece):
        """A sync in which the packing of one piece fails on rank 1."""
        broken = self.route._plan.all_to_all._sends[piece]
        fails = mock.Mock(side_effect=MemoryError("no room to pack"))
        with mock.patch.object(broken, "run", fails if dist.get_rank() == 1 else broken.run):
            self.sync()

    def sync_without_all_to_all(self):
        """A sync with a backend that has none."""
        refusal = RuntimeError("this backend has no all-to-all")
        with mock.patch.object(dist, "all_to_all_single", side_effect=refusal):
            self.sync()

    def sync_with_spoiled_origins(self):
        """A sync in which what is traced says of one tensor that it is another."""
        with spoiled_origins():
            self.sync()

    def read(self, source):
        self.filled = []
        assert source.needs_arrangements == [self.digest]
        source.engines_joined()
        for ready in source:
            flat = torch.empty(0, dtype=torch.uint8).set_(ready.storage)
            pieces = [_piece(piece, {0: flat}, ready.nbytes, 0) for piece in ready.pieces(0)]
            whole = torch.zeros(ready.nbytes, dtype=torch.uint8)
            for copy, memory in BucketSource(pieces).copies(StridedCopy(0, 0, 0, (), ready.nbytes)):
                target, origin = copy_views(copy, memory, whole)
                target.copy_(origin)
            self.filled.append(whole)
            if len(self.filled) == self.num_read:
                break
        scratch = source._report.staging_bytes - self.ring.nbytes
        self.seen.counts["scratch"] = max(self.seen.counts["scratch"], scratch)

    def compare(self):
        from verl_sglang_sync.routes.exchange.shard_route import gather_arranged

        pairs = zip(self.batches(), self.own, strict=True)
        expected = [gather_arranged(batch.tensors, reads, CPU) for batch, reads in pairs]
        assert any(buffer.any() for buffer in expected)
        assert len(self.filled) == (self.num_read or len(expected))
        return [
            index
            for index, (have, want) in enumerate(zip(self.filled, expected, strict=False))
            for read in self.own[index].reads
            if not torch.equal(*(b[read.start : read.start + read.nbytes] for b in (have, want)))
        ]


class SendRank(ExchangeRank):
    """A rank whose engine is on another device, as far as what it is sent is proven."""

    def make_route(self):
        from verl_sglang_sync.routes.send.route import Send

        super().make_route()
        self.context.first_reader = dist.get_world_size()
        route = Send(self.context, None)
        route._piece_nbytes = PIECE_BYTES
        return route

    def is_sent(self):
        """Whether a sync would be sent now."""
        return self.route.choose(self.export, self.report()) is not None


def prove_sending():
    """Export and prove, with origins as they are, then with others."""
    right, wrong = SendRank(sharded("moe")), SendRank(sharded("moe"))
    right.sync()
    wrong.sync_with_spoiled_origins()
    return {"right": (right.is_sent(), right.seen.off), "wrong": (wrong.is_sent(), wrong.seen.off)}


def trace_anew():
    """Other parameters, traced by somebody else before the exchange has looked at them."""
    rank = ExchangeRank(sharded("dense"))
    rank.sync()
    rank.move(2, 1)
    assert rank.context.source_map.trace(rank.export) is None
    rank.sync()
    rank.sync()
    return rank.seen.routes


def _each(change):
    return lambda weights: ((name, change(tensor)) for name, tensor in weights)


def _reduced(tensor):
    dist.all_reduce(tensor)
    return tensor


def _swapped_on_rank_1(weights):
    for name, tensor in weights:
        swaps = {"gate_proj": "up_proj", "up_proj": "gate_proj"} if dist.get_rank() == 1 else {}
        for old, new in swaps.items():
            if f".{old}." in name:
                name = name.replace(old, new)
                break
        yield name, tensor


def _broken_on_rank_3(weights):
    for i, pair in enumerate(weights):
        if i == 4 and dist.get_rank() == 3:
            raise RuntimeError("the export of rank 3 broke")
        yield pair


EXPORTS = {
    "casts": _each(lambda tensor: tensor.to(torch.float16)),
    "adds": _each(lambda tensor: tensor + 1),
    "adds in place": _each(lambda tensor: tensor.add_(1)),
    "reverses rows": _each(lambda tensor: tensor.flip(0)),
    "reads values": _each(lambda tensor: tensor[: int(tensor.sum())]),
    "communicates": _each(_reduced),
    "brings its own": lambda weights: [("extra", torch.ones(2)), *weights],
    "repeats a shape": _each(lambda tensor: torch.empty_like(tensor)),
    "breaks on rank 3": _broken_on_rank_3,
}


def refused_exports():
    """Each export that cannot be traced: the reason on this rank, and what the next sync is."""
    model, reasons = sharded("moe"), {}
    for name, change in {**EXPORTS, "differs on rank 1": _swapped_on_rank_1}.items():
        rank = ExchangeRank(model, change)
        rank.export_in_full()
        rank.sync()
        reasons[name] = rank.seen.off, rank.seen.routes
    return reasons


def unsupported_parameters():
    """Parameters whose bytes are not in rows on one line of ranks; by what is wrong with them."""
    from torch.distributed.tensor import Shard

    from verl_sglang_sync.sources.export_trace import NotTraceable, trace_export

    world_size = dist.get_world_size()
    line = init_device_mesh("cpu", (world_size,))
    square = init_device_mesh("cpu", (2, world_size // 2))
    weight = torch.arange(48.0).view(8, 6)
    cases = {
        "columns": distribute_tensor(weight, line, [Shard(1)]),
        "two dimensions": distribute_tensor(weight, square, [Replicate(), Shard(0)]),
        "transposed": distribute_tensor(weight, line, [Replicate()]).t(),
        "replicated": distribute_tensor(weight, line, [Replicate()]),
        "plain": weight,
        "on another device": weight.to("meta"),
    }
    reasons = {}
    for name, tensor in cases.items():
        state = {"w": tensor}

        def export(state=state):
            for key, value in state.items():
                yield key, value.full_tensor() if isinstance(value, DTensor) else value

        try:
            trace_export(
                export(), sources=lambda state=state: state, world_size=world_size, device=CPU
            )
            reasons[name] = None
        except NotTraceable as reason:
            reasons[name] = str(reason)
    return reasons


def views_and_copies():
    """Slices, transposes and copies of copies: each is found, or refused."""
    from verl_sglang_sync.sources.export_trace import NotTraceable, trace_export

    world_size = dist.get_world_size()
    full = torch.arange(6 * 4 * 8, dtype=torch.float32).view(6, 4, 8)
    weight = distribute_tensor(full, init_device_mesh("cpu", (world_size,)))
    steps = {
        "slice": lambda t: t[1:5, 2],
        "chunk": lambda t: t.chunk(2, dim=1)[1],
        "copied chunk": lambda t: t.chunk(2, dim=2)[1].contiguous(),
        "transposed": lambda t: t.transpose(0, 2),
        "transposed copy": lambda t: t.transpose(0, 2).contiguous(),
        "kept order": lambda t: t.transpose(0, 2).clone(),
        "view of a copy": lambda t: t[:, 1:3].contiguous()[2],
        "flat view of a copy": lambda t: t[:, :, :4].contiguous().view(-1)[16:80],
        "ragged view of a copy": lambda t: t[:, :, :4].contiguous().view(-1)[3:17],
        "other dtype": lambda t: t[1].view(torch.int32),
        "expanded": lambda t: t[:, :1, :1].expand(6, 2, 8),
        "same device": lambda t: t.to("cpu", copy=True)[3],
    }
    found = {}
    for name, step in steps.items():
        try:
            traced = trace_export(
                ((n, step(w.full_tensor())) for n, w in [("w", weight)]),
                sources=lambda: {"w": weight},
                world_size=world_size,
                device=CPU,
            )
        except NotTraceable as reason:
            found[name] = str(reason)
            continue
        source = traced.tensors["w"].origin.bytes
        expected = step(full).contiguous()
        flat = full.view(torch.uint8).view(-1)
        picked = flat.as_strided(
            [count for count, _ in source.dims],
            [stride for _, stride in source.dims],
            source.offset,
        )
        same = torch.equal(picked.reshape(-1), expected.view(torch.uint8).view(-1))
        found[name] = "found" if same else "wrong"
    return found


@contextmanager
def spoiled_origins():
    """What is traced says of one tensor that it is another."""
    from verl_sglang_sync.sources import source_map

    trace = source_map.trace_export

    def spoiled(*args, **kwargs):
        traced = trace(*args, **kwargs)
        name = "model.layers.1.mlp.experts.2.up_proj.weight"
        other = traced.tensors[name.replace("up_proj", "gate_proj")]
        return dataclasses.replace(traced, tensors={**traced.tensors, name: other})

    with mock.patch.object(source_map, "trace_export", spoiled):
        yield
