"""Stands in for modules of GPU kernels where there is no GPU; `make setup` puts it on the path.

From 0.5.16 on SGLang imports names from its kernels on a CPU, too, and calls none of them; the real
modules want libcuda.
"""

from collections.abc import Callable
from typing import Any


def names_of(module: str) -> Callable[[str], Any]:
    """A module's `__getattr__`: any name is a kernel, which cannot be called."""

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def kernel(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"{module}.{name} needs a GPU")

        return kernel

    return __getattr__
