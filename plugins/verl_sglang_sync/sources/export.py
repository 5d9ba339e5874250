"""The trainer's export: an iterable of `(name, full tensor)`.

    for name, tensor in export: ...        # the weights, collective over all ranks
    for name, tensor in export: ...        # the weights once more, or a trace without data

verl gives the rollout one generator, which can be iterated over once. A `Reexport` calls verl's
method anew for each iteration, so that a sync can be made again, and the export be traced.

An export in fp8 is computed from another one, which has the bytes of the parameters. The other one
is traced and compared: `unquantized`, `observed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from sglang_loader.common.digest import tensor_digest
from sglang_loader.common.quantization import Quantization

NamedTensor = tuple[str, torch.Tensor]

AdapterExport: TypeAlias = Callable[[], tuple[Iterable[NamedTensor], dict[str, Any]]]
"""Function that returns the export of a LoRA adapter and the adapter's configuration, with PEFT's
names."""

EMBEDDING = "embed_tokens.weight"
"""Suffix of an embedding's name. mbridge may export an embedding twice."""


class TensorsDiffer(ValueError):
    """Two tensors of the same name with different values."""


class Export:
    """The trainer's export for one sync. A tied embedding comes once, even if exported twice.

    Args:
        observe: gets each tensor as it is before it is quantised. See `observed`.
    """

    def __init__(
        self,
        weights: Iterable[NamedTensor],
        observe: Callable[[Iterable[NamedTensor]], object] | None = None,
    ) -> None:
        self._source = _generator_of(weights if observe is None else observed(weights, observe))
        self._embeddings: dict[str, tuple[torch.Size, torch.Tensor]] = {}
        # An export that names its sources has each tensor once. Skip the digests there: the first
        # one compiles a kernel while the engines wait for the first bucket.
        self._may_repeat = getattr(weights, "sources", None) is None
        self._tensors = self._distinct()

    # A generator is fast enough for 18,867 tensors in a sync.
    def __iter__(self) -> Iterator[NamedTensor]:
        return self._tensors

    def _distinct(self) -> Iterator[NamedTensor]:
        # Megatron's last pipeline stage has a copy of a tied embedding for the output layer, and
        # mbridge exports the copy under the embedding's name. `BucketFiller` refuses any other
        # repetition.
        for item in self._source:
            if not (self._may_repeat and item[0].endswith(EMBEDDING) and self._is_copy(*item)):
                yield item
            del item  # frees the memory for the next tensor

    def _is_copy(self, name: str, tensor: torch.Tensor) -> bool:
        """Return True if the same embedding came before.

        Raises:
            TensorsDiffer: an embedding of this name came before, with other values.
        """
        digest = tensor_digest(tensor)
        shape, first = self._embeddings.setdefault(name, (tensor.shape, digest))
        if first is digest or shape != tensor.shape:  # `BucketFiller` refuses another shape
            return False
        if not torch.equal(first, digest):
            raise TensorsDiffer(
                f"tensor {name!r} was exported twice, with different values: weight sync cannot "
                "decide which one is the embedding"
            )
        return True

    def drain(self) -> None:
        """Run the export to its end, and drop its tensors and errors."""
        # The export's collectives need every rank. Another error is reported already.
        with suppress(Exception):
            for _ in self._source:
                pass


def _generator_of(weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield from `weights`. After an error the generator is at its end."""
    # So `weights` is begun with the first tensor, and `drain` does not begin it again.
    yield from weights


@dataclass(frozen=True)
class Quantized:
    """The making of an export in fp8.

    Attributes:
        weights: the export before it is quantised, with the same names.
        quantize: quantises an export.
        quantization: the facts by which an engine repeats that.
    """

    weights: Iterable[NamedTensor]
    quantize: Callable[[Iterable[NamedTensor]], Iterable[NamedTensor]]
    quantization: Quantization


@dataclass(eq=False)
class Reexport(Iterable[NamedTensor]):
    """An export that is made anew for every iteration.

    Attributes:
        make: makes an export, collective over the trainer's ranks.
        first: the export for the first iteration, or None to make that one, too.
        sources: returns the tensors that the export reads, by name. None if making an export
            changes something, or if names or shapes depend on values.
        adapter: makes the export of a LoRA adapter on top of these weights. None if there is no
            adapter, or if it is merged into the weights.
        quantized: how the export was quantised, or None. `sources` are then those of the export
            before that.
        base: makes the export of the weights below an adapter, if this export is the adapter alone.
    """

    make: Callable[[], Iterable[NamedTensor]]
    first: Iterable[NamedTensor] | None = None
    sources: Callable[[], Mapping[str, torch.Tensor]] | None = None
    adapter: AdapterExport | None = None
    quantized: Quantized | None = None
    base: Callable[[], Iterable[NamedTensor]] | None = None

    def __iter__(self) -> Iterator[NamedTensor]:
        # verl's call has made one generator. The first iteration uses that generator up, also if it
        # is a trace.
        first, self.first = self.first, None
        return iter(self.make() if first is None else first)


def is_repeatable(weights: Iterable[NamedTensor]) -> bool:
    """Return True if `weights` can be iterated over more than once."""
    # An iterator cannot. Another iterable (a list, a `Reexport`) can.
    return not isinstance(weights, Iterator)


def transformed(
    weights: Iterable[NamedTensor],
    step: Callable[[Iterable[NamedTensor]], Iterable[NamedTensor]],
) -> Iterable[NamedTensor]:
    """Apply `step` to an export.

    The result can be repeated if `weights` can.
    """
    if not is_repeatable(weights):
        return step(weights)
    kept = {name: getattr(weights, name, None) for name in ("sources", "adapter", "base")}
    return Reexport(partial(step, weights), **kept)


def quantized_export(made: Quantized) -> Iterable[NamedTensor]:
    """Quantise an export. The result can be repeated if `made.weights` can."""
    export = transformed(made.weights, made.quantize)
    return replace(export, quantized=made) if isinstance(export, Reexport) else export


def _making_of(export: object) -> Quantized | None:
    made: Quantized | None = getattr(export, "quantized", None)
    return made


def unquantized(export: Iterable[NamedTensor]) -> Iterable[NamedTensor]:
    """Return the export before it is quantised. An export that is not quantised is returned."""
    made = _making_of(export)
    return export if made is None else made.weights


def quantization_of(export: Iterable[NamedTensor]) -> Quantization | None:
    """Return how an export is quantised, or None if it is not."""
    made = _making_of(export)
    return None if made is None else made.quantization


def observed(
    export: Iterable[NamedTensor], observe: Callable[[Iterable[NamedTensor]], object]
) -> Iterable[NamedTensor]:
    """Return an export for one iteration, of which `observe` gets each tensor, not quantised."""
    weights = _observed(unquantized(export), observe)
    made = _making_of(export)
    return weights if made is None else made.quantize(weights)


def _observed(
    export: Iterable[NamedTensor], observe: Callable[[Iterable[NamedTensor]], object]
) -> Iterator[NamedTensor]:
    for item in export:
        observe([item])
        yield item
        del item  # frees the memory for the next tensor
