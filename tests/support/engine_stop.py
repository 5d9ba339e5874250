"""A custom weight loader that loads nothing: the engine stops itself when it next loads weights.

Its processes stop by SIGSTOP as they enter the model's own `load_weights`; whoever asked for it
sends SIGCONT.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

STOP_LOADER = "support.engine_stop.stop_in_next_load"


def stop_in_next_load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Wrap the model's `load_weights`; the wrapper stops once, whoever keeps it."""
    original = model.load_weights
    has_stopped = False

    def load_weights(*arguments: Any, **options: Any) -> Any:
        nonlocal has_stopped
        vars(model).pop("load_weights", None)  # the class's own comes to light again
        if not has_stopped:
            has_stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(*arguments, **options)

    model.load_weights = load_weights
