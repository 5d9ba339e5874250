"""`verl-sglang-sync doctor`: is this installation complete, loaded, tested, and what would it do?

Importing this package imports neither verl nor sglang; what needs them is looked at in processes of
its own (`*_probe.py`), because that is how verl and SGLang load the plugins.
"""

from verl_sglang_sync.doctor.check import Check, Status
from verl_sglang_sync.doctor.diagnosis import diagnose

__all__ = ["Check", "Status", "diagnose"]
