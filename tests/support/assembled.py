"""Puts every exported tensor together out of the ranks' shards, as a trace says that they lie."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


def misplaced(export: Iterable[tuple[str, torch.Tensor]], source_map: Any, ranks: Any) -> list[str]:
    """Names of the tensors that are not what the trace says of them; collective.

    Args:
        export: can be started again.
        source_map: has traced it.
        ranks: the trainer's ranks.
    """
    from verl_sglang_sync.sources.snapshot import memory_of

    traced, rank, full = source_map.traced, dist.get_rank(), dict(export)
    now = source_map.parameters(export, traced)
    own = {
        number: memory_of(now[parameter.source])
        for number, parameter in enumerate(traced.parameters)
        if parameter.owners.is_held_by(rank)
    }
    everyones, wrong = ranks.gather(own), []
    for name, tensor in full.items():
        found = traced.tensors[name]
        parts = []
        for origin in found.origins:
            number, owners = origin.parameter, traced.owners[origin.parameter]
            shards = range(len(owners.starts))
            memory = torch.cat([everyones[owners.owner_of(i, rank)][number] for i in shards])
            sizes, strides = zip(*origin.bytes.dims, strict=True)
            parts.append(memory.as_strided(sizes, strides, origin.bytes.offset).flatten())
        there = torch.cat(parts)
        is_alike = (found.dtype, found.shape) == (tensor.dtype, tuple(tensor.shape))
        here = tensor.contiguous().flatten().view(torch.uint8)
        if not is_alike or not torch.equal(there, here):
            wrong.append(name)
    return wrong
