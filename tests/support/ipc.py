"""Handles with which an SGLang scheduler process maps a CPU's tensors, in SGLang's format; and
calls of the custom weight loaders of tests, which take such handles.
"""

import io
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from verl_sglang_sync.engine.server_client import operations
from verl_sglang_sync.engine.server_client.client import SGLangServerClient


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


def ask_engine(client: SGLangServerClient, tp: int, loader: str, argument: str = "") -> None:
    """Run one of the tests' loaders on every TP rank of an engine."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    # One tensor for each TP rank, kept until the reply: the first to open a handle consumes it.
    tensors = [torch.zeros(1) for _ in range(tp)]
    handles = [serialize_handles([(argument, tensor)]) for tensor in tensors]
    client.run(operations.update_weights(handles, load_format=loader))
