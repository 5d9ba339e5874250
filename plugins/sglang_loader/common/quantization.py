"""The facts of a blockwise quantisation to fp8 that the engine repeats, bit for bit as the trainer.

A weight in fp8 is followed by its scales, one for each block:

    model.layers.0.self_attn.q_proj.weight              float8_e4m3fn [M, N]
    model.layers.0.self_attn.q_proj.weight_scale_inv    float32 [M / 128, N / 128], rounded up
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
import torch

from sglang_loader.common.regions.read import Count

VALUES = torch.float8_e4m3fn
"""The dtype of a quantised weight."""

SCALES = torch.float32
"""The dtype of the scales."""

SCALE_SUFFIX = "_scale_inv"
"""The ending of the name of the scales, behind the name of the weight."""

Method: TypeAlias = Literal["triton", "torch"]
"""The arithmetic: that of verl's Triton kernel, or of verl's implementation in torch. Both give
other scales and values in the last bit.
"""


class Quantization(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A blockwise quantisation.

    Attributes:
        block: rows and columns of a block. Blocks at the edges of a weight may be smaller.
        computed_in: name of the dtype to which a weight is converted first.
    """

    method: Method
    block: tuple[Count, Count]
    computed_in: Literal["bfloat16", "float16", "float32"]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to which a weight is converted first."""
        dtype = getattr(torch, self.computed_in)
        assert isinstance(dtype, torch.dtype)
        return dtype
