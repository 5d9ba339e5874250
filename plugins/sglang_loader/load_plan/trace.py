"""What a trace is made of: operator calls whose tensors are places in memory.

The nouns between `tracer` (which records them) and `compiler` (which turns them into a plan).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

import torch

from sglang_loader.common.geometry import Region

_OVERWRITING_OPS = frozenset({"aten::copy_", "aten::fill_", "aten::zero_", "aten::_foreach_copy_"})
_COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "symm_mem"})


class Space(Enum):
    """Where a referenced tensor's memory lies."""

    BUCKET = "bucket"
    DESTINATION = "destination"
    SLOT = "slot"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as a place in memory: `index` numbers the storage within its space; `region.offset`
    is in bytes.
    """

    space: Space
    index: int
    dtype: torch.dtype
    region: Region


@dataclass(frozen=True, slots=True)
class OpTraits:
    """What an operator's schema tells: computed once per operator."""

    view: bool
    written: tuple[tuple[int, str], ...]
    random: bool
    reads_host: bool
    dynamic_shape: bool
    overwrites: bool
    problem: str | None
    name: str

    def written_in(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The arguments of one call that it writes."""
        return [args[i] if i < len(args) else kwargs.get(name) for i, name in self.written]


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded operator call. Tensors in `args` and `kwargs` are `TensorRef`s; `outputs`
    numbers the slots that its flattened outputs created (None for outputs that alias something
    known).
    """

    op: torch._ops.OpOverload
    traits: OpTraits
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[TensorRef, ...]
    writes: tuple[TensorRef, ...]
    outputs: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class HostRead:
    """Tensor data that reached Python: a plan cannot replay what was decided with it. `position` is
    a step number.
    """

    what: str
    tensor: TensorRef
    position: int


@dataclass
class Trace:
    """Everything one `load_weights` call did with tensors, in order."""

    steps: list[Step] = field(default_factory=list)
    host_reads: list[HostRead] = field(default_factory=list)
    constants: list[torch.Tensor] = field(default_factory=list)
    slot_nbytes: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@cache
def read_traits(op: torch._ops.OpOverload) -> OpTraits:
    """What the schema and the tags of `op` say about views, writes, randomness and host reads."""
    schema, tags = op._schema, op.tags
    written = tuple(
        (i, a.name)
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )
    returns = schema.returns
    aliases_all = bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )
    return OpTraits(
        view=aliases_all and not written,
        written=written,
        random=torch.Tag.nondeterministic_seeded in tags,
        reads_host=torch.Tag.data_dependent_output in tags,
        dynamic_shape=torch.Tag.dynamic_output_shape in tags,
        overwrites=schema.name in _OVERWRITING_OPS or "out" in str(schema.overload_name),
        problem=_problem(op),
        name=schema.name,
    )


def _problem(op: torch._ops.OpOverload) -> str | None:
    if op.namespace in _COLLECTIVE_NAMESPACES:
        return f"a collective ({op}) ran inside load_weights"
    if torch.Tag.inplace_view in op.tags:
        return f"{op} changed a tensor's geometry in place"
    return None
