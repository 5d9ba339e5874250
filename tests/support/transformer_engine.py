"""Transformer Engine where there is no GPU: the parameters of its layers, and no forward.

Megatron-Bridge builds its models of Transformer Engine's layers alone. Those that megatron-core
subclasses are here with Transformer Engine's own parameter names, shapes and tensor-parallel
attributes; megatron-core's layer specs, its wrappers and the bridge are upstream's.

    transformer_engine.install()       # before megatron is imported
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import nn

VERSION = "2.6.0"
"""From 2.7 on megatron-core wants modules that have nothing to do with parameters."""


def _on_tensor_parallel_ranks(parameter: nn.Parameter, dim: int) -> nn.Parameter:
    vars(parameter).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=1)
    return parameter


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
        """Not without Transformer Engine."""
        raise NotImplementedError("Transformer Engine's layers have only parameters here")


class Linear(_Layer):
    """`transformer_engine.pytorch.Linear`."""

    def __init__(self, *sizes: int, **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        self.add_linear()


class LayerNormLinear(_Layer):
    """`transformer_engine.pytorch.LayerNormLinear`."""

    def __init__(self, *sizes: int, normalization: str = "LayerNorm", **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        self.layer_norm_weight = nn.Parameter(torch.ones(self.in_features, dtype=self.dtype))
        if normalization == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(self.in_features, dtype=self.dtype))
        self.add_linear()


class GroupedLinear(_Layer):
    """`transformer_engine.pytorch.GroupedLinear`: the experts of one rank."""

    def __init__(self, num_gemms: int, *sizes: int, **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        self.num_gemms = num_gemms
        for expert in range(num_gemms):
            self.add_linear(str(expert))


class RMSNorm(nn.Module):
    """`transformer_engine.pytorch.RMSNorm`."""

    def __init__(self, hidden_size: int, **settings: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=settings.get("params_dtype")))


class LayerNorm(RMSNorm):
    """`transformer_engine.pytorch.LayerNorm`."""

    def __init__(self, hidden_size: int, **settings: Any) -> None:
        super().__init__(hidden_size, **settings)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))


class DotProductAttention(nn.Module):
    """`transformer_engine.pytorch.DotProductAttention` has no parameters."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


LAYERS = (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention)
NAMES = {  # that megatron-core and Megatron-Bridge import, by module
    "": (),
    ".common": (),
    ".common.recipe": ("Recipe", "DelayedScaling", "Float8CurrentScaling", "Format"),
    ".pytorch": (),
    ".pytorch.ops": ("Sequential", "FusibleOperation"),
    ".pytorch.fp8": ("FP8GlobalStateManager", "fp8_autocast"),
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
