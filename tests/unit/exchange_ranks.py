"""What each rank does in the tests of the exchange of shards."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from unit.route_ranks import CPU, PIECE_BYTES, Rank, export_of, sharded, spoiled_origins
from unit.trainer_ranks import trainer_group
from verl_sglang_sync.report import SyncReport


class ExchangeRank(Rank):
    """A rank whose shards are exchanged."""

    def __init__(self, **options):
        super().__init__("exchange", **options)

    def sync_without_room(self, piece):
        """A sync in which the packing of one piece fails on rank 1."""
        broken = self.route._plan.all_to_all._sends[piece]
        fails = mock.Mock(side_effect=MemoryError("no room to pack"))
        with mock.patch.object(broken, "run", fails if dist.get_rank() == 1 else broken.run):
            self.sync()

    def trace_anew(self):
        """As another route might, before the exchange has looked at the parameters."""
        assert self.route._source_map.trace(self.export) is None


def prove_sending():
    """Whether a sync would be sent to engines elsewhere, and why not: with right and wrong origins.

    As far as what they would be sent is proven: they read what the colocated engines do.
    """
    from verl_sglang_sync.routes.route import RouteContext
    from verl_sglang_sync.routes.send.route import Send

    rank, found = ExchangeRank(kind="moe"), []
    rank.sync()
    readers = rank.transport._engines.readers
    for origins in (nullcontext(), spoiled_origins()):
        context = RouteContext(
            rank.group, CPU, rank.settings, lambda: readers, dist.get_world_size()
        )
        context.stream = rank.transport._stream
        route = Send(context, None)
        route._piece_nbytes = PIECE_BYTES
        with origins:
            route.learn(rank.export, [SimpleNamespace(may_read_in_place=True, num_eager=0)])
        report = SyncReport(mode="compiled", replica=0)
        found.append((route.choose(rank.export, report) is not None, route.off))
    return found


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
    """Each export that cannot be traced: why not."""
    from verl_sglang_sync.sources.export import transformed
    from verl_sglang_sync.sources.source_map import SourceMap

    export, group = export_of(sharded("moe")), trainer_group(2)[0]
    changes = {**EXPORTS, "differs on rank 1": _swapped_on_rank_1}
    return {
        name: SourceMap(group, CPU).trace(transformed(export, change))
        for name, change in changes.items()
    }


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
