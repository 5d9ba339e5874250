"""The trainer's export: an iterable of `(name, full tensor)`.

verl gives the rollout one generator. A `Reexport` repeats the call that made it each time that it
is iterated over, to repeat a sync or to trace the export:

    for name, tensor in export: ...        # the weights; collective over all ranks
    for name, tensor in export: ...        # again, or traced without data

An iterator cannot be repeated; another iterable (a list, a `Reexport`) can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from sglang_loader.common.digest import tensor_digest

NamedTensor = tuple[str, torch.Tensor]

AdapterExport: TypeAlias = Callable[[], tuple[Iterable[NamedTensor], dict[str, Any]]]
"""Returns the export of a LoRA adapter, and its configuration, with PEFT's names."""

EMBEDDING = "embed_tokens.weight"
"""Suffix of the name of an embedding, which mbridge may export twice."""


class TensorsDiffer(ValueError):
    """Two tensors of one name have different values."""


class Export:
    """The trainer's export for one sync.

    A tied embedding is returned once: Megatron's last pipeline stage has a copy for the output
    layer, which mbridge exports under the embedding's name again. Other repetitions are errors.
    """

    def __init__(self, weights: Iterable[NamedTensor]) -> None:
        self._source = _generator_of(weights)
        self._embeddings: dict[str, tuple[torch.Size, torch.Tensor]] = {}
        # An export that names its sources has each tensor once, and the first digest compiles a
        # kernel while the engines wait for the first bucket.
        self._may_repeat = getattr(weights, "sources", None) is None
        self._stream = self._distinct()

    # A generator is fast enough for 18,867 tensors in a sync.
    def __iter__(self) -> Iterator[NamedTensor]:
        return self._stream

    def _distinct(self) -> Iterator[NamedTensor]:
        for item in self._source:
            if not (self._may_repeat and item[0].endswith(EMBEDDING) and self._is_copy(*item)):
                yield item
            del item  # so that its memory can be used for the next one

    def _is_copy(self, name: str, tensor: torch.Tensor) -> bool:
        """True if the same embedding came before; raises if it had other values."""
        digest = tensor_digest(tensor)
        shape, first = self._embeddings.setdefault(name, (tensor.shape, digest))
        if first is digest or shape != tensor.shape:  # the planner refuses the latter
            return False
        if not torch.equal(first, digest):
            raise TensorsDiffer(
                f"tensor {name!r} was exported twice, with different values: which of them is the "
                "embedding cannot be told"
            )
        return True

    def drain(self) -> None:
        """Run the export to its end: its collectives need every rank."""
        with suppress(Exception):
            for _ in self._source:
                pass


def _generator_of(weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """A generator: `weights` is begun with the first tensor, and once it has failed this is at its
    end, so that it can be drained.
    """
    yield from weights


@dataclass(eq=False)
class Reexport(Iterable[NamedTensor]):
    """An export that is made anew for every iteration.

    Attributes:
        again: makes an export; collective over the trainer's ranks.
        first: an export for the first iteration.
        sources: returns the tensors that it reads, by name; only given if making an export changes
            nothing, and names and shapes do not depend on values.
        adapter: of a LoRA adapter on top of these weights; None: there is none, or it is merged.
    """

    again: Callable[[], Iterable[NamedTensor]]
    first: Iterable[NamedTensor] | None = None
    sources: Callable[[], Mapping[str, torch.Tensor]] | None = None
    adapter: AdapterExport | None = None

    def __iter__(self) -> Iterator[NamedTensor]:
        first, self.first = self.first, None
        return iter(self.again() if first is None else first)


def is_repeatable(weights: Iterable[NamedTensor]) -> bool:
    """True if `weights` can be iterated over more than once."""
    return not isinstance(weights, Iterator)


def transformed(
    weights: Iterable[NamedTensor],
    step: Callable[[Iterable[NamedTensor]], Iterable[NamedTensor]],
    *,
    computes: bool = False,
) -> Iterable[NamedTensor]:
    """`step(weights)`, repeatable if `weights` is; without `sources` if the step computes."""
    if not is_repeatable(weights):
        return step(weights)
    sources = None if computes else getattr(weights, "sources", None)
    adapter = getattr(weights, "adapter", None)
    return Reexport(lambda: step(weights), sources=sources, adapter=adapter)
