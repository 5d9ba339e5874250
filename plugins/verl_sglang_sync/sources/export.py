"""The trainer's export: a generator of `(name, full tensor)`, and what can be wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

import torch

from sglang_loader.common.digest import tensor_digest

NamedTensor = tuple[str, torch.Tensor]

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
        self._source = iter(weights)
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
        """True if the embedding came before.

        Raises:
            TensorsDiffer: another one did.
        """
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
        """Run the export to its end, dropping the tensors: its collectives need every rank, unless
        it is what broke.
        """
        if self.failed:
            return
        with suppress(Exception):
            for _ in self._source:
                pass
