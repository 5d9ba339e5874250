"""The steps of `tests/gpu/test_memory_cycles_gpu.py` on a CPU: no memory is lost there, but what a
sync rewrites is poisoned, and every byte must come back.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cycle_checks import check_all
from support.cycle_steps import run_cycles

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_CYCLES = 2


def test_cycles_leave_no_trace(tmp_path: Path) -> None:
    """A derived buffer (weight + 1) must be rewritten as well."""
    seen = run_cycles("gemma2", tmp_path, device="cpu", num_cycles=NUM_CYCLES)
    check_all(seen, NUM_CYCLES)
    assert any("gemma_weight" in name for name in seen["poisoned"]["asleep"]["nan"])
