"""Wrapper of verl's exports that makes them repeatable (`sources.export.Reexport`).

Under FSDP the exported tensors have the names and layouts of the checkpoint (`checkpoint_format`).

The wrapper also finds the sources of an export: FSDP2's module state, FSDP1's flat parameters
(`flat_parameters`), or for Megatron-Bridge this rank's parameters.

The bridge has a list of conversion tasks. A task has a parameter of this pipeline stage, or none.
verl makes the list once.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from verl_sglang_sync.sources.conversion_trace import (
    Conversion,
    MadeBy,
    trace_by_examples,
    trace_conversions,
)
from verl_sglang_sync.sources.export import NamedTensor, Reexport, is_repeatable, transformed
from verl_sglang_sync.sources.export_trace import TracedExport
from verl_sglang_sync.sources.snapshot import Sources, module_state
from verl_sglang_sync.trainer_ranks import own_rank, world_size
from verl_sglang_sync.verl.checkpoint_format import in_checkpoint_format
from verl_sglang_sync.verl.flat_parameters import FlatParameters
from verl_sglang_sync.verl.offload import is_offloaded, prepare_export

_METHOD = "get_per_tensor_param"


def make_exports_repeatable() -> None:
    """Make verl's training engines in this process return exports that can be repeated."""
    # verl passes the result of `get_per_tensor_param` to the rollout, and nothing else of the
    # engine. So wrap that method, once, in all classes that define it.
    from verl.workers.engine.base import BaseEngine

    for engine in _subclasses(BaseEngine):
        method = vars(engine).get(_METHOD)
        if method is not None and not hasattr(method, "__wrapped__"):
            setattr(engine, _METHOD, _repeatable(method))


def _repeatable(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `get_per_tensor_param`, which returns `(export, adapter's config or None)`."""

    @functools.wraps(method)
    def wrapper(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if is_verls_fsdp(method) and not (_has_adapter(engine) or engine._qat_enabled):
            prepare_export(engine)
        if _is_verls(method) and (bridged := bridge_sources(engine)) is not None:
            return _export_by_bridge(method, engine, bridged, *args, **kwargs), None
        repeat = functools.partial(_weights_of, method, engine, *args, **kwargs)
        if is_verls_fsdp(method) and (own := _without_a_call(engine, repeat)) is not None:
            return own, None
        # Without arguments: verl's call in disaggregated mode. With an adapter FSDP gathers all
        # base weights in this call. Ask for the adapter alone, and gather when the export is
        # iterated.
        is_lazy = not args and not kwargs and _has_adapter(engine)
        if is_lazy:
            kwargs = {"base_sync_done": True}
        # Called in every sync, also if the route brings the weights. With FSDP2, verl's method only
        # collects the shards and makes a generator.
        weights, peft_config = _called(method, engine, *args, **kwargs)
        if peft_config is not None:
            _check_adapter(engine, peft_config)
        if is_lazy and peft_config is not None:

            def adapter_export() -> tuple[Iterable[NamedTensor], dict[str, Any]]:
                return weights, peft_config

            return Reexport(repeat, adapter=adapter_export), peft_config
        base = None
        if peft_config is not None and kwargs.get("base_sync_done"):
            # An engine that was replaced needs the weights below the adapter, too.
            base = functools.partial(
                _weights_of, wrapper, engine, *args, **{**kwargs, "base_sync_done": False}
            )
        if is_repeatable(weights):
            own = weights if base is None else Reexport(repeat, weights, base=base)
            return own, peft_config
        adapter = None
        if peft_config is not None:
            adapter = functools.partial(
                _called, method, engine, *args, **{**kwargs, "base_sync_done": True}
            )
        sources = _sources_of(method, engine)
        export: Iterable[NamedTensor] = Reexport(repeat, weights, sources, adapter, base=base)
        is_merged = peft_config is None and _has_adapter(engine)
        if is_merged and is_verls_fsdp(method):
            export = transformed(export, functools.partial(_converted_copies, engine))
        elif is_merged or _empties_storages(engine):
            export = transformed(export, _copied)
        return export, peft_config

    return wrapper


def _weights_of(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterable[NamedTensor]:
    weights: Iterable[NamedTensor] = _called(method, *args, **kwargs)[0]
    return weights


def _called(method: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `method`. The tensors of verl's FSDP engine come in the checkpoint's format."""
    if not is_verls_fsdp(method):
        return method(engine, *args, **kwargs)
    from verl.workers.engine.fsdp import transformer_impl

    # verl 0.9.1 keeps the model's own names, and takes all fused experts apart under Qwen's names.
    # The method calls one function for this, with the full tensors. Replace that function.
    with mock.patch.object(
        transformer_impl, "unfuse_moe_params", functools.partial(_in_checkpoint_format, engine)
    ):
        return method(engine, *args, **kwargs)


def _in_checkpoint_format(
    engine: Any, weights: Iterable[NamedTensor], model_type: str | None = None
) -> Iterator[NamedTensor]:
    """Convert the tensors of an FSDP engine. Replaces a function of verl with these arguments."""
    model = _unwrapped(engine)
    return in_checkpoint_format(weights, model.base_model.model if _has_adapter(engine) else model)


def _sources_of(method: Callable[..., Any], engine: Any) -> Sources | None:
    """Return the sources of an FSDP2 engine's export, or None if they are not known."""
    module = getattr(engine, "module", None)
    if not _is_verls(method) or not isinstance(module, FSDPModule) or _has_adapter(engine):
        return None
    return module_state(module, is_offloaded=is_offloaded(engine))  # type: ignore[arg-type]


def _is_verls(method: Callable[..., Any]) -> bool:
    """Return True if a `get_per_tensor_param` is verl's own."""
    # A class of the user's own may keep tensors, say an average of the weights. A traced run of its
    # export would leave tensors without memory there.
    return method.__module__.startswith("verl.")


def is_verls_fsdp(method: Callable[..., Any]) -> bool:
    """Return True if a `get_per_tensor_param` is that of verl's FSDP engine."""
    from verl.workers.engine import FSDPEngine

    return method is inspect.unwrap(FSDPEngine.get_per_tensor_param)


def _without_a_call(engine: Any, repeat: Callable[[], Iterable[NamedTensor]]) -> Reexport | None:
    """Make the export of an FSDP engine without a call of verl's method, or return None."""
    # With merged adapters or FSDP1, verl's method would load, or gather, all weights at once.
    if _has_adapter(engine):
        from verl_sglang_sync.verl.merged_lora import merged_export  # imports PEFT

        merged = merged_export(engine)
        return None if merged is None else Reexport(merged)
    flat = flat_parameters(engine)
    return None if flat is None else Reexport(repeat, sources=flat)


def flat_parameters(engine: Any) -> FlatParameters | None:
    """Return the sources of an export under FSDP1, or None for another engine.

    None, too, if the export has more than the parameters: an adapter, or quantised weights.
    """
    module = engine.module
    if not isinstance(module, FullyShardedDataParallel):
        return None
    adds_to_it = _has_adapter(engine) or engine._qat_enabled
    return None if adds_to_it else FlatParameters(module, is_offloaded=is_offloaded(engine))


def _has_adapter(engine: Any) -> bool:
    """Return True if an FSDP engine's module has LoRA adapters."""
    return hasattr(_unwrapped(engine), "peft_config")


def _unwrapped(engine: Any) -> Any:
    """Return an engine's module, without FSDP1's wrapper."""
    module = getattr(engine, "module", None)
    return getattr(module, "_fsdp_wrapped_module", module)


def _check_adapter(engine: Any, peft_config: dict[str, Any]) -> None:
    from verl_sglang_sync.verl.adapter import check_adapter  # imports PEFT

    check_adapter(peft_config, _unwrapped(engine))


def _empties_storages(engine: Any) -> bool:
    """Return True if offloading frees the memory of the parameters' storages."""
    # verl's Megatron engine does so. A live storage may then have no memory, and SGLang must not
    # keep the memory mapped.
    module = getattr(engine, "module", None)
    return isinstance(module, list) and bool(getattr(engine, "is_param_offload_enabled", False))


def _copied(weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Copy each weight."""
    # The memory of the weights changes after the export.
    for name, tensor in weights:
        yield name, tensor.clone()
        del tensor  # frees the memory for the next tensor


def _converted_copies(engine: Any, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Convert copies of verl's own export of merged adapters, in which experts are fused."""
    # verl merges into the module's parameters. On one rank `full_tensor` may return these uncopied.
    return _in_checkpoint_format(engine, _copied(weights))


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _export_by_bridge(
    method: Callable[..., Any], engine: Any, sources: BridgeSources, *args: Any, **kwargs: Any
) -> Iterable[NamedTensor]:
    make = functools.partial(sources.noted_export, method, *args, **kwargs)
    if sources.is_offloaded:
        # verl's method loads the parameters, which a sync by the route needs, too.
        return transformed(Reexport(make, make(), sources), _copied)
    # verl's method also goes through all parameters, 12,627 of 30 B. So call it for an export only.
    engine._mbridge_export_tasks()  # the first call is collective, as in verl's method
    return Reexport(make, sources=sources)


def bridge_sources(engine: Any) -> BridgeSources | None:
    """Return the sources of an export by Megatron-Bridge alone, or None for any other export."""
    is_bridged = getattr(engine, "vanilla_bridge", True) is False
    adds_to_it = engine.peft_cls is not None or engine._qat_enabled if is_bridged else True
    if adds_to_it or getattr(engine.bridge, "export_weight_dtype", None) == "fp8":
        return None
    return BridgeSources(engine)


@dataclasses.dataclass(frozen=True)
class _OwnTasks:
    """The bridge's tasks for one rank's parameters, with the name of each parameter.

    Attributes:
        of_all: the bridge's list, which has tasks for other ranks' parameters, too.
    """

    of_all: list[Any]
    tasks: list[Any]
    sources: list[str]


_own_tasks: WeakKeyDictionary[Any, _OwnTasks] = WeakKeyDictionary()
"""The tasks by engine. The bridge makes its list once. To name 12,627 parameters takes 10 ms."""


class BridgeSources:
    """Sources that list a rank's parameters, by virtual pipeline stage and local name.

    Ranks that hold parts of the same parameter have the same name for it.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._converted = ""  # the source of the task that the bridge converts
        self._made: dict[str, MadeBy] = {}

    @property
    def is_offloaded(self) -> bool:
        """True if the parameters are offloaded. They come back into the same storages."""
        return bool(self._engine.is_param_offload_enabled)

    def __call__(self) -> Mapping[str, torch.Tensor]:
        """List this rank's parameters by name."""
        own = self._own_tasks()
        weights = [task.param_weight for task in own.tasks]
        return dict(zip(own.sources, weights, strict=True))

    def noted_export(
        self, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Iterator[NamedTensor]:
        """Call verl's `method` for an export that notes which task each tensor is made by."""
        # When the bridge yields a tensor, the task that it has fetched last made it, alone or with
        # others of its group.
        tasks = self._engine._mbridge_export_tasks

        def noted_tasks() -> list[Any]:
            return _NotedTasks(tasks(), self._note_task)

        with mock.patch.object(self._engine, "_mbridge_export_tasks", noted_tasks):
            weights, _ = method(self._engine, *args, **kwargs)
        return self._noted(weights)

    def _note_task(self, task: Any) -> None:
        self._converted = "" if task is None or task.param_weight is None else _source(task)

    def _noted(self, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        made = self._made = {}  # a trace of an earlier export keeps that one's
        names: defaultdict[str, list[str]] = defaultdict(list)  # of the tensors, by source
        self._converted = ""
        for item in weights:
            name, source = item[0], self._converted
            names[source].append(name)
            by = MadeBy(source, len(names[source]) - 1, names[source][0])
            made[name] = made[name]._replace(is_repeated=True) if name in made else by
            yield item
            del item  # frees the memory for the next tensor

    def trace_in_export(self, device: torch.device) -> TracedExport:
        """Trace the export that is being made. The trace grows with it."""
        return trace_by_examples(
            self._conversions(), self._made, rank=own_rank(), world_size=world_size(), device=device
        )

    def trace(self, device: torch.device) -> TracedExport:
        """Trace the conversions of this rank's parameters.

        On several pipeline stages an export must have been made. In it the stages send each other
        what the bridge keeps.

        Raises:
            NotTraceable: an exported tensor is no strided set of the parameters' bytes.
        """
        return trace_conversions(
            self._conversions(), rank=own_rank(), world_size=world_size(), device=device
        )

    def _conversions(self) -> list[Conversion]:
        together: dict[object, list[Any]] = {}
        for task in self._own_tasks().tasks:
            together.setdefault(_group(task), []).append(task)
        return [
            Conversion(
                tuple(map(_source, tasks)),
                _kind(tasks[0]),
                tuple(task.param_weight for task in tasks),
                self._converter(tasks),
            )
            for tasks in together.values()
        ]

    def _own_tasks(self) -> _OwnTasks:
        tasks, known = self._engine._mbridge_export_tasks(), _own_tasks.get(self._engine)
        if known is None or known.of_all is not tasks:
            own = [task for task in tasks if task is not None and task.param_weight is not None]
            known = _own_tasks[self._engine] = _OwnTasks(tasks, own, list(map(_source, own)))
        return known

    def _converter(self, tasks: list[Any]) -> Callable[..., Iterable[NamedTensor]]:
        def convert(*tensors: torch.Tensor) -> Iterable[NamedTensor]:
            pairs = zip(tasks, tensors, strict=True)
            exported: Iterable[NamedTensor] = self._engine.bridge.export_hf_weights(
                self._engine.module,
                show_progress=False,
                conversion_tasks=[dataclasses.replace(t, param_weight=w) for t, w in pairs],
                merge_adapter_weights=False,  # there are none
            )
            return exported

        return convert


class _NotedTasks(list[Any]):
    """A list that calls `note` with each element when it is fetched."""

    def __init__(self, tasks: Iterable[Any], note: Callable[[Any], None]) -> None:
        super().__init__(tasks)
        self._note = note

    def __iter__(self) -> Iterator[Any]:
        for task in super().__iter__():
            self._note(task)
            yield task


def _source(task: Any) -> str:
    return f"{task.vp_stage}.{task.param_name}"


def _group(task: Any) -> object:
    """Return a value that is equal for tasks of which the bridge makes one tensor together."""
    # From Megatron-Bridge 0.5 on some models' experts are exported as one tensor for each layer,
    # when all of them have been converted.
    is_grouped = getattr(task.mapping, "is_grouped_export", False)
    return str(task.mapping.hf_param) if is_grouped else (task.vp_stage, task.param_name)


def _kind(task: Any) -> object:
    """Return a value that is equal for tasks that the bridge converts with the same code."""
    name = re.sub(r"\d+", "#", task.param_name)
    settings = tuple(
        (key, value)
        for key, value in vars(task.mapping).items()
        if isinstance(value, bool | int | float)
    )
    return name, type(task.mapping), settings, type(task.megatron_module), task.pp_rank
