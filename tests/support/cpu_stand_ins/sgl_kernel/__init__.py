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
