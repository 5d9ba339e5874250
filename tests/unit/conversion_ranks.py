"""What each rank does in the tests of traced conversions: TP 2, and DP or EP 2, on gloo."""

import functools

import torch
import torch.distributed as dist

from support.assembled import misplaced
from unit.trainer_ranks import trainer_group

CPU = torch.device("cpu")


@functools.cache
def group_of(*rows):
    """This rank's group of ranks `rows`, which part the world."""
    groups = [dist.new_group(list(row)) for row in rows]
    return next(g for g, row in zip(groups, rows, strict=True) if dist.get_rank() in row)


def gathered(tensor, group):
    parts = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def tensor_parallel():
    return group_of((0, 1), (2, 3))


def expert_parallel():
    return group_of((0, 2), (1, 3))


def fused(tensor):
    """Column-parallel rows, of which every third belongs to each of three tensors."""
    whole = torch.cat(gathered(tensor, tensor_parallel())).view(-1, 3, tensor.shape[1])
    for i, name in enumerate("qkv"):
        yield f"{name}.weight", whole[:, i].contiguous()


def row_parallel(tensor):
    """Columns put side by side; some of the rows are padding."""
    yield "o.weight", torch.cat(gathered(tensor, tensor_parallel()), dim=1)[:-1]


def experts(tensor):
    """Every expert parallel rank has another one, cut over tensor parallel ranks."""
    whole = torch.cat(gathered(tensor, tensor_parallel()))
    for i, expert in enumerate(gathered(whole, expert_parallel())):
        yield f"experts.{i}.weight", expert.t()


def replicated(tensor):
    yield "norm.weight", tensor


def from_the_second(tensor):
    """Nothing says that the ranks of a group have the same: the root's is exported."""
    tensor = tensor.clone()
    row = (0, 1) if dist.get_rank() < 2 else (2, 3)
    dist.broadcast(tensor, src=row[1], group=tensor_parallel())
    yield "bias", tensor


GOOD = (fused, row_parallel, experts, replicated, from_the_second)


def plus_one(tensor):
    yield "t", tensor + 1


def blend(tensor):
    first, second = gathered(tensor, tensor_parallel())
    yield "t", (first + second) // 2


def reduced(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor, group=tensor_parallel())
    yield "t", tensor


def as_float(tensor):
    yield "t", tensor.to(torch.float32)


def shuffled(tensor):
    yield "t", tensor.flatten()[torch.tensor([0, 5, 1, 3, 2, 4])]


def by_value(tensor):
    yield f"t{int(tensor.flatten()[0]) % 3}", tensor


def an_object(tensor):
    said = [None, None]
    dist.all_gather_object(said, "rank", group=tensor_parallel())
    yield "t", tensor


REFUSED = {
    f.__name__: f for f in (plus_one, blend, reduced, as_float, shuffled, by_value, an_object)
}


def parameter(shape, copies):
    """Values of this rank's own; equal on `copies` of ranks that hold replicas."""
    generator = torch.Generator().manual_seed(copies)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def sources():
    """By conversion; shards differ by rank as those of a trainer do, replicas are equal."""
    rank, tp = dist.get_rank(), dist.get_rank() % 2
    return {
        "fused": parameter((6, 4), tp),
        "row_parallel": parameter((5, 6), tp),
        "experts": parameter((4, 6), rank),
        "replicated": parameter((7,), 9),
        "from_the_second": parameter((3,), tp),
    }


class State:
    """Sources that know how their export is traced."""

    def __init__(self, conversions):
        self.conversions = conversions

    def __call__(self):
        return sources()

    def trace(self, device):
        from verl_sglang_sync.sources.conversion_trace import Conversion, trace_conversions

        tensors = sources()
        given = [Conversion(f.__name__, tensors[f.__name__], f) for f in self.conversions]
        return trace_conversions(given, rank=dist.get_rank(), world_size=4, device=device)


def export_of(conversions):
    from verl_sglang_sync.sources.export import Reexport

    def export():
        return (pair for f in conversions for pair in f(sources()[f.__name__]))

    return Reexport(export, sources=State(conversions))


def trace_and_assemble():
    """Names of all tensors, of those that are not what the trace says, and who holds what."""
    from verl_sglang_sync.sources.source_map import SourceMap

    group, export = trainer_group(2)[0], export_of(GOOD)
    source_map = SourceMap(group, CPU)
    assert source_map.trace(export) is None
    traced = source_map.traced
    wrong = misplaced(export, source_map, group)
    holders = {
        name: traced.parameters[tensor.origin.parameter].owners.holders
        for name, tensor in traced.tensors.items()
    }
    return sorted(dict(export)), wrong, holders


def refused(name):
    """Why it is not traced."""
    from verl_sglang_sync.sources.conversion_trace import Conversion, trace_conversions
    from verl_sglang_sync.sources.export_trace import NotTraceable

    tensor_parallel()
    conversion = Conversion(name, torch.zeros(2, 3, dtype=torch.bfloat16), REFUSED[name])
    try:
        trace_conversions([conversion], rank=dist.get_rank(), world_size=4, device=CPU)
    except NotTraceable as error:
        return str(error)
    return None
