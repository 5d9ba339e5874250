"""Qwen3 whose tokens take their time: a weight sync comes between two of them.

While the file is there that the environment variable `TRAINING` names, they take longer. However
slow the machine is, a rollout that has begun before a step of training has then not ended when that
step's sync comes.
"""

import os
import time
from pathlib import Path
from typing import Any

from sglang.srt.models import qwen3

FORWARD_S, FORWARD_WHILE_TRAINING_S = 0.2, 1.0


class Qwen3ForCausalLM(qwen3.Qwen3ForCausalLM):  # type: ignore[misc]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        is_training = "TRAINING" in os.environ and Path(os.environ["TRAINING"]).exists()
        time.sleep(FORWARD_WHILE_TRAINING_S if is_training else FORWARD_S)
        return super().forward(*args, **kwargs)


EntryClass = Qwen3ForCausalLM
