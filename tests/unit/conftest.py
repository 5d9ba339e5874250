"""Processes that several test files share."""

import pytest

from unit.trainer_ranks import RankPool


@pytest.fixture(scope="session")
def pool():
    """Four trainer ranks on gloo; started at the first use."""
    ranks = RankPool()
    yield ranks
    ranks.close()
