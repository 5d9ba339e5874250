"""The steps of `tests/gpu/test_memory_cycles_gpu.py` on a CPU: no memory is lost there, but what a
sync rewrites is poisoned, and every byte must come back.
"""

import pytest

from support.memory_cycles import check_cycles

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_cycles_leave_no_trace(tmp_path):
    """A derived buffer (weight + 1) must be rewritten as well."""
    seen = check_cycles("gemma2", tmp_path, device="cpu", num_cycles=2)
    assert any("gemma_weight" in name for name in seen["nan"])
