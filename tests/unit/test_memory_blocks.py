"""Memory as other processes map it: names of blocks, and what cannot be shared."""

import pytest
import torch

from verl_sglang_sync.sources.memory_blocks import Block, BlockNames, share_block


def test_a_block_gets_a_new_name_when_its_storage_is_gone():
    names = BlockNames()
    tensor = torch.ones(64).share_memory_()
    other = torch.ones(64).share_memory_()
    block = Block.of(tensor.untyped_storage())
    name = names.name_of(block, tensor.untyped_storage())
    assert names.name_of(block, tensor.untyped_storage()) == name
    del tensor
    assert names.name_of(block, other.untyped_storage()) != name


def test_memory_of_this_process_alone_is_refused():
    storage = torch.ones(4).untyped_storage()
    with pytest.raises(ValueError, match="only shared memory"):
        share_block(Block.of(storage), storage)
