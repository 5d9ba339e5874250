"""Speculative decoding around syncs on a CPU, where Triton's interpreter runs SGLang's kernels."""

import pytest

from support.speculative import check_accept_lengths

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

INTERPRETED = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "support.interpreted"}


def test_a_frozen_draft_is_accepted_while_it_fits(tmp_path):
    check_accept_lengths(
        "EAGLE",
        tmp_path,
        num_tokens=9,
        extra=("--attention-backend", "triton"),
        variables=INTERPRETED,
    )
