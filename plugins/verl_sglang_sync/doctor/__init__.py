"""`verl-sglang-sync doctor`: is this installation complete and loaded, and what would it do here?

A check is one function that returns a `Check`. What needs verl, sglang or the GPU is looked at in
a process of its own (`run_probe`), so that it starts as verl's and SGLang's processes do.
"""

from verl_sglang_sync.doctor.check import Check, Status
from verl_sglang_sync.doctor.report import diagnose

__all__ = ["Check", "Status", "diagnose"]
