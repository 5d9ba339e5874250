"""Stands in for the attention kernels that SGLang imports from 0.5.23 on: see `gpu_kernels`."""

from gpu_kernels import names_of

__getattr__ = names_of(__name__)
