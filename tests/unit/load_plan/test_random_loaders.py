"""A plan that is accepted does what `load_weights` does, for loaders and buckets made at random."""

from random import Random

import torch

from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.session.model_loader import ModelLoader
from support.random_loaders import PARTS, Model, buckets_of, lose_what_is_covered, steps_of
from support.scattered import Scattered

NUM_LOADERS = 1000
BY_TABLE = (2, 4)
"""The syncs that come as shards, by the copy table. The others come as buckets."""


def load_by_table(loader, scattered, buffers, num_mapped):
    """A sync from the shards of trainer ranks, some of which are on another host."""
    num_ranks = scattered.num_ranks
    shards = scattered.shards(buffers, num_mapped=min(num_mapped, num_ranks))
    rounds = loader.plan_table(shards, num_ranks, round_bytes=16)
    loader.load_shards(shards)
    for each in rounds:
        loader.load_round(scattered.sent(each.sent))


def first_difference(seed):
    """None where no plan is accepted, else what differs in a later sync, or ""."""
    random = Random(seed)
    names = [f"t{number}" for number in range(random.randint(2, 4))]
    steps, layouts = steps_of(random, names), buckets_of(random, names)
    model, eager = Model(steps), Model(steps)
    loader, generator = ModelLoader(model), torch.Generator().manual_seed(seed)
    scattered = Scattered(layouts, random.randint(1, 3), seed)
    for sync in range(5):
        if sync:
            lose_what_is_covered(loader.plan)
        loader.start({})
        buffers = []
        for layout in layouts:
            values = torch.randint(1, 99, (layout.nbytes // 4,), generator=generator)
            buffers.append(values.to(torch.float32).view(torch.uint8))
        if sync in BY_TABLE:
            load_by_table(loader, scattered, buffers, num_mapped=random.randint(0, 3))
        for index, (layout, buffer) in enumerate(zip(layouts, buffers, strict=True)):
            if sync not in BY_TABLE:
                loader.load(index, layout, BucketSource.flat(buffer))
            eager.load_weights(iter(layout.views(buffer.clone())))
        assert loader.finish().num_eager == 0 or not sync or loader.plan is None
        if loader.plan is None:
            return None
        if not sync:
            eager.load_state_dict(model.state_dict())  # it was loaded more than once
        for name in PARTS:
            if not torch.equal(getattr(model, name), getattr(eager, name)):
                cuts = [[tensor.name for tensor in layout.tensors] for layout in layouts]
                return f"seed {seed}, sync {sync}: {name} differs: {steps} in buckets {cuts}"
    return ""


def test_every_accepted_plan_loads_what_load_weights_does():
    found = [first_difference(seed) for seed in range(NUM_LOADERS)]
    assert list(filter(None, found)) == []
    assert found.count("") > NUM_LOADERS / 4, "most plans are refused: little is proved"
