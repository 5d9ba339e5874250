"""One export out of what each rank has traced of it.

FSDP2's ranks trace the same. A Megatron rank knows its own pipeline stage, and names the ranks that
it would gather from: the shards of its data parallel replica. What several ranks say of a tensor
must be the same but for the ranks, and these hold replicas:

    rank 0: "q_proj" is these bytes of "qkv", whose shards ranks 0 and 1 have
    rank 2: "q_proj" is these bytes of "qkv", whose shards ranks 2 and 3 have
    merged:                                 whose shards ranks (0, 2) and (1, 3) have
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from verl_sglang_sync.sources.export_trace import (
    NotTraceable,
    TracedExport,
    TracedParameter,
    TracedTensor,
)
from verl_sglang_sync.sources.owners import Origin, Owners


def merged_traces(traces: Sequence[TracedExport]) -> TracedExport:
    """The whole export, equal on all ranks; pure.

    Args:
        traces: by rank.

    Raises:
        NotTraceable: two ranks traced a tensor as different bytes.
    """
    claims: dict[str, list[tuple[TracedTensor, TracedParameter]]] = {}
    for traced in traces:
        for name, tensor in traced.tensors.items():
            claim = tensor, traced.parameters[tensor.origin.parameter]
            claims.setdefault(name, []).append(claim)
    numbers: dict[TracedParameter, int] = {}
    tensors: dict[str, TracedTensor] = {}
    for name, claimed in claims.items():
        if len({_without_ranks(tensor, parameter) for tensor, parameter in claimed}) > 1:
            raise NotTraceable(f"the ranks traced different exports: {name} differs")
        tensor, parameter = claimed[0]
        merged = replace(parameter, owners=_merged([each.owners for _, each in claimed]))
        number = numbers.setdefault(merged, len(numbers))
        tensors[name] = replace(tensor, origin=Origin(number, tensor.origin.bytes))
    return TracedExport(tuple(numbers), tensors)


def _without_ranks(tensor: TracedTensor, parameter: TracedParameter) -> tuple[object, ...]:
    owners = parameter.owners
    return (
        *(tensor.dtype, tensor.shape, tensor.origin.bytes),
        *(parameter.source, owners.starts, owners.nbytes),
    )


def _merged(replicas: Sequence[Owners]) -> Owners:
    """Of the same shards, held by all who are named."""
    by_shard = zip(*(owners.holders for owners in replicas), strict=True)
    holders = tuple(tuple(sorted({r for ranks in named for r in ranks})) for named in by_shard)
    return replace(replicas[0], holders=holders)
