"""Converts an export to the names and dtypes that SGLang expects, as verl's own update does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch

from sglang_loader.common.quantization import Quantization
from verl_sglang_sync.sources.export import NamedTensor, Quantized, quantized_export, transformed


class NotQuantized(ValueError):
    """A weight that verl failed to quantise."""


def quantized(
    weights: Iterable[NamedTensor], quantizer: Any, dtype: torch.dtype
) -> Iterator[NamedTensor]:
    """Yield `weights`, with the weights that `quantizer` selects in fp8.

    Each weight in fp8 is followed by its scale, whose name has the suffix `_scale_inv`.

    Args:
        quantizer: verl's `SGLangFP8QuantizerHelper`.
        dtype: dtype in which scales are computed.

    Raises:
        NotQuantized: the quantizer left a weight in its own dtype. Raised after the last weight.
    """
    # If its kernel fails, verl's helper logs the error and returns the weight as it is. The engine
    # would round such a weight to fp8 with the old scale. Raise at the end: until then the other
    # ranks need this rank in the collectives of the export.
    failure: NotQuantized | None = None
    for name, tensor in _steps(quantizer.quant_weights_by_name(weights, dtype=dtype)):
        if quantizer.should_quantize_param(name) and tensor.dtype != torch.float8_e4m3fn:
            failure = failure or NotQuantized(
                f"{name} is still {tensor.dtype}: verl could not quantise it to fp8, and has "
                "logged why"
            )
        yield name, tensor
        del tensor  # frees the memory for the next tensor
    if failure is not None:
        raise failure


def _steps(tensors: AsyncIterator[NamedTensor]) -> Iterator[NamedTensor]:
    """Iterate over an asynchronous generator of verl's that never waits."""
    # A sync iterates in a running event loop, where the loop cannot run the generator.
    while True:
        step = tensors.__anext__()
        try:
            step.__await__().send(None)
        except StopIteration as done:
            yield done.value
        except StopAsyncIteration:
            return
        else:
            raise RuntimeError("verl's quant_weights_by_name waits, which a sync cannot support")


@dataclass(frozen=True)
class EngineFormat:
    """The names and dtypes in which the engine of one rollout expects the weights.

    Attributes:
        fp8: verl's fp8 configuration, and the model's dtype, in which scales are computed. None if
            weights keep the dtype of the export.
    """

    fp8: tuple[Mapping[str, Any], torch.dtype] | None = None

    @classmethod
    def of_rollout(cls, config: Any, hf_config: Any) -> EngineFormat:
        """Read the format from verl's rollout configuration and the model's."""
        if config.get("quantization", None) != "fp8":
            return cls()
        return cls((hf_config.quantization_config, hf_config.dtype))

    def applied(self, weights: Iterable[NamedTensor]) -> Iterable[NamedTensor]:
        """Convert an export to this format. The result can be repeated if `weights` can."""
        if self.fp8 is not None:
            from verl.utils.sglang.sglang_fp8_utils import SGLangFP8QuantizerHelper

            config, dtype = self.fp8
            return quantized_by(weights, SGLangFP8QuantizerHelper(config), dtype)
        return transformed(weights, _without_base_layer)


def quantized_by(
    weights: Iterable[NamedTensor], quantizer: Any, dtype: torch.dtype
) -> Iterable[NamedTensor]:
    """Quantise an export by verl's quantiser, in a form that engines can repeat themselves.

    The result can be repeated if `weights` can. Its names are those without `base_layer`.

    Args:
        quantizer: verl's `SGLangFP8QuantizerHelper`.
        dtype: dtype in which scales are computed.
    """
    return quantized_export(
        Quantized(
            transformed(weights, _without_base_layer),
            partial(quantized, quantizer=quantizer, dtype=dtype),
            quantization_by(quantizer, dtype),
        )
    )


def quantization_by(quantizer: Any, dtype: torch.dtype) -> Quantization:
    """Describe what verl's quantiser does."""
    from verl.utils.kernel import fp8_kernel

    config = quantizer.quant_config
    is_dict = isinstance(config, Mapping)
    block = config["weight_block_size"] if is_dict else config.weight_block_size
    uses_triton = fp8_kernel.is_triton_available() and not fp8_kernel._DISABLE_TRITON_FP8
    fields = "triton" if uses_triton else "torch", block, str(dtype).removeprefix("torch.")
    return msgspec.convert(fields, Quantization)


def _without_base_layer(weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Remove `base_layer` from the names of modules that LoRA was merged into."""
    from verl.workers.rollout.sglang_rollout.sglang_rollout import _strip_lora_base_layer

    return ((_strip_lora_base_layer(name), tensor) for name, tensor in weights)
