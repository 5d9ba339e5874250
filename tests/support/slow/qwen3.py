"""Qwen3 whose tokens take their time: a weight sync comes between two of them.

A step of training trains on one batch while the next one is sampled, and the sync at its end must
find rollouts of the next one halfway, however slow the machine is. The file that the environment
variable `TRAINING` names is there from the begin of a step's training to its end. So a pass is slow
while the file is there, and before it, for some passes, once there were about as many since the
last step as a batch needs to its end. A batch that needs more, because rollouts were interrupted,
has a few quick passes between the slow ones: else it would take minutes.
"""

import os
import time
from pathlib import Path
from typing import Any

from sglang.srt.models import qwen3

PASS_S, SLOW_PASS_S = 0.2, 3.0
BATCH_PASSES = 68  # a rollout has up to 64 tokens
SLOW_PASSES, MORE_PASSES = 5, 17  # in turns, until the training begins

_num_passes = 0  # since the last one in a training


def _seconds() -> float:
    """How long the next pass takes."""
    global _num_passes
    if "TRAINING" not in os.environ:
        return PASS_S
    if Path(os.environ["TRAINING"]).exists():
        _num_passes = 0
        return SLOW_PASS_S
    num_late = _num_passes - BATCH_PASSES
    _num_passes += 1
    is_slow = num_late >= 0 and num_late % (SLOW_PASSES + MORE_PASSES) < SLOW_PASSES
    return SLOW_PASS_S if is_slow else PASS_S


class Qwen3ForCausalLM(qwen3.Qwen3ForCausalLM):  # type: ignore[misc]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(_seconds())
        return super().forward(*args, **kwargs)


EntryClass = Qwen3ForCausalLM
