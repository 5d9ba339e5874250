"""Loaders and buckets made at random, for the tests of load plans."""

import torch
from torch import nn

from sglang_loader.common.layout import BucketLayout

LENGTH = 4
PARTS = ("a", "b", "c")
KINDS = ("copy", "index", "zero", "double", "add")


class Model(nn.Module):
    """Its loader takes steps `(kind, target, from, to, source)` when it is called, when a tensor of
    that name comes, and when it has come through, as `steps` has them under "", a name and "end".
    """

    def __init__(self, steps):
        super().__init__()
        for number, name in enumerate(PARTS):
            self.register_buffer(name, torch.arange(LENGTH) + 10.0 * number)
        self.steps = steps

    @torch.no_grad()
    def load_weights(self, weights):
        self._take("", None)
        for name, tensor in weights:
            self._take(name, tensor)
        self._take("end", None)

    def _take(self, when, tensor):
        for kind, target, start, stop, source in self.steps[when]:
            to, of = (getattr(self, name)[start:stop] for name in (target, source))
            came = None if tensor is None else tensor[start:stop]
            if kind == "zero":
                to.zero_()
            elif kind == "double":
                to.copy_(of * 2)
            elif came is not None and kind == "copy":
                to.copy_(came)
            elif came is not None and kind == "index":
                to[torch.arange(len(to))] = came
            elif came is not None:
                to.copy_(of * 2 + came)


def steps_of(random, names):
    def step():
        start, stop = random.choice([(0, 2), (1, 3), (2, 4), (0, 4)])
        [kind] = random.choices(KINDS, (6, 1, 1, 1, 2))
        return kind, random.choice(PARTS), start, stop, random.choice(PARTS)

    most = {"": 1, "end": 1, **dict.fromkeys(names, 2)}
    return {when: [step() for _ in range(random.randint(0, num))] for when, num in most.items()}


def buckets_of(random, names):
    cut = [name for name in names[1:] if random.random() < 0.6]
    buckets = [[]]
    for name in names:
        buckets += [[]] if name in cut else []
        buckets[-1].append((name, (LENGTH,), torch.float32))
    return [BucketLayout.pack(bucket) for bucket in buckets]


def lose_what_is_covered(plan):
    """As a release does, before which only the rest was saved."""
    for storage, memory in zip(plan.destinations.storages, plan.destinations.memory, strict=True):
        for start, stop in plan.coverage.get(storage.name, ()):
            memory[start:stop] = 0x5A
