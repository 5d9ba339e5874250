"""Detection of tensor data that reaches Python without an operator. A plan could not replay this.

`tolist`, `numpy`, `repr`, DLPack, storages and raw pointers bypass the dispatcher. Each use is
reported, and the plan is refused if the data belongs to a sync. `item` is different, because
SGLang's default loader writes scalars as `param.fill_(loaded.item())`. While tracing, `item`
returns a `DeferredScalar`. A `fill_` with this scalar becomes a copy. Any other use of the scalar
reports a host read and yields the number. If the scalar outlives the load, for example in an
attribute, a later use of it would stay unseen.

A read in C++ stays unseen if no function of torch's Python API begins it: a read of an extension,
or of TorchScript.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch.overrides import TorchFunctionMode

from sglang_loader.common.op_traits import leaves, map_leaves

_POINTERS = ("data_ptr", "const_data_ptr", "mutable_data_ptr")
# Pickling a tensor, copying it deeply and sharing it go through its storage.
_STORAGES = ("untyped_storage", "storage")
_PYTHON_LOOPS = ("apply_", "map_", "map2_")
_DLPACK_FUNCTIONS = ("_to_dlpack", "_to_dlpack_versioned")
_INTERFACE = "__cuda_array_interface__"

MEMORY_GIVEN_AWAY = frozenset(
    (
        *("numpy", "__array__", "__dlpack__", _INTERFACE),
        *(*_POINTERS, *_STORAGES, *_PYTHON_LOOPS, *_DLPACK_FUNCTIONS),
    )
)
"""Methods through which the memory can also be written unseen."""

_READS = (*MEMORY_GIVEN_AWAY, "tolist", "__repr__", "__format__", "item")

# A property is watched by its getter.
_WATCHED = {
    getattr(method, "__get__", method) if name == _INTERFACE else method: name
    for name in _READS
    if (method := getattr(torch.Tensor, name, None)) is not None
}

# With a tensor of indices the split reads them on the host, and has no operator of its own.
_SPLITS = (torch.tensor_split, torch.Tensor.tensor_split)
_SPLIT_INDICES = "tensor_indices_or_sections"

# Operators whose result is a number or a truth. A trace knows them by their tags.
_DECISIONS = frozenset(
    (
        *(torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__),
        *(torch.Tensor.__index__, torch.Tensor.__contains__, torch.Tensor.equal, torch.equal),
        *(torch.Tensor.allclose, torch.allclose),
    )
)

Report = Callable[[str, torch.Tensor], None]
"""A callback that receives the name of the method and the tensor whose data Python read."""


class HostReadWatch(TorchFunctionMode):
    """A torch function mode that reports host reads of the tracing thread during a trace."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report
        self._scalars: list[ref[DeferredScalar]] = []

    @property
    def has_live_scalars(self) -> bool:
        """True if a Python object still holds a `DeferredScalar` of this trace."""
        return any(scalar() is not None for scalar in self._scalars)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # A scalar of this trace as an argument: `fill_` becomes a copy, all else reads the number.
        if types and any(issubclass(t, DeferredScalar) for t in types):
            return DeferredScalar.__torch_function__(func, types, args, kwargs)
        name = _WATCHED.get(func)
        if name == "item" and args[0].numel() == 1 and not args[0].is_complex():
            scalar = DeferredScalar(args[0], self._report)
            self._scalars.append(ref(scalar))
            return scalar
        if name is not None and name != "item":
            self._report_all(name, (args, kwargs))
        elif func in _SPLITS:
            self._report_all("tensor_split", (args[1:], kwargs.get(_SPLIT_INDICES)))
        return func(*args, **kwargs)

    def _report_all(self, name: str, arguments: Any) -> None:
        for value in leaves(arguments):
            if isinstance(value, torch.Tensor):
                self._report(name, value)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the body, also the functions of DLPack. One thread at a time may do this."""
        tracing_thread = threading.get_ident()
        # No mode sees the functions of DLPack, so they are wrapped. A module that is imported in
        # the body may keep a wrapper for ever, but no memory through it.
        reports = [self._report]

        def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def export(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                if reports and threading.get_ident() == tracing_thread:
                    with torch._C.DisableTorchFunction():
                        reports[0](name, tensor)
                return function(tensor, *args, **kwargs)

            return export

        places = [(torch._C, name, name) for name in _DLPACK_FUNCTIONS]
        places += [(module, "to_dlpack", "_to_dlpack") for module in (torch, torch.utils.dlpack)]
        originals = [getattr(module, attribute) for module, attribute, _ in places]
        # Not by `unittest.mock`: a cycle there would keep the memory of this trace alive.
        for (module, attribute, name), function in zip(places, originals, strict=True):
            setattr(module, attribute, watched(name, function))
        try:
            with self:
                yield
        finally:
            reports.clear()
            for (module, attribute, _), function in zip(places, originals, strict=True):
                setattr(module, attribute, function)


class LoadWatch(HostReadWatch):
    """A watch of a load that no trace records. It also reports what operators read for Python."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _DECISIONS:
            self._report_all(func.__name__, (args, kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


class DeferredScalar:
    """The result of `item` during a trace: a number that is read when it is first used."""

    def __init__(self, tensor: torch.Tensor, report: Report) -> None:
        self.tensor = tensor
        self._report = report

    def number(self) -> Any:
        """Report a host read, and return the value."""
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
    def operation(self: DeferredScalar, *operands: Any) -> Any:
        own = self.number()
        result = getattr(own, name)(*(_number(operand) for operand in operands))
        # Python would try a float operand's reflected method, which a direct call does not.
        if result is NotImplemented and operands and isinstance(own, int):
            return getattr(float(own), name)(*(_number(operand) for operand in operands))
        return result

    operation.__name__ = name
    return operation


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow divmod neg "
    "pos abs eq ne lt le gt ge bool int float index round trunc floor ceil hash str repr format"
)
for _name in _OPERATORS.split():
    setattr(DeferredScalar, f"__{_name}__", _forward(f"__{_name}__"))
