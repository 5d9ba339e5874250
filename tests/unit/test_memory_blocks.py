"""Memory as other processes map it: names of blocks, and what cannot be shared."""

import pytest
import torch

from sglang_loader.common.shared_memory import share_on_host
from verl_sglang_sync.sources.memory_blocks import Block, BlockNames, share_block


def test_a_freed_storages_block_gets_another_name():
    names = BlockNames()
    tensor = torch.ones(64).share_memory_()
    other = torch.ones(64).share_memory_()
    block = Block.of(tensor.untyped_storage())
    name = names.name_of(block, tensor.untyped_storage())
    assert names.name_of(block, tensor.untyped_storage()) == name
    del tensor
    assert names.name_of(block, other.untyped_storage()) != name


@pytest.mark.parametrize(
    ("said", "num_attempts"),
    (("Shared memory manager connection has timed out", 3), ("no space left on device", 1)),
)
def test_a_busy_shared_memory_manager_is_asked_again(monkeypatch, said, num_attempts):
    asked, share = [], torch.Tensor.share_memory_

    def share_memory(tensor):
        asked.append(tensor)
        if len(asked) < 3:
            raise RuntimeError(said)
        return share(tensor)

    monkeypatch.setattr(torch.Tensor, "share_memory_", share_memory)
    if num_attempts == 1:
        with pytest.raises(RuntimeError, match=said):
            share_on_host(torch.ones(64))
    else:
        assert share_on_host(torch.ones(64)).is_shared()
    assert len(asked) == num_attempts


def test_memory_of_this_process_alone_is_refused():
    storage = torch.ones(4).untyped_storage()
    with pytest.raises(ValueError, match="only shared memory"):
        share_block(Block.of(storage), storage)
