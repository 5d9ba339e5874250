"""What stands for the trainer: an FSDP2 model exported as verl does, or tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sglang_loader.common.shared_memory import share_on_host
from verl_sglang_sync.bench.model_shapes import MODELS, tensor_shapes
from verl_sglang_sync.sources.export import Reexport
from verl_sglang_sync.sources.known_sources import module_state

NamedTensor = tuple[str, torch.Tensor]
NamedTensors = list[NamedTensor]
Kind = Literal["fsdp2", "fsdp2_float32"]


class ShardedModel:
    """A Hugging Face model with random weights, sharded over all ranks by FSDP2."""

    def __init__(self, model: str, device: torch.device, dtype: torch.dtype | None = None) -> None:
        # `export` needs it; imported before the first sync, as in verl's workers: it takes seconds
        import verl.workers.engine.fsdp.utils  # noqa: F401
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**MODELS[model])
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, dtype=dtype or dtype_on(device))
        for layer in module.model.layers:
            fully_shard(layer)
        self._module = fully_shard(module)
        self._module.to_empty(device=device)
        for parameter in self._module.parameters():
            _filled(parameter.detach().to_local())
        self._model_type = config.model_type
        self._device = device

    def reexport(self) -> Reexport:
        """As verl hands it to a rollout, with the presets' wrapper around it."""
        return Reexport(self.export, sources=module_state(self._module))

    def export(self) -> Iterator[NamedTensor]:
        """What verl 0.9.1's FSDP engine exports: `get_per_tensor_param`."""
        from verl.utils.model import convert_weight_keys
        from verl.workers.engine.fsdp.utils import unfuse_moe_params

        parameters = convert_weight_keys(self._module.state_dict(), self._module)
        full = (
            (name, p.full_tensor() if isinstance(p, DTensor) else p)
            for name, p in parameters.items()
        )
        exported: Iterator[NamedTensor] = unfuse_moe_params(full, self._model_type)
        return exported

    def shards(self) -> NamedTensors:
        """This rank's, which are trained."""
        return [(name, p.detach().to_local()) for name, p in self._module.named_parameters()]


def make_trainer(kind: Kind, model: str, device: torch.device) -> Reexport:
    return ShardedModel(model, device, dtype_of(kind, device)).reexport()


def make_weights(model: str, device: torch.device) -> NamedTensors:
    """Random weights of a model's shape, each in its own storage."""
    dtype, shapes = dtype_on(device), tensor_shapes(MODELS[model])
    return [(name, _filled(torch.empty(s, dtype=dtype, device=device))) for name, s in shapes]


def size_of(model: str, device: torch.device, kind: Kind = "fsdp2") -> tuple[int, int]:
    """Number of tensors and of bytes that a trainer exports."""
    numels = [torch.Size(shape).numel() for _, shape in tensor_shapes(MODELS[model])]
    return len(numels), sum(numels) * dtype_of(kind, device).itemsize


def dtype_of(kind: Kind, device: torch.device) -> torch.dtype:
    return torch.float32 if kind == "fsdp2_float32" else dtype_on(device)


def dtype_on(device: torch.device) -> torch.dtype:
    """Of the engine's weights, and of those of most trainers."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    """Random values, in memory that an engine can map."""
    tensor.normal_(std=0.02)
    return share_on_host(tensor) if tensor.device.type == "cpu" else tensor
