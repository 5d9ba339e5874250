"""Trainer side of verl-sglang-sync: plans, packs and sends weights, stages the engine's memory.

Importing this package imports neither verl nor sglang. verl loads `verl_plugin` through its entry
point; scripts import `verl_sglang_sync.sharding_manager` directly.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
