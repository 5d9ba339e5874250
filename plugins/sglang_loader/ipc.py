"""Handles with which an SGLang scheduler process maps the trainer's tensors, in SGLang's format."""

from __future__ import annotations

from typing import Any

import torch


def serialize_handles(named_tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """Serialize `[(name, tensor), ...]` for one TP rank's entry of an update request.

    CUDA tensors travel as IPC handles (no byte is copied; the tensors must stay alive and unchanged
    until the reply), CPU tensors as names of shared memory.

    Args:
        named_tensors: tensors on this process's device; detached before serialising.

    Returns:
        What `UpdateWeightsFromTensorReqInput.serialized_named_tensors[tp_rank]` takes.
    """
    serializer = _serializer(any(tensor.is_cuda for _, tensor in named_tensors))
    payload: bytes = serializer.serialize([(name, t.detach()) for name, t in named_tensors])
    return payload


def _serializer(uses_cuda: bool) -> Any:
    from sglang.srt.utils import MultiprocessingSerializer

    if uses_cuda:
        # Sends the GPU's UUID in place of its index, which differs between the two processes.
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
    return MultiprocessingSerializer
