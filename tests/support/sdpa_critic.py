"""Lets verl train a critic where flash-attn is not installed.

verl imports this module in all its processes where `VERL_USE_EXTERNAL_MODULES` names it.
"""

from cpu_platform import load_critics_without_flash_attention

load_critics_without_flash_attention()
