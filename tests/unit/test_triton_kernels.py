"""A kernel that does not work is said to be replaced, once in the log and then in every reply."""

import pytest
import torch

from sglang_loader.common.copies import triton_kernels
from sglang_loader.common.copies.triton_kernels import kernel_works

GPU = torch.device("cuda", 0)


def fails():
    raise RuntimeError("no compiler")


@pytest.mark.parametrize(
    ("device", "triton", "attempt", "why"),
    [
        (torch.device("cpu"), None, fails, None),
        (GPU, "there", lambda: True, None),
        (GPU, "there", lambda: False, "a wrong result"),
        (GPU, "there", fails, "RuntimeError('no compiler')"),
        (GPU, None, fails, "Triton is not installed"),
    ],
)
def test_only_a_working_gpu_kernel_is_used(monkeypatch, caplog, device, triton, attempt, why):
    told = []
    monkeypatch.setattr(triton_kernels, "triton", triton)
    monkeypatch.setattr(triton_kernels, "fallbacks", told)
    works = kernel_works("copies weights", device, attempt)
    assert works == (device == GPU and why is None)
    expected = f"torch copies weights on cuda:0, slower: the Triton kernel fails: {why}"
    assert told == caplog.messages == ([expected] if why else [])
