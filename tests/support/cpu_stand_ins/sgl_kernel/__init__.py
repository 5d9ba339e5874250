"""Stands in for SGLang's own kernels: see `gpu_kernels`.

From torch 2.13 on `torch.get_device_module()` is `torch.cuda` where there is no GPU, and SGLang
synchronises it when memory is released: what has no GPU's kernels has no GPU's streams either.
"""

import torch
from gpu_kernels import names_of

__getattr__ = names_of(__name__)

_original = torch.get_device_module
if _original() is not torch.cpu:
    torch.get_device_module = lambda device=None: _original("cpu" if device is None else device)

# Qwen3.5 takes these from torch as it is imported, wherever there is no GPU.
for _name in (
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
):
    torch.library.define(f"sgl_kernel::{_name}", "() -> ()")
