"""megatron-core and its bridges without a GPU.

Only what stands in for CUDA is here (and for Transformer Engine in `transformer_engine`): the
models, the bridges and all collectives are upstream's.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._device import _device_constructors

PARAMETERS_ALONE = {
    "perform_initialization": False,  # the weights are loaded
    "sequence_parallel": False,
    "moe_permute_fusion": False,
    "gradient_accumulation_fusion": False,
}
"""What a TransformerConfig must say where layers have no kernels."""


INITIALIZED_ON_CPU = {"perform_initialization": True, "use_cpu_initialization": True}
"""Besides that for mbridge: what is cut across TP it knows by a mark that initialisation leaves."""


def stand_in_for_cuda() -> None:
    """Let code that names CUDA outright run on the CPU, in this process, for good."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.nn.Module.cuda = lambda self, *_: self  # type: ignore[assignment,method-assign]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    # Seeds CUDA's generator; models are initialised on the CPU and then loaded anyway.
    tensor_parallel.model_parallel_cuda_manual_seed = lambda *_: None
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = torch.cpu.Stream()
    torch.cuda.Stream = torch.cuda.current_stream = _NoStream  # type: ignore[assignment,misc]
    torch.cuda.stream = lambda _: nullcontext()  # type: ignore[assignment,misc,return-value]
    RngTracker = tensor_parallel.random.CudaRNGStatesTracker
    RngTracker.fork = lambda *_, **__: nullcontext()  # nothing that trains here draws numbers
    _device_constructors()  # `with torch.device(...)` remembers the functions that it finds
    for make in ("tensor", "zeros", "empty"):
        setattr(torch, make, _made_on_the_cpu(getattr(torch, make)))
    tensor_type = torch.Tensor.type
    torch.Tensor.type = lambda self, *to, **how: (  # type: ignore[method-assign]
        tensor_type(self, *to, **how)
        if to or how
        else tensor_type(self).replace("torch.", "torch.cuda.")  # Megatron's optimizer asks
    )
    _scatter_contiguous()


def _made_on_the_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As `torch.zeros`, and others that are told a device; no memory is pinned without a GPU."""

    def made(*args: Any, device: Any = None, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        return make(*args, device="cpu" if device == "cuda" else device, **how)

    return made


class _NoStream:
    """What runs on a CPU runs in order."""

    def wait_stream(self, _: Any) -> None:
        """Nothing to do."""


def _scatter_contiguous() -> None:
    """gloo scatters memory as it lies, and ignores strides: half of a row-parallel weight is a
    view.
    """
    scatter = torch.distributed.scatter

    def scatter_copies(tensor: Any, scatter_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        copies = scatter_list and [each.contiguous() for each in scatter_list]
        return scatter(tensor, copies, *args, **kwargs)

    torch.distributed.scatter = scatter_copies
