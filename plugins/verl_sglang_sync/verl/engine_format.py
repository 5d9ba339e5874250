"""Names and dtypes in which SGLang expects what a trainer exports: those of verl's own update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from verl_sglang_sync.sources.export import NamedTensor, transformed
from verl_sglang_sync.verl.quantized_export import quantized


@dataclass(frozen=True)
class EngineFormat:
    """Of one rollout; the trainer gives the weights this form before they leave it.

    Attributes:
        fp8: verl's configuration of fp8, and the model's dtype, in which the scales are computed;
            None: dtypes stay as they are exported.
    """

    fp8: tuple[Mapping[str, Any], torch.dtype] | None = None

    @classmethod
    def of_rollout(cls, config: Any, hf_config: Any) -> EngineFormat:
        """As verl has set the rollout up."""
        if config.get("quantization", None) != "fp8":
            return cls()
        return cls((hf_config.quantization_config, hf_config.dtype))

    def applied(self, weights: Iterable[NamedTensor]) -> Iterable[NamedTensor]:
        """An export in this form; one that is quantised has no sources any more."""
        if self.fp8 is not None:
            from verl.utils.sglang.sglang_fp8_utils import SGLangFP8QuantizerHelper

            config, dtype = self.fp8
            quantizer = SGLangFP8QuantizerHelper(config)
            quantize = partial(quantized, quantizer=quantizer, dtype=dtype)
            weights = transformed(weights, quantize, computes=True)
        return transformed(weights, _without_base_layer)


def _without_base_layer(weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """The names of merged LoRA modules as SGLang knows them."""
    from verl.workers.rollout.sglang_rollout.sglang_rollout import _strip_lora_base_layer

    return ((_strip_lora_base_layer(name), tensor) for name, tensor in weights)
