"""Errors of a model's `load_weights` that name the tensor at which they were raised.

What SGLang raises itself is often an assertion about two shapes, of one tensor of several thousand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch

from sglang_loader.load_plan.plan import LoadWeights

NamedTensor = tuple[str, torch.Tensor]


def naming_tensors(model: Any) -> LoadWeights:
    """The model's `load_weights`; an error of it gets a note with the tensor's name and
    shape, or with those of all tensors that are suspect."""

    def load_weights(named_tensors: Iterable[NamedTensor]) -> None:
        given: list[NamedTensor] = []

        def giving() -> Iterator[NamedTensor]:
            for pair in named_tensors:
                given.append(pair)
                yield pair

        try:
            model.load_weights(giving())
        except Exception as error:
            suspects = given[-1:]
            with suppress(Exception):  # not every tensor has an address; what is raised must be it
                suspects = _in_hand(error, given) or suspects
            named = " or ".join(f"{name} {list(tensor.shape)}" for name, tensor in suspects)
            error.add_note(f"load_weights failed at {named or 'no tensor'}: {error!r}")
            raise

    return load_weights


def _in_hand(error: Exception, given: list[NamedTensor]) -> list[NamedTensor]:
    """Those of the tensors that the innermost function has in hand which has any: a loader may have
    taken all of them before it looks at the first.
    """
    for local_variables in reversed(list(_frames(error.__traceback__))[2:]):
        addresses = [t.data_ptr() for t in local_variables if isinstance(t, torch.Tensor)]
        found = [pair for pair in given if any(_holds(pair[1], at) for at in addresses)]
        if found:
            return found
    return []


def _holds(tensor: torch.Tensor, address: int) -> bool:
    return 0 <= address - tensor.data_ptr() < tensor.numel() * tensor.element_size()


def _frames(trace: TracebackType | None) -> Iterator[list[Any]]:
    while trace is not None:
        yield list(trace.tb_frame.f_locals.values())
        trace = trace.tb_next
