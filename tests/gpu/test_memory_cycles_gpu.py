"""On a real GPU: 50 sleeps of all tags and wake-ups leave no trace, for five families of models.

Each model is served once, with its CUDA graphs under a tag of their own, and is sent unchanged
weights at each wake-up in mode `compiled`. Greedy tokens and log-probabilities come from replayed
graphs, so that a graph that read from a moved or unmapped address would show.

`tests/e2e/test_memory_cycles.py` runs the same steps on a CPU, where no memory is ever lost.
"""

import re
import statistics

import pytest

from support.memory_cycles import ALL_TAGS, CYCLE_MODELS, check_cycles

NUM_CYCLES = 50
MIB = 1 << 20
MAX_LOST_BYTES = 32 * MIB
"""Less than one 2 MiB mapping a cycle."""


@pytest.mark.parametrize("name", CYCLE_MODELS)
def test_fifty_cycles_leave_no_trace(name, tmp_path):
    seen = check_cycles(name, tmp_path, device="cuda", num_cycles=NUM_CYCLES)
    graphs = set(re.findall(r"Decode batch.*cuda graph: (\w+)", seen["log"]))
    assert graphs == {"True"}, "tokens came from replayed graphs"
    assert seen["policy"] == "auto"
    assert seen["lost_gpu_bytes"] < MAX_LOST_BYTES
    for tag in ALL_TAGS:  # each has memory of its own, as much as the reply to its release tells
        freed, told = seen["freed"][tag]["freed"], seen["freed"][tag]["told"]
        assert freed > 0
        assert abs(freed - told) < 2 * MIB, (tag, seen["freed"])
    seconds = seen["seconds"]
    print(name, {key: statistics.median(each[key] for each in seconds) for key in seconds[0]})
