"""All tests of this folder need NVIDIA GPUs, and skip with a reason where there are too few: one,
or as many as their `tp`, or `pytest.mark.gpu(number)`.
"""

from pathlib import Path

import pytest
import torch

NUM_GPUS = torch.cuda.device_count()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if not item.path.is_relative_to(Path(__file__).parent):
            continue
        marker, params = item.get_closest_marker("gpu"), getattr(item, "callspec", None)
        needed = max(
            *(marker.args if marker else ()), params.params.get("tp", 1) if params else 1, 1
        )
        item.add_marker("gpu")
        if needed > NUM_GPUS:
            reason = f"needs {needed} NVIDIA GPUs, this machine has {NUM_GPUS}"
            item.add_marker(pytest.mark.skip(reason=reason))
