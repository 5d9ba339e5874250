"""The benchmark's trainer: an FSDP2 model, exported as verl does."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sglang_loader.common.shared_memory import share_on_host
from verl_sglang_sync.commands.bench.model_shapes import MODELS, tensor_shapes, weights_bytes
from verl_sglang_sync.sources.export import NamedTensor, Reexport
from verl_sglang_sync.sources.host_memory import HOST_MEMORY
from verl_sglang_sync.sources.snapshot import module_state


class ShardedModel:
    """A Hugging Face model with random weights, sharded over all ranks by FSDP2.

    Args:
        is_offloaded: the parameters are on the host, as with verl's `param_offload`.
    """

    def __init__(
        self,
        model: str,
        device: torch.device,
        dtype: torch.dtype | None = None,
        *,
        is_offloaded: bool = False,
    ) -> None:
        # `export` needs this module. Its import takes seconds, and must not be part of a sync.
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
            local = parameter.detach().to_local().normal_(std=0.02)
            if device.type == "cpu" and not is_offloaded:
                share_on_host(local)  # so that an engine can map the tensor
        self._model_type = config.model_type
        self._device, self._is_offloaded = device, is_offloaded
        if is_offloaded:
            with HOST_MEMORY.placing(self._module.parameters(), device):
                self._module.to("cpu")
            if device.type == "cuda":
                torch.cuda.empty_cache()

    def reexport(self) -> Reexport:
        """Make the export as a rollout receives it from verl with a preset."""
        sources = module_state(self._module, is_offloaded=self._is_offloaded)
        return Reexport(self.export, sources=sources)

    def export(self) -> Iterator[NamedTensor]:
        """Make the export of verl 0.9.1's FSDP engine, as its `get_per_tensor_param` does."""
        from verl.utils.model import convert_weight_keys
        from verl.workers.engine.fsdp.utils import unfuse_moe_params

        parameters = convert_weight_keys(self._module.state_dict(), self._module)
        full = (
            (name, self._gathered(p) if isinstance(p, DTensor) else p)
            for name, p in parameters.items()
        )
        exported: Iterator[NamedTensor] = unfuse_moe_params(full, self._model_type)
        return exported

    def advance(self) -> None:
        """Change all parameters where they are, as a training step does."""
        for _, shard in self.shards():
            shard.mul_(1.01)

    def _gathered(self, parameter: DTensor) -> torch.Tensor:
        moved: DTensor = parameter.to(self._device)  # type: ignore[assignment]
        return moved.full_tensor()

    def shards(self) -> list[NamedTensor]:
        """Return this rank's shards of the parameters."""
        return [(name, p.detach().to_local()) for name, p in self._module.named_parameters()]


def size_of(model: str, dtype: torch.dtype) -> dict[str, int]:
    """Return the columns of a result that hold the size of an export."""
    num_tensors = sum(1 for _ in tensor_shapes(MODELS[model]))
    return {"num_tensors": num_tensors, "bytes": weights_bytes(model, dtype.itemsize)}


def dtype_on(device: torch.device) -> torch.dtype:
    """Return the dtype of the engine's weights, which most arms' trainers have, too."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16
