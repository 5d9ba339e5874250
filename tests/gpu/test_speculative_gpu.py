"""On a real GPU: speculative decoding around syncs; the engine sleeps, and its graphs stay.

    pytest -m gpu -rP tests/gpu/test_speculative_gpu.py     # prints the accept lengths

`tests/e2e/test_speculative.py` runs the same on a CPU, where nothing is released.
"""

import pytest

from support.speculative import SYNCS, check_accept_lengths
from support.trainer import ON_GPUS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("algorithm", SYNCS)
def test_drafts_are_accepted_as_long_as_they_fit(algorithm, tmp_path):
    check_accept_lengths(
        algorithm,
        tmp_path,
        num_tokens=64,
        device="cuda",
        host_backup="auto",
        extra=("--max-total-tokens", "4096"),
        ranks_on=ON_GPUS,
    )
