"""Lets verl train with Megatron where Transformer Engine is not installed, or there is no GPU.

verl imports this module in all its processes where `VERL_USE_EXTERNAL_MODULES` names it.
"""

import importlib
import os

from support import transformer_engine
from support.megatron_cpu import stand_in_for_cuda

transformer_engine.install()
if os.environ.get("VERL_PLATFORM") == "cpu":
    importlib.import_module("cpu_platform")  # registers itself
    stand_in_for_cuda()
