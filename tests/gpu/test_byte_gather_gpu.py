"""On a GPU: the kernel gathers an arrangement as torch does."""

from __future__ import annotations

import pytest
import torch

from sglang_loader.common.copy_kernel import is_available
from unit.test_byte_gather import check_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_the_compiled_kernel_packs_as_torch_does() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert is_available(device)
    check_kernel(device)
