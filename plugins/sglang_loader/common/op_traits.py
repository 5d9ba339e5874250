"""Properties of torch's operators, and the arguments of their calls.

The properties come from the operators' schemas: views, writes, randomness, host reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_OVERWRITING_OPS = frozenset({"aten::copy_", "aten::fill_", "aten::zero_", "aten::_foreach_copy_"})
COLLECTIVE_NAMESPACES = frozenset(
    ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "symm_mem")
)


@dataclass(frozen=True, slots=True)
class OpTraits:
    """The properties of one operator.

    Attributes:
        view: the results are views of the arguments.
        written: position and name of the arguments that are written.
        random: the results are random.
        reads_host: the host reads data of the arguments.
        dynamic_shape: the shape of the results depends on data.
        overwrites: the written bytes do not depend on their old content.
        problem: the reason why a load that calls the operator cannot be planned, or None.
        name: of the operator, without its overload.
    """

    view: bool
    written: tuple[tuple[int, str], ...]
    random: bool
    reads_host: bool
    dynamic_shape: bool
    overwrites: bool
    problem: str | None
    name: str

    def written_in(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the arguments that one call writes."""
        return [args[i] if i < len(args) else kwargs.get(name) for i, name in self.written]


_by_id: dict[int, tuple[torch._ops.OpOverload, OpTraits]] = {}


def read_traits(op: torch._ops.OpOverload) -> OpTraits:
    """Return the properties of `op`, computed once."""
    # By identity: the hash of an operator is a Python function, too slow for 100,000 calls.
    entry = _by_id.get(id(op))
    if entry is None:
        entry = _by_id[id(op)] = op, _traits_of(op)
    return entry[1]


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply `change` to the leaves of nested lists, tuples and dicts: an operator's arguments."""
    if isinstance(value, list):
        return [map_leaves(change, item) for item in value]
    if isinstance(value, tuple):
        return tuple([map_leaves(change, item) for item in value])
    if isinstance(value, dict):
        return {key: map_leaves(change, item) for key, item in value.items()}
    return change(value)


def leaves(value: Any) -> list[Any]:
    """List the leaves of nested lists, tuples and dicts: arguments or results of an operator."""
    if not isinstance(value, (list, tuple, dict)):
        return [value]
    flat: list[Any] = []
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (list, tuple, dict)):
            flat += leaves(item)
        else:
            flat.append(item)
    return flat


def _traits_of(op: torch._ops.OpOverload) -> OpTraits:
    schema, tags = op._schema, op.tags
    written = tuple(
        (i, a.name)
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )
    # A view aliases its argument and writes nothing.
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
        # An operator with `out=` overwrites its target, whatever its name.
        overwrites=schema.name in _OVERWRITING_OPS or "out" in str(schema.overload_name),
        problem=_problem(op),
        name=schema.name,
    )


def _problem(op: torch._ops.OpOverload) -> str | None:
    if op.namespace in COLLECTIVE_NAMESPACES:
        return f"a collective ({op}) ran inside load_weights"
    if torch.Tag.inplace_view in op.tags:
        return f"{op} changed a tensor's geometry in place"
    return None
