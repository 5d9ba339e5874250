"""Wraps verl's exports so that they can be repeated (`sources.export.Reexport`), and finds the
parameters that they read: FSDP2's module state, FSDP1's flat parameters (`flat_parameters`), or for
Megatron-Bridge the rank's own.

The bridge has a list of conversion tasks, each for a parameter of this pipeline stage or for none.
verl makes the list in the first export.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from verl_sglang_sync.ranks import own_rank, world_size
from verl_sglang_sync.sources.conversion_trace import Conversion, trace_conversions
from verl_sglang_sync.sources.export import NamedTensor, Reexport, is_repeatable, transformed
from verl_sglang_sync.sources.export_trace import TracedExport
from verl_sglang_sync.sources.snapshot import Sources, module_state
from verl_sglang_sync.verl.flat_parameters import FlatParameters

_METHOD = "get_per_tensor_param"


def make_exports_repeatable() -> None:
    """Have verl's training engines in this process return exports that can be repeated.

    verl passes the result of `get_per_tensor_param` to the rollout, and nothing else of the engine,
    so that method is wrapped, once, in all classes that define it. Only called with a preset.
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
        repeat = functools.partial(_weights_of, method, engine, *args, **kwargs)
        if is_verls_fsdp(method) and (own := _without_a_call(engine, repeat)) is not None:
            return own, None
        # verl's call in disaggregated mode. With an adapter FSDP gathers all base weights in this
        # call: here that is deferred until they are iterated over.
        is_lazy = not args and not kwargs and _has_adapter(engine)
        if is_lazy:
            kwargs = {"base_sync_done": True}
        weights, peft_config = method(engine, *args, **kwargs)
        if peft_config is not None:
            _check_adapter(engine, peft_config)
        if is_lazy and peft_config is not None:
            return Reexport(repeat, adapter=lambda: (weights, peft_config)), peft_config
        if is_repeatable(weights):
            return weights, peft_config
        adapter = None
        if peft_config is not None:
            adapter = functools.partial(method, engine, *args, **{**kwargs, "base_sync_done": True})
        sources = _sources_of(method, engine)
        export: Iterable[NamedTensor] = Reexport(repeat, weights, sources, adapter)
        is_merged = peft_config is None and _has_adapter(engine)
        if is_merged and is_verls_fsdp(method):
            export = transformed(export, functools.partial(_unfused_copies, engine))
        elif is_merged or _empties_storages(engine):
            export = transformed(export, _copied)
        return export, peft_config

    return wrapper


def _weights_of(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterable[NamedTensor]:
    weights: Iterable[NamedTensor] = method(*args, **kwargs)[0]
    return weights


def _sources_of(method: Callable[..., Any], engine: Any) -> Sources | None:
    """The parameters that an engine's export reads; None if that is not known. A class of the
    user's own may keep tensors, say an average of the weights; a traced run of its export would
    give it some without memory.
    """
    if not method.__module__.startswith("verl."):
        return None
    module = getattr(engine, "module", None)
    if not isinstance(module, FSDPModule) or _has_adapter(engine):
        return bridge_sources(engine)
    return module_state(module)  # type: ignore[arg-type]


def is_verls_fsdp(method: Callable[..., Any]) -> bool:
    """True if a `get_per_tensor_param` is that of verl's FSDP engine."""
    from verl.workers.engine import FSDPEngine

    return method is inspect.unwrap(FSDPEngine.get_per_tensor_param)


def _without_a_call(engine: Any, repeat: Callable[[], Iterable[NamedTensor]]) -> Reexport | None:
    """The export of an FSDP engine of verl's whose method would gather, or load, all weights as
    soon as it is called; None for others.
    """
    if _has_adapter(engine):
        from verl_sglang_sync.verl.merged_lora import merged_export  # imports PEFT

        merged = merged_export(engine)
        return None if merged is None else Reexport(merged)
    flat = flat_parameters(engine)
    return None if flat is None else Reexport(repeat, sources=flat)


def flat_parameters(engine: Any) -> FlatParameters | None:
    """The sources of an export under FSDP1, which gathers all weights as soon as it is called; None
    where that adds to them.
    """
    module = engine.module
    if not isinstance(module, FullyShardedDataParallel):
        return None
    adds_to_it = _has_adapter(engine) or engine._qat_enabled
    model_type = engine.model_config.hf_config.model_type
    return None if adds_to_it else FlatParameters(module, model_type)


def _has_adapter(engine: Any) -> bool:
    """True if an FSDP engine's module has LoRA adapters."""
    return hasattr(_unwrapped(engine), "peft_config")


def _unwrapped(engine: Any) -> Any:
    """An engine's module, without FSDP1 around it."""
    module = getattr(engine, "module", None)
    return getattr(module, "_fsdp_wrapped_module", module)


def _check_adapter(engine: Any, peft_config: dict[str, Any]) -> None:
    from verl_sglang_sync.verl.adapter import check_adapter  # imports PEFT

    check_adapter(peft_config, getattr(_unwrapped(engine), "active_adapters", ()))


def _empties_storages(engine: Any) -> bool:
    """True if offloading parameters frees the memory of their storages, as verl's Megatron engine
    does: a live storage may then have no memory, and SGLang must not keep it mapped.
    """
    module = getattr(engine, "module", None)
    return isinstance(module, list) and bool(getattr(engine, "is_param_offload_enabled", False))


def _copied(weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Copies of weights whose memory changes after the export."""
    for name, tensor in weights:
        yield name, tensor.clone()
        del tensor


def _unfused_copies(engine: Any, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Take the experts of verl's own export of merged adapters apart, as verl's other exports do.

    verl merges into the module's parameters, and on one rank `full_tensor` may return these
    uncopied.
    """
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    yield from unfuse_moe_params(_copied(weights), engine.model_config.hf_config.model_type)


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def bridge_sources(engine: Any) -> BridgeSources | None:
    """The sources of an export that only Megatron-Bridge makes; None for other exports."""
    is_bridged = getattr(engine, "vanilla_bridge", True) is False
    adds_to_it = engine.peft_cls is not None or engine._qat_enabled if is_bridged else True
    if adds_to_it or getattr(engine.bridge, "export_weight_dtype", None) == "fp8":
        return None
    return BridgeSources(engine)


class BridgeSources:
    """A rank's parameters, by virtual pipeline stage and local name, which its peers use too."""

    needs_an_export = True
    """The bridge's mappings keep what the ranks tell each other in the first conversion."""

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
    """Equal for tasks that the bridge converts with the same code."""
    name = re.sub(r"\d+", "#", task.param_name)
    return name, type(task.mapping), type(task.megatron_module), task.pp_rank
