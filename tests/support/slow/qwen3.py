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

_fast_passes, _slow_passes = BATCH_PASSES, SLOW_PASSES  # that are left
_is_training = False  # as of the last pass


def _seconds() -> float:
    """How long the next pass takes."""
    global _fast_passes, _slow_passes, _is_training
    if "TRAINING" not in os.environ:
        return PASS_S
    was_training, _is_training = _is_training, Path(os.environ["TRAINING"]).exists()
    if was_training and not _is_training:
        _fast_passes, _slow_passes = BATCH_PASSES, SLOW_PASSES
    if _is_training:
        return SLOW_PASS_S
    if not _fast_passes and not _slow_passes:
        _fast_passes, _slow_passes = MORE_PASSES, SLOW_PASSES
    if _fast_passes:
        _fast_passes -= 1
        return PASS_S
    _slow_passes -= 1
    return SLOW_PASS_S


class Qwen3ForCausalLM(qwen3.Qwen3ForCausalLM):  # type: ignore[misc]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(_seconds())
        return super().forward(*args, **kwargs)


EntryClass = Qwen3ForCausalLM
