"""verl's exports, made so that they can be started again (`sources.export.Reexport`), and what they
read: FSDP2's the module's state, those of Megatron-Bridge a rank's own parameters.

The bridge converts task by task; a task has a parameter of this pipeline stage, or none. verl makes
the tasks once, at the first export.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from verl_sglang_sync.collective import own_rank, world_size
from verl_sglang_sync.sources.conversion_trace import Conversion, trace_conversions
from verl_sglang_sync.sources.export import NamedTensor, Reexport, is_repeatable, transformed
from verl_sglang_sync.sources.export_trace import TracedExport
from verl_sglang_sync.sources.known_sources import Sources, module_state

_METHOD = "get_per_tensor_param"


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
        again = functools.partial(_export_alone, method, engine, *args, **kwargs)
        # So verl asks in disaggregated mode. FSDP gathers all weights below an adapter as it makes
        # their export: that is left until somebody goes through it.
        is_lazy = not args and not kwargs and _adapted(engine)
        if is_lazy:
            kwargs = {"base_sync_done": True}
        weights, peft_config = method(engine, *args, **kwargs)
        if is_lazy and peft_config is not None:
            return Reexport(again, adapter=lambda: (weights, peft_config)), peft_config
        if is_repeatable(weights):
            return weights, peft_config
        adapter = None
        if peft_config is not None:
            adapter = functools.partial(method, engine, *args, **{**kwargs, "base_sync_done": True})
        export: Iterable[NamedTensor] = Reexport(again, weights, _sources_of(engine), adapter)
        if (peft_config is None and _adapted(engine)) or _empties_storages(engine):
            export = transformed(export, _copied)
        return export, peft_config

    return wrapper


def _export_alone(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterable[NamedTensor]:
    weights: Iterable[NamedTensor] = method(*args, **kwargs)[0]
    return weights


def _sources_of(engine: Any) -> Sources | None:
    """What an engine's export reads: FSDP2 without adapters exports its module's own state."""
    module = getattr(engine, "module", None)
    if not isinstance(module, FSDPModule) or _adapted(engine):
        return bridge_sources(engine)
    return module_state(module)  # type: ignore[arg-type]


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


def bridge_sources(engine: Any) -> BridgeSources | None:
    """The sources of an engine's export; None unless Megatron-Bridge alone makes it."""
    is_bridged = getattr(engine, "vanilla_bridge", True) is False
    adds_to_it = engine.peft_cls is not None or engine._qat_enabled if is_bridged else True
    if adds_to_it or getattr(engine.bridge, "export_weight_dtype", None) == "fp8":
        return None
    return BridgeSources(engine)


class BridgeSources:
    """A rank's parameters, by virtual pipeline stage and local name: the same on all its peers."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def empties_storages(self) -> bool:
        """True if offloaded parameters come back into the same storages."""
        return bool(self._engine.is_param_offload_enabled)

    def __call__(self) -> Mapping[str, torch.Tensor]:
        return {_source(task): task.param_weight for task in self._tasks()}

    def trace(self, device: torch.device) -> TracedExport:
        conversions = (
            Conversion(_source(task), _kind(task), task.param_weight, self._converter(task))
            for task in self._tasks()
        )
        return trace_conversions(
            conversions, rank=own_rank(), world_size=world_size(), device=device
        )

    def _tasks(self) -> list[Any]:
        tasks = self._engine._mbridge_export_tasks()
        return [task for task in tasks if task is not None and task.param_weight is not None]

    def _converter(self, task: Any) -> Callable[[torch.Tensor], Iterable[NamedTensor]]:
        def convert(tensor: torch.Tensor) -> Iterable[NamedTensor]:
            given = dataclasses.replace(task, param_weight=tensor)
            exported: Iterable[NamedTensor] = self._engine.bridge.export_hf_weights(
                self._engine.module,
                show_progress=False,
                conversion_tasks=[given],
                merge_adapter_weights=False,  # there are none
            )
            return exported

        return convert


def _source(task: Any) -> str:
    return f"{task.vp_stage}.{task.param_name}"


def _kind(task: Any) -> object:
    """Equal for tasks that the bridge converts by the same code."""
    name = re.sub(r"\d+", "#", task.param_name)
    return name, type(task.mapping), type(task.megatron_module), task.pp_rank
