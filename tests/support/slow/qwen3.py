"""Qwen3 whose tokens take their time: a weight sync comes between two of them.

A step of training trains on one batch while the next one is sampled, and the sync at its end must
find rollouts of the next one halfway, however slow the machine is. The file that the environment
variable `TRAINING` names is there from the begin of a step's training to its end. While it is
there, a pass is slow, and adds a byte to it.
"""

import os
import time
from typing import Any

from sglang.srt.models import qwen3

PASS_S, SLOW_PASS_S = 0.2, 3.0


def _seconds() -> float:
    """How long the next pass takes. It is counted in the file, which another process may delete."""
    try:
        file = os.open(os.environ["TRAINING"], os.O_WRONLY | os.O_APPEND)
    except (KeyError, FileNotFoundError):
        return PASS_S
    os.write(file, b".")
    os.close(file)
    return SLOW_PASS_S


class Qwen3ForCausalLM(qwen3.Qwen3ForCausalLM):  # type: ignore[misc]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(_seconds())
        return super().forward(*args, **kwargs)


EntryClass = Qwen3ForCausalLM
