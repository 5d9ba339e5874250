"""On a real GPU: 50 sleeps of all tags and wake-ups leave no trace, for five families of models.

Each model is served once, with its CUDA graphs under a tag of their own, and is sent unchanged
weights at each wake-up in mode `compiled`. Greedy tokens and log-probabilities come from replayed
graphs, so that a graph that read from a moved or unmapped address would show.

`tests/e2e/test_memory_cycles.py` runs the same steps on a CPU, where no memory is ever lost.
"""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from support.cycle_checks import check_cycles, check_poisoned_cycle, check_stray, check_syncs
from support.cycle_models import CYCLE_MODELS
from support.cycle_steps import ALL_TAGS, run_cycles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: memory saver"),
]

NUM_CYCLES = 50
MIB = 1 << 20
MAX_LOST_BYTES = 32 * MIB
"""Less than one 2 MiB mapping a cycle."""


@pytest.mark.parametrize("name", CYCLE_MODELS)
def test_fifty_cycles_leave_no_trace(name: str, tmp_path: Path) -> None:
    seen = run_cycles(name, tmp_path / name, device="cuda", num_cycles=NUM_CYCLES)
    check_syncs(seen)
    check_graphs(seen)
    check_poisoned_cycle(seen)
    check_cycles(seen, NUM_CYCLES)
    check_stray(seen)
    assert seen["last"]["policy"] == "auto"
    assert seen["log"].count("were allocated under the tag 'weights' since the first") == 1
    assert seen["lost_gpu_bytes"] < MAX_LOST_BYTES
    check_freed_bytes(seen)
    print(name, _medians(seen))


def check_graphs(seen: dict[str, Any]) -> None:
    """Tokens came from replayed graphs."""
    assert set(re.findall(r"Decode batch.*cuda graph: (\w+)", seen["log"])) == {"True"}


def check_freed_bytes(seen: dict[str, Any]) -> None:
    """Each tag has memory of its own, as much as the reply to its release tells."""
    for tag in ALL_TAGS:
        freed, told = seen["freed"][tag]["freed"], seen["freed"][tag]["told"]
        assert freed > 0
        assert abs(freed - told) < 2 * MIB, (tag, seen["freed"])


def _medians(seen: dict[str, Any]) -> dict[str, float]:
    seconds = [cycle["seconds"] for cycle in seen["cycles"]]
    return {
        stage: round(statistics.median(each[stage] for each in seconds), 4) for stage in seconds[0]
    }
