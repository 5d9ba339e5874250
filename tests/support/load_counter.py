"""A custom weight loader that counts, inside the engine, how often our loaders really run.

Its one tensor's name is JSON: `{"folder": ..., "nth": ..., "seconds": ...}`. Each call writes the
loads since the last call that succeeded to `<folder>/loads<rank>.json` and has the nth later load
take `seconds` longer.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_loader.hooks import weights as weight_updater_hooks

COUNT_LOADER = "support.load_counter.count_loads"
_state = {"begun": 0, "loads": 0, "nth": 0, "seconds": 0.0}


def count_loads(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Report and start from zero."""
    _wrap(weight_updater_hooks, "serve_session")
    order = json.loads(named_tensors[0][0])
    rank = torch.distributed.get_rank()
    Path(order["folder"], f"loads{rank}.json").write_text(json.dumps(_state["loads"]))
    _state.update(begun=0, loads=0, nth=order["nth"], seconds=order["seconds"])


def _wrap(module: Any, name: str) -> None:
    """The loader is looked up in its module at every request."""
    loader: Callable[..., Any] = getattr(module, name)
    if hasattr(loader, "__wrapped__"):
        return

    @functools.wraps(loader)
    def counting(*arguments: Any, **options: Any) -> Any:
        _state["begun"] += 1
        if _state["begun"] == _state["nth"]:
            time.sleep(_state["seconds"])
        result = loader(*arguments, **options)
        _state["loads"] += 1
        return result

    setattr(module, name, counting)
