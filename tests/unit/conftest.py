"""Processes that several test files share."""

import pytest
import torch
import torch.distributed as dist

from sglang_loader.common.session.folder import SessionFolder
from unit.trainer_ranks import RankPool


@pytest.fixture(scope="session", autouse=True)
def memory_is_shared_by_name():
    """As on any trainer on a CPU: torch's default moves a storage when it is shared by name."""
    torch.multiprocessing.set_sharing_strategy("file_system")


@pytest.fixture
def new_endpoint():
    """Makes addresses for sockets that an engine connects to."""
    return SessionFolder().new_endpoint


@pytest.fixture
def world_of_one():
    """A gloo group of this one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """Four trainer ranks on gloo; started at the first use."""
    ranks = RankPool(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()
