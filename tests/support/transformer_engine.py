"""Transformer Engine where it is not installed: its layers in plain torch.

The bridges build their models of Transformer Engine's layers alone. Those that megatron-core
subclasses are here with Transformer Engine's own parameter names, shapes and tensor-parallel
attributes; megatron-core's layer specs, its wrappers and the bridges are upstream's. A dense model
computes what it would with the real layers, without their kernels; experts have only parameters.

    transformer_engine.install()       # before megatron is imported
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VERSION = "2.6.0"
"""From 2.7 on megatron-core wants modules that have nothing to do with parameters."""


def _on_tensor_parallel_ranks(parameter: nn.Parameter, dim: int) -> nn.Parameter:
    vars(parameter).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=1)
    return parameter


def _normalization(initial: torch.Tensor, settings: dict[str, Any]) -> nn.Parameter:
    """A layer norm's parameter: sequence-parallel ranks add up its gradients."""
    parameter = nn.Parameter(initial.to(settings.get("params_dtype")))
    vars(parameter)["sequence_parallel"] = settings.get("sequence_parallel", False)
    return parameter


def _normalized(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    if bias is None:
        return functional.rms_norm(inputs, weight.shape, weight, eps)
    return functional.layer_norm(inputs, weight.shape, weight, bias, eps)


class _Layer(nn.Module):
    """What the linear layers have in common; sizes are those of the whole layer."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        is_row = parallel_mode == "row"
        self.tp_group = settings.get("tp_group")
        self.sequence_parallel = settings.get("sequence_parallel", False)
        self.in_features = in_features // tp_size if is_row else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.parallel_mode, self.use_bias = parallel_mode, bias
        self.return_bias = settings.get("return_bias", False)
        self.dtype, self.fp8_meta = params_dtype, {}  # type: ignore[var-annotated]
        self._dim = 1 if is_row else 0

    def add_linear(self, suffix: str = "") -> None:
        """Register a weight, and a bias where the layer has one."""
        weight = nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=self.dtype))
        self.register_parameter(f"weight{suffix}", _on_tensor_parallel_ranks(weight, self._dim))
        if self.use_bias:
            bias = nn.Parameter(torch.zeros(self.out_features, dtype=self.dtype))
            if self._dim == 0:
                _on_tensor_parallel_ranks(bias, 0)
            self.register_parameter(f"bias{suffix}", bias)

    def forward(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has only parameters here")

    def multiply(self, inputs: torch.Tensor) -> Any:
        """The linear layer, with the collectives of its tensor-parallel mode.

        Args:
            inputs: `[sequence, batch, in_features]`; of the sequence only this rank's part where a
                column-parallel layer runs sequence-parallel, which a row-parallel one returns.
        """
        from megatron.core.tensor_parallel import mappings

        if self.parallel_mode == "column":
            enter = (
                mappings.gather_from_sequence_parallel_region
                if self.sequence_parallel
                else mappings.copy_to_tensor_model_parallel_region
            )
            inputs = enter(inputs, group=self.tp_group)
        outputs = functional.linear(inputs, self.weight)
        if self.parallel_mode == "row":
            leave = (
                mappings.reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else mappings.reduce_from_tensor_model_parallel_region
            )
            outputs = leave(outputs, group=self.tp_group)
        if self.return_bias:
            return outputs, self.bias
        return outputs + self.bias if self.use_bias else outputs


class Linear(_Layer):
    """`transformer_engine.pytorch.Linear`."""

    def __init__(self, *sizes: int, **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        self.add_linear()

    def forward(self, inputs: torch.Tensor, **_: Any) -> Any:
        return self.multiply(inputs)


class LayerNormLinear(_Layer):
    """`transformer_engine.pytorch.LayerNormLinear`."""

    def __init__(self, *sizes: int, normalization: str = "LayerNorm", **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        self.eps, self.normalization = settings.get("eps", 1e-5), normalization
        self.layer_norm_weight = _normalization(torch.ones(self.in_features), settings)
        if normalization == "LayerNorm":
            self.layer_norm_bias = _normalization(torch.zeros(self.in_features), settings)
        self.add_linear()

    def forward(self, inputs: torch.Tensor, **_: Any) -> Any:
        bias = self.layer_norm_bias if self.normalization == "LayerNorm" else None
        return self.multiply(_normalized(inputs, self.layer_norm_weight, bias, self.eps))


class GroupedLinear(_Layer):
    """`transformer_engine.pytorch.GroupedLinear`: the experts of one rank."""

    def __init__(self, num_gemms: int, *sizes: int, **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        self.num_gemms = num_gemms
        for expert in range(num_gemms):
            self.add_linear(str(expert))


class RMSNorm(nn.Module):
    """`transformer_engine.pytorch.RMSNorm`."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        *,
        hidden_size: int | None = None,  # its former name
        **settings: Any,
    ) -> None:
        super().__init__()
        size = hidden_size if normalized_shape is None else normalized_shape
        assert size is not None
        self.eps = settings.get("eps", 1e-5)
        self.weight = _normalization(torch.ones(size), settings)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _normalized(inputs, self.weight, getattr(self, "bias", None), self.eps)


class LayerNorm(RMSNorm):
    """`transformer_engine.pytorch.LayerNorm`."""

    def __init__(self, *sizes: int, **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        self.bias = _normalization(torch.zeros_like(self.weight), settings)


class DotProductAttention(nn.Module):
    """`transformer_engine.pytorch.DotProductAttention`: causal, of packed sequences, no dropout."""

    def __init__(self, *_: Any, **settings: Any) -> None:
        super().__init__()
        self.scale = settings.get("softmax_scale")

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **packed: Any
    ) -> torch.Tensor:
        """Attention of each sequence to itself.

        Args:
            query: `[tokens, heads, channels]`; `key` and `value` with a divisor of its heads.

        Returns:
            `[tokens, heads * channels]`.

        Raises:
            NotImplementedError: not packed, or not causal.
        """
        if (packed.get("qkv_format"), packed["attn_mask_type"]) != ("thd", "padding_causal"):
            raise NotImplementedError("only of packed sequences: model.use_remove_padding=True")
        lengths = packed["cu_seqlens_q_padded"].diff().tolist()
        sequences = zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
        outputs = [
            functional.scaled_dot_product_attention(
                *(tensor.transpose(0, 1)[None] for tensor in sequence),
                is_causal=True,
                scale=self.scale,
                enable_gqa=True,
            )
            for sequence in sequences
        ]
        return torch.cat([output[0].transpose(0, 1).flatten(1) for output in outputs])


LAYERS = (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention)
NAMES = {  # that megatron-core and Megatron-Bridge import, by module
    "": (),
    ".common": (),
    ".common.recipe": ("Recipe", "DelayedScaling", "Float8CurrentScaling", "Format"),
    ".pytorch": (),
    ".pytorch.ops": ("Sequential", "FusibleOperation"),
    ".pytorch.fp8": ("FP8GlobalStateManager", "fp8_autocast", "fp8_model_init"),
    ".pytorch.tensor": ("QuantizedTensor",),
    ".pytorch.distributed": ("CudaRNGStatesTracker", "activation_recompute_forward"),
}


def install() -> None:
    """Have `import transformer_engine` find this, in this process, for good."""
    for suffix, names in NAMES.items():
        name = f"transformer_engine{suffix}"
        module = ModuleType(name)
        module.__path__ = []  # a package: what it lacks is an ImportError
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        vars(module).update({each: type(each, (), {}) for each in names})
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    vars(sys.modules["transformer_engine"])["__version__"] = VERSION
    vars(sys.modules["transformer_engine.pytorch"]).update({c.__name__: c for c in LAYERS})
