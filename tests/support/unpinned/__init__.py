"""For SGLang (SGLANG_EXTERNAL_MODEL_PACKAGE) on a host without a GPU: memory is not pinned.

SGLang's LoRA layers pin small tensors, which needs an NVIDIA driver; the rest of them runs on a CPU
with `lora_backend=torch_native`.
"""

from collections.abc import Callable
from typing import Any

import torch

MAKERS = ("tensor", "empty", "zeros", "arange")


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return make(*args, **kwargs)

    return made


for maker in MAKERS:
    setattr(torch, maker, _unpinned(getattr(torch, maker)))
torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign, assignment]
