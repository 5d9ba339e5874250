"""On a real GPU: speculative decoding around syncs; the engine sleeps, and its graphs stay.

    pytest -m gpu -rP tests/gpu/test_speculative_gpu.py     # prints the accept lengths

`tests/e2e/test_speculative.py` runs the same on a CPU, where nothing is released.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.speculative_steps import SYNCS, check_accept_lengths
from support.trainer import ON_GPUS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: memory saver"),
]


@pytest.mark.parametrize("algorithm", SYNCS)
def test_drafts_are_accepted_as_long_as_they_fit(algorithm: str, tmp_path: Path) -> None:
    check_accept_lengths(
        algorithm,
        tmp_path,
        num_tokens=64,
        device="cuda",
        host_backup="auto",
        extra=("--max-total-tokens", "4096"),
        step_options=ON_GPUS,
    )
