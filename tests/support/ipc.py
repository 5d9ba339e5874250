"""Handles with which an SGLang scheduler process maps the trainer's tensors, in SGLang's format."""

from __future__ import annotations

import io
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions


def serialize_handles(named_tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """Serialize `[(name, tensor), ...]` for one TP rank's entry of an update request.

    CUDA tensors travel as IPC handles (no byte is copied; the tensors must stay alive and unchanged
    until the reply), CPU tensors as names of shared memory.

    Args:
        named_tensors: tensors on this process's device; detached before serialising.

    Returns:
        What `UpdateWeightsFromTensorReqInput.serialized_named_tensors[tp_rank]` takes.
    """
    if any(tensor.is_cuda for _, tensor in named_tensors):
        # Sends the GPU's UUID in place of its index, which differs between the two processes.
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
    buffer = io.BytesIO()
    _HandlePickler(buffer).dump([(name, t.detach()) for name, t in named_tensors])
    return buffer.getvalue()


class _HandlePickler(ForkingPickler):
    """Keeps SGLang's patch of torch's reductions from CPU tensors, which it breaks (0.5.14)."""

    def reducer_override(self, obj: Any) -> Any:
        original = getattr(reductions, "_reduce_tensor_original", None)
        if original is None or type(obj) is not torch.Tensor or obj.is_cuda:
            return NotImplemented
        return original(obj)
