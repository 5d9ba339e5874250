"""What a copy table quantises is what `load_weights` makes of the quantised tensors, bit for bit.

Weights, shards, loaders and buckets are made at random, with blocks that shards and loaders cut.
"""

import dataclasses
from random import Random
from unittest import mock

import pytest
import torch
from torch import nn

from sglang_loader.common.copies.quantizer import quantized_by_torch
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.quantization import SCALE_SUFFIX, SCALES, VALUES, Quantization
from sglang_loader.load_plan.copy_table import CopyTable
from sglang_loader.load_plan.executor import PlanExecutor
from sglang_loader.session.model_loader import ModelLoader
from support.plan_check import differing, packed, planned, snapshot
from support.scattered import Scattered
from verl_sglang_sync.sources.export_trace import NotTraceable

BLOCK = 4, 8
NUM_CASES = 80


def quantization_of(random):
    return Quantization("torch", BLOCK, random.choice(["bfloat16", "bfloat16", "float32"]))


class Model(nn.Module):
    """Loads a part of each tensor: `parts` has, by name, its rows and columns, and how."""

    def __init__(self, specs, parts):
        super().__init__()
        self.parts = parts
        for name, shape, dtype in specs:
            rows, columns, how = parts[name]
            like = torch.zeros(shape, dtype=dtype)[rows, columns]
            like = like.t().contiguous() if how == "transposed" else like.clone()
            self.register_buffer(name, torch.zeros_like(like))
        # As the loaders of experts: all in one storage.
        self.register_buffer("fused", torch.zeros(8, 4096, dtype=torch.uint8))
        self.numbers = {name: number for number, (name, _, _) in enumerate(specs)}

    @torch.no_grad()
    def load_weights(self, weights):
        for name, tensor in weights:
            rows, columns, how = self.parts[name]
            part, own = tensor[rows, columns], getattr(self, name)
            if how == "transposed":
                own.copy_(part.t())
            elif how == "computed":  # is left to `load_weights`, by way of the scratch memory
                own.copy_(part.to(torch.float32).abs().to(own.dtype))
            elif how == "fused":
                row = self.fused[self.numbers[name] % 8].view(part.dtype)
                row[: part.numel()].view(part.shape).copy_(part)
            else:
                own.copy_(part)


def case(seed):
    """The layouts before, and after quantisation, the loader, and what makes weights."""
    random = Random(seed)
    quantization = quantization_of(random)
    before, quantized = [[]], [[]]
    names = [f"t{number}" for number in range(random.randint(1, 7))]
    for name in names:
        shape = random.randint(1, 30), random.randint(1, 30)
        dtype = random.choice([quantization.dtype, torch.bfloat16, torch.float32])
        before[-1].append((name, shape, dtype))
        if random.random() < 0.25:
            quantized[-1].append((name, shape, dtype))
            continue
        quantized[-1].append((name, shape, VALUES))
        if random.random() < 0.2:  # the scales come in the next bucket
            quantized.append([])
        blocks = [-(-size // block) for size, block in zip(shape, BLOCK, strict=True)]
        quantized[-1].append((name + SCALE_SUFFIX, tuple(blocks), SCALES))
        if random.random() < 0.4:
            before.append([])
            quantized.append([])
    parts = {name: part_of(random, shape) for of in quantized for name, shape, _ in of}
    layouts = [[BucketLayout.pack(bucket) for bucket in of if bucket] for of in (before, quantized)]
    specs = [spec for of in quantized for spec in of]
    return *layouts, quantization, Model(specs, parts)


def part_of(random, shape):
    slices = []
    for size in shape:
        start = random.randint(0, size - 1)
        step = random.choice([1, 1, 1, 2])
        whole = random.random() < 0.5
        stop = random.randint(start + 1, size)
        slices.append(slice(0, size) if whole else slice(start, stop, step))
    return *slices, random.choice(["copied", "copied", "fused", "transposed", "computed"])


def weights_of(layouts, quantized, quantization, seed):
    """The buffers of the buckets, before and after they were quantised."""
    generator = torch.Generator().manual_seed(seed)
    tensors, before = {}, []
    for layout in layouts:
        named = [
            (t.name, torch.randn(t.shape, generator=generator).to(t.dtype)) for t in layout.tensors
        ]
        tensors.update(named)
        before.append(packed(named)[1])
    for name, tensor in list(tensors.items()):
        values, scales = quantized_by_torch(tensor.to(quantization.dtype), quantization)
        tensors[f"{name} in fp8"], tensors[name + SCALE_SUFFIX] = values, scales
    after = []
    for layout in quantized:
        key = [t.name + " in fp8" * (t.dtype == VALUES) for t in layout.tensors]
        pairs = zip(layout.tensors, key, strict=True)
        after.append(packed([(t.name, tensors[k]) for t, k in pairs])[1])
    return before, after


def run(executor, scattered, shards, round_bytes):
    table = executor.table_run(shards, scattered.num_ranks, round_bytes)
    table.begin()
    for each in table.rounds:
        table.load_round(scattered.sent(each.sent))
    assert table.is_complete
    executor.free_scratch()


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_the_table_leaves_what_load_weights_leaves(seed):
    before, quantized, quantization, model = case(seed)
    _, first = weights_of(before, quantized, quantization, 1)
    plan = planned(model, *zip(quantized, first, strict=True))
    executor = PlanExecutor(plan, model.load_weights)
    num_ranks = 1 + seed % 3
    scattered = Scattered(before, num_ranks, seed, quantization, quantized)
    for number in (2, 3):  # the second time with the memory that was bound
        sources, buffers = weights_of(before, quantized, quantization, number)
        for layout, buffer in zip(quantized, buffers, strict=True):
            model.load_weights(iter(layout.views(buffer.clone())))
        expected = snapshot(plan.destinations)
        poison_all(plan)
        shards = scattered.shards(sources, num_mapped=seed % (num_ranks + 1))
        for round_bytes in (1 << 20, 64):  # all in one step, or a row of blocks in each
            run(executor, scattered, shards, round_bytes)
            assert differing(plan.destinations, expected) == ()


def poison_all(plan):
    """Overwrite all that a sync is to write."""
    storages = zip(plan.destinations.storages, plan.destinations.memory, strict=True)
    for storage, memory in storages:
        for start, stop in plan.coverage.get(storage.name, ()):
            memory[start:stop] = 0xA5


def simple(shape=(20, 24), dtype=torch.bfloat16):
    """One tensor that is quantised and loaded as a whole."""
    quantization = Quantization("torch", BLOCK, "bfloat16")
    before = BucketLayout.pack([("t", shape, dtype)])
    blocks = tuple(-(-size // block) for size, block in zip(shape, BLOCK, strict=True))
    quantized = BucketLayout.pack([("t", shape, VALUES), ("t" + SCALE_SUFFIX, blocks, SCALES)])
    whole = slice(None), slice(None), "copied"
    specs = [(t.name, t.shape, t.dtype) for t in quantized.tensors]
    model = Model(specs, {"t": whole, "t" + SCALE_SUFFIX: whole})
    return before, quantized, quantization, model


def test_a_step_quantises_as_much_as_its_limit():
    before, quantized, quantization, model = simple()
    _, buffers = weights_of([before], [quantized], quantization, 1)
    plan = planned(model, (quantized, buffers[0]))
    weight_map = Scattered([before], 1, 0, quantization, [quantized])._weight_map
    row = BLOCK[0] * 24 * 2  # the bytes of one row of blocks
    for limit, num in ((5 * row, 1), (5 * row - 1, 2), (2 * row, 3), (row, 5), (1, 5)):
        table = CopyTable.of(plan, weight_map, limit)
        parts = [step.quantized for step in table.steps]
        assert len(parts) == num
        sizes = [sum(m.rows * m.columns * 2 for m in part.matrices) for part in parts]
        assert sum(sizes) == 5 * row and max(sizes) <= max(limit, row)


def test_a_table_without_one_matrix_is_noticed():
    before, quantized, quantization, model = simple()
    sources, buffers = weights_of([before], [quantized], quantization, 1)
    plan = planned(model, (quantized, buffers[0]))
    expected = snapshot(plan.destinations)
    scattered = Scattered([before], 1, 0, quantization, [quantized])
    shards = scattered.shards(sources)
    table = CopyTable.of(plan, shards.weight_map, 200)
    for memory in plan.destinations.memory:
        memory.fill_(0xA5)
    [step, *others] = table.steps
    part = dataclasses.replace(step.quantized, matrices=())
    broken = CopyTable((dataclasses.replace(step, quantized=part), *others))
    with mock.patch.object(CopyTable, "of", lambda *_: broken):
        run(PlanExecutor(plan, model.load_weights), scattered, shards, 1 << 20)
    assert differing(plan.destinations, expected)


def test_scratch_memory_is_freed_between_syncs():
    before, quantized, quantization, model = simple()
    sources, buffers = weights_of([before], [quantized], quantization, 1)
    plan = planned(model, (quantized, buffers[0]))
    executor = PlanExecutor(plan, model.load_weights)
    scattered = Scattered([before], 1, 0, quantization, [quantized])
    shards = scattered.shards(sources)
    run(executor, scattered, shards, 1 << 20)
    [bound] = executor._bound_steps.values()
    assert bound.scratch.untyped_storage().nbytes() == 0
    run(executor, scattered, shards, 1 << 20)


@pytest.mark.parametrize("misses", ["scales", "matrix"])
def test_what_no_engine_can_quantise_is_not_planned(misses):
    before, quantized, quantization, _ = simple()
    if misses == "scales":
        quantized = BucketLayout.pack([("t", (20, 24), VALUES)])
    else:
        before = BucketLayout.pack([("t", (2, 10, 24), torch.bfloat16)])
        quantized = BucketLayout.pack(
            [("t", (2, 10, 24), VALUES), ("t" + SCALE_SUFFIX, (5, 3), SCALES)]
        )
    with pytest.raises(NotTraceable, match="engines quantise matrices alone"):
        Scattered([before], 1, 0, quantization, [quantized])


def test_other_shapes_than_the_quantisers_are_refused():
    before, _, quantization, _ = simple()
    wrong = BucketLayout.pack([("t", (20, 24), VALUES), ("t" + SCALE_SUFFIX, (5, 2), SCALES)])
    scattered = Scattered([before], 1, 0, quantization, [wrong])
    whole = slice(None), slice(None), "copied"
    specs = [(t.name, t.shape, t.dtype) for t in wrong.tensors]
    model = Model(specs, {"t": whole, "t" + SCALE_SUFFIX: whole})
    plan = planned(model, (wrong, torch.zeros(wrong.nbytes, dtype=torch.uint8)))
    with pytest.raises(ValueError, match=r"is not what .* is quantised to"):
        CopyTable.of(plan, scattered._weight_map, 1 << 20)


def test_without_a_plan_nothing_is_loaded():
    """`load_weights` cannot load what is not quantised; the trainer exports instead."""
    from sglang_loader.common.session.messages import SessionError

    before, quantized, quantization, model = simple()
    sources, _ = weights_of([before], [quantized], quantization, 1)
    shards = Scattered([before], 1, 0, quantization, [quantized]).shards(sources)
    loader = ModelLoader(model)
    loader.start({})
    with pytest.raises(SessionError, match="to be quantised by the engine's load plan"):
        loader.plan_table(shards, 1, 1 << 20)
