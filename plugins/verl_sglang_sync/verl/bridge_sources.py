"""What verl's Megatron engine exports by way of Megatron-Bridge: a rank's own parameters, and what
the bridge makes of each.

The bridge converts task by task; a task has a parameter of this pipeline stage, or none. verl makes
the tasks once, at the first export.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from verl_sglang_sync.collective import own_rank, world_size
from verl_sglang_sync.sources.conversion_trace import Conversion, trace_conversions
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sources.export_trace import TracedExport


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
            Conversion(_source(task), task.param_weight, self._converter(task))
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
