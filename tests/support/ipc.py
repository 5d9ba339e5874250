"""Handles with which an SGLang scheduler process maps a CPU's tensors, in SGLang's format."""

import io
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions


def serialize_handles(named_tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """What `UpdateWeightsFromTensorReqInput.serialized_named_tensors[tp_rank]` takes; the tensors,
    whose memory is named in it, must stay until the reply.
    """
    buffer = io.BytesIO()
    _HandlePickler(buffer).dump(named_tensors)
    return buffer.getvalue()


class _HandlePickler(ForkingPickler):
    """Keeps SGLang's patch of torch's reductions from CPU tensors, which it breaks (0.5.14)."""

    def reducer_override(self, obj: Any) -> Any:
        original = getattr(reductions, "_reduce_tensor_original", None)
        return (
            NotImplemented if original is None or type(obj) is not torch.Tensor else original(obj)
        )
