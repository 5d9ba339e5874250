"""Puts a model back as it was: every attribute, container and parameter, by identity.

Bytes are not its business: whoever uses it sees to it that none is written. What a `load_weights`
binds (a derived tensor, `param.data`, a flag) is unbound again.

    state = ModelState(model)
    ...
    state.restore()
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sglang_loader.load_plan.destinations import MAX_CONTAINER_DEPTH


class ModelState:
    """What a model's modules hold, at the moment this is made.

    Args:
        model: its modules, their attributes, and the lists, dicts and sets in these.
    """

    def __init__(self, model: nn.Module) -> None:
        self._contents: list[tuple[Any, Any]] = []
        self._data: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._seen: set[int] = set()
        for module in model.modules():
            self._keep(vars(module), MAX_CONTAINER_DEPTH + 1)

    def restore(self) -> None:
        """Undo every binding made since."""
        for container, contents in self._contents:
            if _holds_the_same(container, contents):
                continue
            if isinstance(container, list):
                container[:] = contents
            else:
                container.clear()
                container.update(contents)
        for tensor, data in self._data:
            if not _is_same_place(tensor, data):
                tensor.data = data

    def _keep(self, value: Any, depth: int) -> None:
        if id(value) in self._seen:
            return
        if isinstance(value, torch.Tensor):
            self._seen.add(id(value))
            self._data.append((value, value.data))
            self._keep(vars(value), depth)
        elif isinstance(value, dict | list | set) and depth:
            self._seen.add(id(value))
            self._contents.append((value, value.copy()))
            for item in value.values() if isinstance(value, dict) else value:
                self._keep(item, depth - 1)
        elif isinstance(value, tuple) and depth:
            for item in value:
                self._keep(item, depth - 1)


def _holds_the_same(container: Any, contents: Any) -> bool:
    """By identity, so that nothing is compared by value; a set's members are values anyway."""
    if isinstance(container, set):
        return bool(container == contents)
    if len(container) != len(contents):
        return False
    if isinstance(container, list):
        return all(a is b for a, b in zip(container, contents, strict=True))
    pairs = zip(container.items(), contents.items(), strict=True)
    return all(a[0] is b[0] and a[1] is b[1] for a, b in pairs)


def _is_same_place(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    return (
        tensor.data_ptr() == data.data_ptr()
        and tensor.shape == data.shape
        and tensor.stride() == data.stride()
        and tensor.dtype == data.dtype
    )
