"""The trainer's export: a generator of `(name, full tensor)`, and what can be wrong with it.

verl hands the rollout one generator. But the call that made it can be made again, and a `Reexport`
makes it each time that it is iterated over, to repeat a sync, or to trace it:

    for name, tensor in export: ...        # the weights; collective over all ranks
    for name, tensor in export: ...        # again, or traced without data

Whether something can be started again is Python's own question: an iterator cannot, an iterable
that is none (a list, a `Reexport`) can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, TypeAlias

import torch

from sglang_loader.common.digest import tensor_digest

NamedTensor = tuple[str, torch.Tensor]

AdapterExport: TypeAlias = Callable[[], tuple[Iterable[NamedTensor], dict[str, Any]]]
"""Makes the export of a LoRA adapter, and its configuration, as PEFT has it."""

EMBEDDING = "embed_tokens.weight"
"""How the name of an embedding ends that mbridge may export twice."""


class TensorsDiffer(ValueError):
    """Two tensors of one name have different values."""


class Export:
    """The trainer's generator, with its failures told apart from the packer's.

    A tied embedding comes once: Megatron's last pipeline stage has a copy of it for the output
    layer, and mbridge exports that under the embedding's name again. Whatever else comes twice is
    an error.
    """

    def __init__(self, weights: Iterable[NamedTensor]) -> None:
        self._source = chain.from_iterable((weights,))  # begun where its failure is expected
        self._embeddings: dict[str, tuple[torch.Size, torch.Tensor]] = {}
        self.failed = False
        self._stream = self._distinct()

    # A generator: 18,867 tensors a sync cost Python next to nothing there.
    def __iter__(self) -> Iterator[NamedTensor]:
        return self._stream

    def _distinct(self) -> Iterator[NamedTensor]:
        is_ours = False  # whose failure it is: the consumer's, or that of the export
        try:
            for item in self._source:
                is_ours = True
                if not (item[0].endswith(EMBEDDING) and self._is_copy(*item)):
                    yield item
                del item  # the next one is made when this one may be gone
                is_ours = False
        except GeneratorExit:
            raise
        except BaseException:
            self.failed = not is_ours
            raise

    def _is_copy(self, name: str, tensor: torch.Tensor) -> bool:
        """True if the embedding came before; raises if another one did."""
        digest = tensor_digest(tensor)
        shape, known = self._embeddings.setdefault(name, (tensor.shape, digest))
        if known is digest or shape != tensor.shape:  # the planner refuses the latter
            return False
        if not torch.equal(known, digest):
            raise TensorsDiffer(
                f"tensor {name!r} was exported twice, with different values: which of them is the "
                "embedding cannot be told"
            )
        return True

    def drain(self) -> None:
        """Run the export to its end: its collectives need every rank, unless it is what broke."""
        if self.failed:
            return
        with suppress(Exception):
            for _ in self._source:
                pass


class Reexport(Iterable[NamedTensor]):
    """An export that is made anew for every iteration.

    Args:
        again: makes one; collective over the trainer's ranks.
        first: one that was made already, for the first iteration.
        sources: the tensors that it reads, by name, as they are now; only where making it changes
            nothing, and what it yields does not depend on values.
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
    """`step(weights)`, repeatable if `weights` is; without its sources if the step computes."""
    if not is_repeatable(weights):
        return step(weights)
    sources = None if computes else getattr(weights, "sources", None)
    adapter = getattr(weights, "adapter", None)
    return Reexport(lambda: step(weights), sources=sources, adapter=adapter)
