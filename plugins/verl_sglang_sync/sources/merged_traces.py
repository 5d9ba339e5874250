"""One export out of what each rank has traced of it.

FSDP2's ranks trace the same. A Megatron rank knows its own pipeline stage, and names the ranks that
it would gather from: the shards of its data parallel replica. What several ranks say of a tensor
must be the same but for the ranks, and these hold replicas:

    rank 0: "q_proj" is these bytes of "qkv", whose shards ranks 0 and 1 have
    rank 2: "q_proj" is these bytes of "qkv", whose shards ranks 2 and 3 have
    merged:                                 whose shards ranks (0, 2) and (1, 3) have

Of ranks that trace the same but for the ranks that they name, one says all of it, and the others
name those ranks: of 512 that hold 1 T parameters, one for each pipeline stage.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from verl_sglang_sync.sources.export_trace import (
    NotTraceable,
    TracedExport,
    TracedParameter,
    TracedTensor,
)
from verl_sglang_sync.sources.owners import Origin


@dataclass(frozen=True)
class NamedRanks:
    """The ranks that a trace names, and what tells whether the rest is another rank's, too.

    Attributes:
        rest: checksum of all but the ranks.
        ranks: by parameter and shard, each an int32.
    """

    rest: int
    ranks: bytes

    @classmethod
    def of(cls, traced: TracedExport) -> NamedRanks:
        """What one rank traced."""
        owners = traced.owners
        ranks = [rank for each in owners for holders in each.holders for rank in holders]
        kinds = zip(traced.names, owners, strict=True)
        rest = [(name, o.starts, o.nbytes, [*map(len, o.holders)]) for name, o in kinds]
        checksum = zlib.crc32(repr((rest, [*traced.tensors.items()])).encode())
        return cls(checksum, np.array(ranks, dtype=np.int32).tobytes())


def merged_traces(
    named: Sequence[NamedRanks], traces: Sequence[TracedExport | None]
) -> TracedExport:
    """The whole export, equal on all ranks; pure.

    Args:
        named: by rank.
        traces: by rank; of those that are alike, one is enough.

    Raises:
        NotTraceable: two ranks traced a tensor as different bytes.
    """
    claims: dict[str, list[tuple[TracedTensor, TracedParameter]]] = {}
    for own, traced in zip(named, traces, strict=True):
        if traced is not None:
            alike = [each.ranks for each in named if each.rest == own.rest]
            parameters = _with_replicas(traced.parameters, alike)
            for name, tensor in traced.tensors.items():
                claim = tensor, parameters[tensor.origin.parameter]
                claims.setdefault(name, []).append(claim)
    numbers: dict[TracedParameter, int] = {}
    tensors: dict[str, TracedTensor] = {}
    for name, claimed in claims.items():
        tensor, parameter = claimed[0]
        if len(claimed) > 1:
            if len({_without_ranks(*claim) for claim in claimed}) > 1:
                raise NotTraceable(f"the ranks traced different exports: {name} differs")
            by_shard = zip(*(each.owners.holders for _, each in claimed), strict=True)
            parameter = _held_by(parameter, [sum(holders, ()) for holders in by_shard])
        number = numbers.setdefault(parameter, len(numbers))
        tensors[name] = replace(tensor, origin=Origin(number, tensor.origin.bytes))
    return TracedExport(tuple(numbers), tensors)


def _with_replicas(
    parameters: Sequence[TracedParameter], alike: Sequence[bytes]
) -> list[TracedParameter]:
    """Each shard held by all ranks that are named in its place; `alike`: by each of them."""
    by_rank = np.stack([np.frombuffer(ranks, dtype=np.int32) for ranks in alike])
    replicas, found = iter(by_rank.T.tolist()), []
    for parameter in parameters:
        shards = [
            [rank for _ in holders for rank in next(replicas)]
            for holders in parameter.owners.holders
        ]
        found.append(_held_by(parameter, shards))
    return found


def _held_by(parameter: TracedParameter, shards: Sequence[Iterable[int]]) -> TracedParameter:
    holders = tuple(tuple(sorted(set(ranks))) for ranks in shards)
    return replace(parameter, owners=replace(parameter.owners, holders=holders))


def _without_ranks(tensor: TracedTensor, parameter: TracedParameter) -> tuple[object, ...]:
    owners = parameter.owners
    return (
        *(tensor.dtype, tensor.shape, tensor.origin.bytes),
        *(parameter.source, owners.starts, owners.nbytes),
    )
