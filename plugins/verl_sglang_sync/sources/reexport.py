"""Exports that can be started again: a sync can be repeated, and traced.

verl hands the rollout one generator of `(name, full tensor)`. But the call that made it can be made
again, and a `Reexport` makes it each time that it is iterated over:

    for name, tensor in export: ...        # the weights; collective over all ranks
    for name, tensor in export: ...        # again, or traced without data

Whether something can be started again is Python's own question: an iterator cannot, an iterable
that is none (a list, a `Reexport`) can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from verl_sglang_sync.sources.export import NamedTensor

AdapterExport: TypeAlias = Callable[[], tuple[Iterable[NamedTensor], dict[str, Any]]]
"""Makes the export of a LoRA adapter, and its configuration, as PEFT has it."""


class Reexport(Iterable[NamedTensor]):
    """An export that is made anew for every iteration.

    Args:
        again: makes one; collective over the trainer's ranks.
        first: one that was made already, for the first iteration.
        sources: the tensors that it reads, by name, as they are now; only where making it changes
            nothing, and what it yields does not depend on values. None: not known.
        adapter: that belongs to these weights; None: there is none, or it is merged into them.
    """

    def __init__(
        self,
        again: Callable[[], Iterable[NamedTensor]],
        first: Iterable[NamedTensor] | None = None,
        sources: Callable[[], Mapping[str, torch.Tensor]] | None = None,
        adapter: AdapterExport | None = None,
    ) -> None:
        self._again = again
        self._first = first
        self.sources = sources
        self.adapter = adapter

    def __iter__(self) -> Iterator[NamedTensor]:
        first, self._first = self._first, None
        return iter(self._again() if first is None else first)


def is_repeatable(weights: Iterable[NamedTensor]) -> bool:
    """True if `weights` can be iterated over more than once."""
    return not isinstance(weights, Iterator)


def transformed(
    weights: Iterable[NamedTensor],
    step: Callable[[Iterable[NamedTensor]], Iterable[NamedTensor]],
    *,
    computes: bool = False,
) -> Iterable[NamedTensor]:
    """`step(weights)`, repeatable if `weights` is.

    Args:
        step: takes an iterable to a generator.
        computes: `step` makes other values; the sources do not hold what is exported then.
    """
    if not is_repeatable(weights):
        return step(weights)
    sources = None if computes else getattr(weights, "sources", None)
    adapter = getattr(weights, "adapter", None)
    return Reexport(lambda: step(weights), sources=sources, adapter=adapter)
