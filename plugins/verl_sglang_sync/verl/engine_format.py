"""Converts exports to the names and dtypes that SGLang expects, as verl's own update does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from verl_sglang_sync.sources.export import NamedTensor, transformed


class NotQuantized(ValueError):
    """verl failed to quantise a weight."""


def quantized(
    weights: Iterable[NamedTensor], quantizer: Any, dtype: torch.dtype
) -> Iterator[NamedTensor]:
    """`weights`, where those that `quantizer` selects are in fp8, each followed by its
    `_scale_inv`.

    Args:
        quantizer: verl's `SGLangFP8QuantizerHelper`. If its kernel fails, it logs that and returns
            the weight in its own dtype: the engine would round it to fp8 with the old scale.
        dtype: dtype in which scales are computed.

    Raises:
        NotQuantized: that has happened. Raised after the last weight, because until then the other
            ranks need this one in the collectives of the export.
    """
    failure: NotQuantized | None = None
    for name, tensor in _steps(quantizer.quant_weights_by_name(weights, dtype=dtype)):
        if quantizer.should_quantize_param(name) and tensor.dtype != torch.float8_e4m3fn:
            failure = failure or NotQuantized(
                f"{name} is still {tensor.dtype}: verl could not quantise it to fp8, and has "
                "logged why"
            )
        yield name, tensor
        del tensor  # so that its memory can be used for the next one
    if failure is not None:
        raise failure


def _steps(stream: AsyncIterator[NamedTensor]) -> Iterator[NamedTensor]:
    """An asynchronous generator of verl's that never waits, as a plain generator: a sync iterates
    over it in a running event loop.
    """
    while True:
        step = stream.__anext__()
        try:
            step.__await__().send(None)
        except StopIteration as done:
            yield done.value
        except StopAsyncIteration:
            return
        else:
            raise RuntimeError("verl's quant_weights_by_name awaits; expected that it does not")


@dataclass(frozen=True)
class EngineFormat:
    """The format in which one rollout's engine expects weights; the trainer converts them to it.

    Attributes:
        fp8: verl's fp8 configuration and the model's dtype, in which scales are computed; None:
            weights keep the dtype of the export.
    """

    fp8: tuple[Mapping[str, Any], torch.dtype] | None = None

    @classmethod
    def of_rollout(cls, config: Any, hf_config: Any) -> EngineFormat:
        if config.get("quantization", None) != "fp8":
            return cls()
        return cls((hf_config.quantization_config, hf_config.dtype))

    def applied(self, weights: Iterable[NamedTensor]) -> Iterable[NamedTensor]:
        """The export in this format; a quantised one cannot be traced to the parameters."""
        if self.fp8 is not None:
            from verl.utils.sglang.sglang_fp8_utils import SGLangFP8QuantizerHelper

            config, dtype = self.fp8
            quantizer = SGLangFP8QuantizerHelper(config)
            quantize = partial(quantized, quantizer=quantizer, dtype=dtype)
            weights = transformed(weights, quantize, computes=True)
        return transformed(weights, _without_base_layer)


def _without_base_layer(weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Remove `base_layer` from the names of modules that LoRA was merged into."""
    from verl.workers.rollout.sglang_rollout.sglang_rollout import _strip_lora_base_layer

    return ((_strip_lora_base_layer(name), tensor) for name, tensor in weights)
