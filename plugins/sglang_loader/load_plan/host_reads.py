"""Detects tensor data that reaches Python without an operator, which a plan could not replay.

`tolist`, `numpy`, DLPack and raw pointers bypass the dispatcher: each is reported, and the plan is
refused if the data belongs to a sync. `item` is different: SGLang's default loader writes scalars
as `param.fill_(loaded.item())`. While tracing, `item` returns a `DeferredScalar`: `fill_` with it
becomes a copy, any other use of it reports a host read and yields the number. One that outlives
the load, in an attribute for example, would be used later without being seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch.overrides import TorchFunctionMode

from sglang_loader.common.op_traits import map_leaves

MEMORY_GIVEN_AWAY = frozenset(
    {"numpy", "__array__", "__dlpack__", "data_ptr", "const_data_ptr", "mutable_data_ptr"}
)
"""Methods through which the memory can also be written without being seen."""

UNDISPATCHED_READS = MEMORY_GIVEN_AWAY | {"tolist"}

_WATCHED = frozenset(getattr(torch.Tensor, name, None) for name in (*UNDISPATCHED_READS, "item"))

Report = Callable[[str, torch.Tensor], None]
"""Called with the name of the method and the tensor whose data Python has seen."""


class HostReadWatch(TorchFunctionMode):
    """Active during a trace, in the tracing thread."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report
        self._scalars: list[ref[DeferredScalar]] = []

    @property
    def has_live_scalars(self) -> bool:
        """True if somebody still holds a `DeferredScalar` of this trace."""
        return any(scalar() is not None for scalar in self._scalars)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if types and any(issubclass(t, DeferredScalar) for t in types):
            return DeferredScalar.__torch_function__(func, types, args, kwargs)
        if func in _WATCHED and args and isinstance(args[0], torch.Tensor):
            tensor, name = args[0], func.__name__
            if name == "item" and tensor.numel() == 1 and not tensor.is_complex():
                scalar = DeferredScalar(tensor, self._report)
                self._scalars.append(ref(scalar))
                return scalar
            if name in UNDISPATCHED_READS:
                self._report(name, tensor)
        return func(*args, **kwargs)


class DeferredScalar:
    """What `item` returns during a trace: a number that is read when it is first used."""

    def __init__(self, tensor: torch.Tensor, report: Report) -> None:
        self.tensor = tensor
        self._report = report

    def number(self) -> Any:
        """The value; reports a host read."""
        self._report("item", self.tensor)
        with torch._C.DisableTorchFunction():
            return self.tensor.item()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        is_fill = getattr(func, "__name__", "") == "fill_" and len(args) == 2
        if is_fill and isinstance(args[1], cls):
            return args[0].copy_(args[1].tensor.reshape(()))
        args, kwargs = map_leaves(_number, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.number(), name)


def _number(value: Any) -> Any:
    return value.number() if isinstance(value, DeferredScalar) else value


def _forward(name: str) -> Callable[..., Any]:
    def operation(self: DeferredScalar, *others: Any) -> Any:
        own = self.number()
        result = getattr(own, name)(*(_number(other) for other in others))
        if result is NotImplemented and others and isinstance(own, int):
            return getattr(float(own), name)(*(_number(other) for other in others))
        return result

    operation.__name__ = name
    return operation


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow divmod neg "
    "pos abs eq ne lt le gt ge bool int float index round trunc floor ceil hash str repr format"
)
for _name in _OPERATORS.split():
    setattr(DeferredScalar, f"__{_name}__", _forward(f"__{_name}__"))
