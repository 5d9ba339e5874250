"""A bucket's bytes as pieces: the same replay as from one buffer, and what is refused."""

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sglang_loader.common.bucket_source import BucketMap, BucketPiece, BucketSource
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.compose import ByteMap
from sglang_loader.common.regions.geometry import Region, StridedCopy, Unit
from sglang_loader.load_plan.executor import PlanExecutor
from support.plan_check import packed, planned

SHAPES = [("q", (4, 8)), ("k", (2, 8)), ("v", (2, 8)), ("o", (8, 4)), ("n", (8,))]
LAYOUT = BucketLayout.pack([(name, shape, torch.float32) for name, shape in SHAPES])


NAMES = [name for name, _ in SHAPES]


class Model(nn.Module):
    """Fuses q, k, v, transposes o, and changes n in place, of which it then reads a part, too."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(8, 8), requires_grad=False)
        self.o = nn.Parameter(torch.zeros(4, 8), requires_grad=False)
        self.n = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.first = nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights):
        rows = {"q": (0, 4), "k": (4, 6), "v": (6, 8)}
        for name, tensor in weights:
            if name in rows:
                start, stop = rows[name]
                self.qkv.data[start:stop].copy_(tensor)
            elif name == "o":
                self.o.data.copy_(tensor.t())
            else:
                self.n.data.copy_(tensor.add_(1))
                self.first.data.copy_(tensor[:4])


def random_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _, shape in SHAPES]


def executor_of(model):
    """Replays what the model does with the bucket."""
    zeros = torch.zeros(LAYOUT.nbytes, dtype=torch.uint8)
    return PlanExecutor(planned(model, (LAYOUT, zeros)), model.load_weights)


def check_loaded(model, tensors):
    """The model has what its own loader makes of them."""
    expected = Model().to(model.n.dtype)
    expected.load_weights(zip(NAMES, (tensor.clone() for tensor in tensors), strict=True))
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def in_pieces(tensors, cuts):
    """The bucket, parted before any of its elements, each part in memory of its own."""
    _, buffer = packed(zip(NAMES, tensors, strict=True))
    ends = [0, *sorted(4 * cut for cut in cuts), LAYOUT.nbytes]
    pairs = itertools.pairwise(ends)
    return source_of([(start, buffer[start:stop].clone()) for start, stop in pairs])


def source_of(parts):
    """Pieces that begin at these bytes, each all of a memory."""
    pieces = [BucketPiece(i, 0, start, len(memory)) for i, (start, memory) in enumerate(parts)]
    return BucketSource(BucketMap(pieces), dict(enumerate(memory for _, memory in parts)))


def spread(tensors, axes):
    """Each tensor parted along an axis into two shards, in memory of their own; None: it is not."""
    pieces, memories = [], []
    for entry, tensor, axis in zip(LAYOUT.tensors, tensors, axes, strict=True):
        if axis is None:
            pieces.append(BucketPiece(len(memories), 0, entry.offset, tensor.nbytes))
            memories.append(tensor.clone().view(-1).view(torch.uint8))
            continue
        axis %= tensor.dim()
        halves = torch.stack(tensor.chunk(2, axis))  # the shards, one behind the other
        order = halves.movedim(0, axis)
        region = Region(0, tuple(order.shape), tuple(order.stride()), tensor.element_size())
        shards = tuple((len(memories) + i, 0, half.nbytes) for i, half in enumerate(halves))
        dims = ByteMap.of(region).dims
        pieces.append(BucketPiece(len(memories), 0, entry.offset, tensor.nbytes, dims, shards))
        memories += [half.clone().view(-1).view(torch.uint8) for half in halves]
    return BucketSource(BucketMap(pieces), dict(enumerate(memories)))


CUTS = st.sets(st.integers(1, LAYOUT.nbytes // 4 - 1), max_size=9)
AXES = st.tuples(*[st.sampled_from([None, 0, 1])] * len(SHAPES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(CUTS | AXES, st.integers(0, 1000))
def test_a_replay_from_pieces_equals_eager_load(dtype, parts, seed):
    """Row-parallel weights among them; also where the model has another dtype."""
    model, tensors = Model().to(dtype), random_tensors(seed)
    executor = executor_of(model)
    source = (in_pieces if isinstance(parts, set) else spread)(tensors, parts)
    for _ in range(2):  # neither leaves anything in what the next one reads
        executor.replay(0, source)
        check_loaded(model, tensors)
    views = LAYOUT.views(source.packed(LAYOUT))
    assert all(torch.equal(view, t) for (_, view), t in zip(views, tensors, strict=True))


@pytest.mark.parametrize("odd", [0, 1, 2, 4])
def test_misaligned_elements_are_copied_right_or_refused(odd):
    """Words may be as narrow as it takes; what is cast has elements."""
    tensors = random_tensors(1)
    _, whole = packed(zip(NAMES, tensors, strict=True))
    memory = torch.zeros(odd + LAYOUT.nbytes, dtype=torch.uint8)[odd:]
    source = source_of([(0, memory.copy_(whole))])
    for dtype in (torch.float32, torch.float64):
        model = Model().to(dtype)
        if dtype is not torch.float32 and odd % 4:
            with pytest.raises(ValueError, match="float32 at byte"):
                executor_of(model).replay(0, source)
            continue
        executor_of(model).replay(0, source)
        check_loaded(model, tensors)


def test_a_row_parallel_shard_is_one_copy():
    shards = (3, 0, 64), (1, 32, 64)
    piece = BucketPiece(3, 0, 0, 128, ((16, 4), (2, 64), (4, 1)), shards)  # [16, 8] bytes
    parts = list(BucketMap([piece]).copies(StridedCopy(0, 0, 0, (), 128)))
    assert [(number, copy.dims, copy.run, copy.src, copy.dst) for copy, number in parts] == [
        (3, ((16, 4, 8),), 4, 0, 0),
        (1, ((16, 4, 8),), 4, 32, 4),
    ]


def test_no_element_is_split_between_shards():
    widened = StridedCopy(0, 0, 0, (), 4, Unit(4, 8, (torch.float32, torch.float64)))
    piece = BucketPiece(0, 0, 0, 16, (), ((0, 0, 6), (1, 0, 10)))
    with pytest.raises(ValueError, match="a shard of 6 bytes ends within"):
        list(BucketMap([piece]).copies(widened))


def test_memory_may_be_another_in_each_replay():
    """Replays read what the memory has, wherever that is, and its map is gone through once."""
    model = Model()
    executor, bucket_map, copies = executor_of(model), None, BucketMap.copies
    for seed in range(3):
        tensors = random_tensors(seed)
        source = spread(tensors, [0, 1, None, 1, 0])
        if bucket_map is None:
            bucket_map = source.map
        with mock.patch.object(BucketMap, "copies", autospec=True, side_effect=copies) as found:
            executor.replay(0, BucketSource(bucket_map, source.memories))
            assert found.called == (seed == 0)
        check_loaded(model, tensors)


def test_a_bucket_without_reads_needs_no_pieces():
    model = nn.Module()
    model.load_weights = list  # of names and tensors
    executor_of(model).replay(0, BucketSource(BucketMap([]), {}))


def test_one_buffer_is_not_copied():
    buffer = torch.zeros(LAYOUT.nbytes + 8, dtype=torch.uint8)
    assert BucketSource.flat(buffer).packed(LAYOUT).data_ptr() == buffer.data_ptr()


def test_every_byte_must_lie_in_a_piece():
    memory = torch.zeros(LAYOUT.nbytes, dtype=torch.uint8)
    torn = source_of([(0, memory[:64]), (68, memory[68:])])
    for source in (torn, BucketSource(BucketMap([]), {})):
        with pytest.raises(ValueError, match="of the bucket are in no piece"):
            source.packed(LAYOUT)
        with pytest.raises(ValueError, match="of the bucket are in no piece"):
            executor_of(Model()).replay(0, source)
    with pytest.raises(ValueError, match="bytes"):
        LAYOUT.views(memory[:8])


def test_pieces_must_be_in_order():
    memory = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="starts at byte 32, its predecessor ends at 64"):
        source_of([(0, memory), (32, memory)])
