"""Exports that can be started again: a sync can be repeated, and traced.

verl hands the rollout one generator of `(name, full tensor)`. But the call that made it can be made
again. `make_exports_repeatable` has verl's training engines return a `Reexport`, which starts anew
each time it is iterated over:

    for name, tensor in export: ...        # the weights; collective over all ranks
    for name, tensor in export: ...        # again, or traced without data

Whether something can be started again is Python's own question: an iterator cannot, an iterable
that is none (a list, a `Reexport`) can.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from verl_sglang_sync.sources.module_tree import ModuleState

NamedTensor = tuple[str, torch.Tensor]

_METHOD = "get_per_tensor_param"


class Reexport(Iterable[NamedTensor]):
    """An export that is made anew for every iteration.

    Args:
        again: makes one; collective over the trainer's ranks.
        first: one that was made already, for the first iteration.
        sources: the tensors that it reads, by name, as they are now; only where making it changes
            nothing, and what it yields does not depend on values. None: not known.
    """

    def __init__(
        self,
        again: Callable[[], Iterable[NamedTensor]],
        first: Iterable[NamedTensor] | None = None,
        sources: Callable[[], Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        self._again = again
        self._first = first
        self.sources = sources

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
        weights: the export.
        step: takes an iterable to a generator.
        computes: `step` makes other values; the sources do not hold what is exported then.
    """
    if not is_repeatable(weights):
        return step(weights)
    sources = None if computes else getattr(weights, "sources", None)
    return Reexport(lambda: step(weights), sources=sources)


def make_exports_repeatable() -> None:
    """Have verl's training engines in this process return exports that can be started again.

    verl passes on what `get_per_tensor_param` returned, and nothing else of the engine; so the
    method itself is wrapped, in the classes that define one, once. Called only in processes where
    a preset is chosen.
    """
    from verl.workers.engine.base import BaseEngine

    for engine in _subclasses(BaseEngine):
        method = vars(engine).get(_METHOD)
        if method is not None and not hasattr(method, "__wrapped__"):
            setattr(engine, _METHOD, _repeatable(method))


def _repeatable(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `get_per_tensor_param`, which returns `(export, adapter's config or None)`."""

    @functools.wraps(method)
    def wrapper(engine: Any, *args: Any, **kwargs: Any) -> Any:
        weights, peft_config = method(engine, *args, **kwargs)
        if is_repeatable(weights):
            return weights, peft_config
        again = functools.partial(_export_alone, method, engine, *args, **kwargs)
        export: Iterable[NamedTensor] = Reexport(again, weights, _sources_of(engine))
        if (peft_config is None and _adapted(engine)) or _empties_storages(engine):
            export = transformed(export, _copied, computes=True)
        return export, peft_config

    return wrapper


def _export_alone(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterable[NamedTensor]:
    weights: Iterable[NamedTensor] = method(*args, **kwargs)[0]
    return weights


def _sources_of(engine: Any) -> ModuleState | None:
    """What an engine's export reads: FSDP2 without adapters exports its module's own state."""
    module = getattr(engine, "module", None)
    if not isinstance(module, FSDPModule) or _adapted(engine):
        return None
    return ModuleState(module)  # type: ignore[arg-type]


def _adapted(engine: Any) -> bool:
    """True if LoRA adapters are around an FSDP engine's module."""
    module = getattr(engine, "module", None)
    return hasattr(getattr(module, "_fsdp_wrapped_module", module), "peft_config")


def _empties_storages(engine: Any) -> bool:
    """True if parameters that are offloaded leave their storages behind, without memory.

    verl's Megatron engine: that a storage lives says nothing of its memory there, and memory that
    SGLang has mapped could not be given back.
    """
    module = getattr(engine, "module", None)
    return isinstance(module, list) and bool(getattr(engine, "is_param_offload_enabled", False))


def _copied(weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Copies of weights whose memory is not theirs for long.

    verl merges adapters into the module's own memory, and takes them out again when its export is
    through. On one rank, in the dtype that is exported, `full_tensor` is that memory and no copy.
    """
    for name, tensor in weights:
        yield name, tensor.clone()
        del tensor


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
