"""Names and dtypes in which SGLang expects what a trainer exports: those of verl's own update."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from verl_sglang_sync.sources.export import NamedTensor, transformed


class NotQuantized(ValueError):
    """A weight that verl quantises stayed as it was."""


def quantized(
    weights: Iterable[NamedTensor], quantizer: Any, dtype: torch.dtype
) -> Iterator[NamedTensor]:
    """`weights` with those that `quantizer` picks in fp8, each followed by its `_scale_inv`.

    Args:
        quantizer: verl's `SGLangFP8QuantizerHelper`. It logs an error of its kernel and passes the
            weight on in its own dtype, which the engine would round to fp8, and multiply by the
            scale of the weight before.
        dtype: in which scales are computed.

    Raises:
        NotQuantized: a weight was passed on like that; after the last one, because the other ranks
            need this one until then, in the collectives of the export.
    """
    failure: NotQuantized | None = None
    for name, tensor in _steps(quantizer.quant_weights_by_name(weights, dtype=dtype)):
        if quantizer.should_quantize_param(name) and tensor.dtype != torch.float8_e4m3fn:
            failure = failure or NotQuantized(
                f"{name} is still {tensor.dtype}: verl could not quantise it to fp8, and has "
                "logged why"
            )
        yield name, tensor
        del tensor  # the next one is made when this one may be gone
    if failure is not None:
        raise failure


def _steps(stream: AsyncIterator[NamedTensor]) -> Iterator[NamedTensor]:
    """An asynchronous generator of verl that has nothing to wait for, in plain code.

    It must run where a sync pulls its tensors: inside an event loop, between two collectives.
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
            raise RuntimeError("verl's quantisation waits for something; expected plain steps")


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
