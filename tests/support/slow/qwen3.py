"""Qwen3 whose forward pass takes long enough for a weight sync to come between two tokens."""

import time
from typing import Any

from sglang.srt.models import qwen3

FORWARD_S = 0.2  # of a rollout 13 s, longer than a step of training on a busy machine


class Qwen3ForCausalLM(qwen3.Qwen3ForCausalLM):  # type: ignore[misc]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(FORWARD_S)
        return super().forward(*args, **kwargs)


EntryClass = Qwen3ForCausalLM
