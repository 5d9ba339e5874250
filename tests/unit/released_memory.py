"""A small model with residue, and memory that is really lost: every byte of it is poisoned."""

import torch
from torch import nn

from sglang_loader.common.regions.intervals import num_bytes
from sglang_loader.host_backup.allocations import bytes_at
from sglang_loader.load_plan.destinations import collect_destinations
from support.reachable_memory import reachable

POISON = 0xFF  # NaN in every float type, -1 in every integer


class Residue(nn.Module):
    """What SGLang's models keep besides parameters: buffers, attributes, containers, views."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(33, 7)
        self.tied = nn.Linear(33, 7, bias=False)
        self.tied.weight = self.linear.weight
        self.low = nn.Parameter(torch.randn(5, 3).to(torch.bfloat16), requires_grad=False)
        self.register_buffer("rotary", torch.randn(64, 8), persistent=False)
        self.derived = self.low.data.float() + 1  # a plain attribute
        self.by_name = {"w_kc": torch.randn(4, 4), "deep": [torch.arange(5), (torch.ones(3),)]}
        self.view = self.rotary[3:5]
        self.counter = torch.tensor(3)


def poison(model):
    """Lose the content of everything that the model reaches."""
    memory = reachable(model)
    for start, stop in memory.ranges:
        bytes_at(memory.device, start, stop).fill_(POISON)


def contents(destinations):
    return {
        storage.name: destinations.memory[i].numpy().tobytes()
        for i, storage in enumerate(destinations.storages)
    }


def overwrite(destinations, written):
    """What a sync does with the bytes that it covers: sets each to 0x5A."""
    numbers = {storage.name: i for i, storage in enumerate(destinations.storages)}
    for name, ranges in written.items():
        for start, stop in ranges:
            destinations.memory[numbers[name]][start:stop].fill_(0x5A)


def whole(model, *names):
    """A coverage of whole storages, by key."""
    sizes = {storage.name: storage.nbytes for storage in collect_destinations(model).storages}
    return {name: [(0, sizes[name])] for name in names}


def size_of(model):
    return num_bytes(reachable(model).ranges)
