"""megatron-core and mbridge without a GPU and without Transformer Engine.

Only what stands in for the two is here: the models, the bridges and all collectives are upstream's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch


class TransformerEngineNames:
    """A GPTModel of local layers under the parameter names of Transformer Engine's layers.

    mbridge knows those names alone. They differ in the layer norms, which Transformer Engine fuses
    into the linear layer that follows, and in the experts, which it groups.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.decoder = model.decoder

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in self._model.named_parameters():
            yield self._renamed(name), parameter

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {self._renamed(name): t for name, t in self._model.state_dict().items()}

    def _renamed(self, name: str) -> str:
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        if self._model.config.num_moe_experts is None:
            name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        local_expert = r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc\d)\.weight$"
        return re.sub(local_expert, r".mlp.experts.\2.weight\1", name)


@cache  # once in a process
def use_local_layers(*model_types: str) -> None:
    """Have mbridge build, load and export models of these types with local layers."""
    import mbridge  # noqa: F401  registers the bridges
    from mbridge.core.bridge import _MODEL_REGISTRY, register_model

    for model_type in model_types:
        register_model(model_type)(_with_local_layers(_MODEL_REGISTRY[model_type]))


def _with_local_layers(bridge: type[Any]) -> type[Any]:
    from mbridge.core.util import unwrap_model
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    def renamed(models: list[Any]) -> list[TransformerEngineNames]:
        return [TransformerEngineNames(unwrap_model(model)) for model in models]

    class LocalLayersBridge(bridge):  # type: ignore[misc]
        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
            self.has_vp_stage = True
            return get_gpt_decoder_block_spec(
                self.config, use_transformer_engine=False, vp_stage=vp_stage
            )

        def load_weights(self, models: list[Any], weights_path: str, *args: Any) -> None:
            super().load_weights(renamed(models), weights_path, *args)

        def export_weights(self, models: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
            exported: Iterator[tuple[str, torch.Tensor]] = super().export_weights(renamed(models))
            return exported

    return LocalLayersBridge


LOCAL_LAYERS = {
    "use_cpu_initialization": True,
    "sequence_parallel": False,  # the local layer norm has none
    "persist_layer_norm": False,
    "moe_grouped_gemm": False,
}
"""What a TransformerConfig must say for local layers."""


def stand_in_for_cuda() -> None:
    """Let code that names CUDA outright run on the CPU, in this process, for good."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.nn.Module.cuda = lambda self, *_: self  # type: ignore[assignment,method-assign]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    # Seeds CUDA's generator; models are initialised on the CPU and then loaded anyway.
    tensor_parallel.model_parallel_cuda_manual_seed = lambda *_: None
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = torch.cpu.Stream()


class UnpinnedMemory(torch.overrides.TorchFunctionMode):
    """Plain memory where verl asks for pinned memory, which needs a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        return func(*args, **kwargs)
