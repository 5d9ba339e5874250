"""Shared memory of another process, mapped by name: its bytes, and nothing else of it, are held."""

import gc
from pathlib import Path

import pytest
import torch

from sglang_loader.common.shared_memory import (
    HEADER_NBYTES,
    SHARED_MEMORY,
    CannotMap,
    CpuHandle,
    map_buffer,
    share_on_host,
    share_storage,
)

CPU = torch.device("cpu")
NUM_BLOCKS = 20


@pytest.fixture
def shared():
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield [share_on_host(torch.full((40,), i, dtype=torch.uint8)) for i in range(NUM_BLOCKS)]
    torch.multiprocessing.set_sharing_strategy(strategy)


def num_open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def num_mappings(handle):
    return Path("/proc/self/maps").read_text().count(f"{SHARED_MEMORY}{handle.name}")


def test_mapped_blocks_hold_no_open_files(shared):
    handles = [share_storage(tensor.untyped_storage()) for tensor in shared]
    gc.collect()  # of earlier tests
    num_files = num_open_files()
    mapped = [map_buffer(handle, CPU) for handle in handles]
    assert num_open_files() == num_files
    for tensor, there in zip(shared, mapped, strict=True):
        assert torch.equal(tensor, there)
        tensor.fill_(77)
        assert there.tolist() == [77] * 40, "both are the same memory"


def test_a_dropped_block_is_unmapped(shared):
    handle = share_storage(shared[0].untyped_storage())
    before = num_mappings(handle)
    whole = map_buffer(handle, CPU)
    view = whole[8:]
    del whole
    assert num_mappings(handle) == before + 1 and view.sum() == 0, "a view holds the memory"
    del view
    assert num_mappings(handle) == before


def test_a_file_without_all_bytes_is_refused(shared):
    handle = share_storage(shared[0].untyped_storage())
    size = (SHARED_MEMORY / handle.name.lstrip("/")).stat().st_size
    longer = CpuHandle(nbytes=size - HEADER_NBYTES + 1, name=handle.name)
    with pytest.raises(CannotMap, match=f"has {size} bytes, not {size + 1}"):
        map_buffer(longer, CPU)
