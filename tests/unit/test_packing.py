"""Both packers, byte for byte: what the engine unpacks is what the trainer exported."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from sglang_loader.bucket_loader import FLATTENED_LOADER, NAMED_LOADER, tensor_views
from sglang_loader.manifest import SyncSequence, decode
from verl_sglang_sync.packing import FlattenedPacker, NamedTensorPacker
from verl_sglang_sync.report import SyncReport

CPU = torch.device("cpu")
PACKERS = {"bucketed": NamedTensorPacker, "flattened": FlattenedPacker}
DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int64,
    torch.uint8,
    torch.bool,
)
both_modes = pytest.mark.parametrize("mode", PACKERS)


def packer_of(mode, bucket_bytes=1024):
    report = SyncReport(mode=mode, replica=0)
    return PACKERS[mode](device=CPU, bucket_bytes=bucket_bytes, report=report), report


def content(tensor):
    """Everything that must arrive: dtype, shape, and the bytes in logical order."""
    raw = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(raw.tolist())


def unpack(parcel):
    """The tensors as the engine's loader sees them."""
    if parcel.load_format == NAMED_LOADER:
        return list(parcel.named_tensors)
    ((text, flat),) = parcel.named_tensors
    return tensor_views(decode(text), flat)


def received(mode, weights, bucket_bytes=1024):
    """Pack `weights` and unpack each parcel while it is valid; contents by name, per bucket."""
    packer, _ = packer_of(mode, bucket_bytes)
    return [
        {name: content(tensor) for name, tensor in unpack(parcel)}
        for parcel in packer.parcels(iter(weights))
    ]


def merged(buckets):
    names = [name for bucket in buckets for name in bucket]
    assert len(names) == len(set(names))
    return {name: item for bucket in buckets for name, item in bucket.items()}


def filled(shape, dtype, seed=0):
    """Random bytes as a tensor; for bool random truth values."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, high, (nbytes,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)


def plain(shape, dtype, seed):
    return filled(shape, dtype, seed)


def transposed(shape, dtype, seed):
    return filled(shape[::-1], dtype, seed).permute(tuple(range(len(shape)))[::-1])


def row_of_a_bigger_one(shape, dtype, seed):
    return filled((3, *shape), dtype, seed)[1]


def every_second_column(shape, dtype, seed):
    return filled((*shape, 2), dtype, seed)[..., 1]


def expanded(shape, dtype, seed):
    return filled(shape[1:], dtype, seed).expand(shape)


LAYOUTS = (plain, transposed, row_of_a_bigger_one, every_second_column, expanded)


@st.composite
def exports(draw):
    weights = []
    for index in range(draw(st.integers(1, 12))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        layout = draw(st.sampled_from(LAYOUTS))
        weights.append((f"model.{index}", layout(shape, draw(st.sampled_from(DTYPES)), index)))
    return weights


@both_modes
@settings(max_examples=60, deadline=None)
@given(weights=exports(), bucket_bytes=st.sampled_from((1, 300, 1024, 1 << 30)))
def test_what_is_unpacked_is_what_was_exported(mode, weights, bucket_bytes):
    expected = {name: content(tensor) for name, tensor in weights}
    assert merged(received(mode, weights, bucket_bytes)) == expected


SHAPES = ((), (0,), (5,), (3, 4), (2, 0, 3), (1, 7, 2))


@both_modes
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout_arrives(mode, layout, dtype):
    weights = [(str(shape), layout(shape, dtype, 3)) for shape in SHAPES]
    expected = {name: content(tensor) for name, tensor in weights}
    assert merged(received(mode, weights)) == expected


def test_the_layouts_are_what_they_say():
    shape = (3, 4)
    made = {layout.__name__: layout(shape, torch.float32, 0) for layout in LAYOUTS}
    assert {name for name, tensor in made.items() if not tensor.is_contiguous()} == {
        "transposed",
        "every_second_column",
        "expanded",
    }
    in_bigger = {n for n, t in made.items() if t.untyped_storage().nbytes() > t.nbytes}
    assert in_bigger == {"row_of_a_bigger_one", "every_second_column"}
    assert all(tensor.shape == shape for tensor in made.values())


def test_the_comparison_sees_one_wrong_bit():
    tensor = filled((3, 4), torch.bfloat16)
    other = tensor.clone()
    other.view(torch.int16)[1, 2] ^= 1
    assert content(tensor) == content(tensor.clone())
    assert content(tensor) != content(other)
    assert content(tensor) != content(tensor.view(torch.float16))


@both_modes
def test_not_a_number_and_negative_zero_keep_their_bits(mode):
    payload = torch.tensor([0x7FC1, 0xFFC2 - 65536, -32768, 0x7F80], dtype=torch.int16)
    weights = [("w", payload.view(torch.bfloat16))]
    assert merged(received(mode, weights))["w"] == content(payload.view(torch.bfloat16))


@both_modes
def test_mixed_dtypes_share_a_bucket(mode):
    weights = [(str(dtype), filled((3,), dtype)) for dtype in DTYPES]
    buckets = received(mode, weights, bucket_bytes=1 << 20)
    assert len(buckets) == 1
    assert merged(buckets) == {name: content(tensor) for name, tensor in weights}


@both_modes
def test_tied_weights_arrive_under_both_names(mode):
    tied = filled((4, 4), torch.float32)
    weights = [("model.embed_tokens.weight", tied), ("lm_head.weight", tied)]
    assert received(mode, weights, bucket_bytes=1) == [{n: content(tied)} for n, _ in weights]


@both_modes
def test_parameters_leave_their_autograd_behind(mode):
    """Megatron at TP 1 exports its parameters, and views of them, as they are."""
    fused = torch.nn.Parameter(filled((8, 4), torch.bfloat16))
    with torch.enable_grad():
        gate, up = fused.chunk(2)
        q_proj = fused.reshape(2, 4, 4)[:, :2].reshape(4, 4)
    assert q_proj.requires_grad and not q_proj.is_leaf
    weights = {"whole": fused, "gate": gate, "up": up, "q_proj": q_proj}
    packer, _ = packer_of(mode)
    for parcel in packer.parcels(weights.items()):
        assert not any(tensor.requires_grad for _, tensor in parcel.named_tensors)
        arrived = {name: content(tensor) for name, tensor in unpack(parcel)}
    assert arrived == {name: content(tensor.detach()) for name, tensor in weights.items()}


@both_modes
def test_a_name_exported_twice_is_refused(mode):
    packer, _ = packer_of(mode)
    with pytest.raises(ValueError, match="'w' was exported twice"):
        list(packer.parcels([("w", torch.zeros(1)), ("w", torch.ones(1))]))


@both_modes
def test_fused_groups_and_incomplete_ones_arrive(mode):
    prefix = "model.layers.0.self_attn."
    names = ["q_a_proj.weight", "o_proj.weight", "kv_a_proj_with_mqa.weight"]
    names += ["kv_a_proj_with_mqa.weight_scale_inv"]  # without q_a's
    weights = [(prefix + n, filled((4,), torch.float32, i)) for i, n in enumerate(names)]
    buckets = received(mode, weights, bucket_bytes=1)
    assert [[name.removeprefix(prefix) for name in bucket] for bucket in buckets] == [
        [names[1]],
        [names[0], names[2]],
        [names[3]],
    ]
    assert merged(buckets) == {name: content(tensor) for name, tensor in weights}


@both_modes
def test_an_export_of_nothing_but_empty_tensors_arrives(mode):
    weights = [("a", torch.empty(0, 3)), ("b", torch.empty(2, 0, dtype=torch.bfloat16))]
    assert merged(received(mode, weights)) == {name: content(t) for name, t in weights}


@both_modes
def test_gradients_do_not_travel(mode):
    weights = [("w", torch.nn.Parameter(torch.ones(3)))]
    packer, _ = packer_of(mode)
    with torch.no_grad():
        (parcel,) = packer.parcels(weights)
        assert torch.equal(dict(unpack(parcel))["w"], torch.ones(3))


@both_modes
def test_the_report_counts_what_was_sent(mode):
    packer, report = packer_of(mode, bucket_bytes=512)
    plans = [p.plan for p in packer.parcels([(f"t{i}", torch.ones(8)) for i in range(5)])]
    assert [len(plan.slots) for plan in plans] == [2, 2, 1]
    assert (report.num_buckets, report.num_tensors, report.payload_bytes) == (3, 5, 160)
    assert set(report.seconds) == {"export", "pack"}
    assert report.staging_bytes == (512 if mode == "flattened" else 0)


# Memory of the bucketed mode: its tensors are shared as they are.


def bucketed(weights, bucket_bytes=1024):
    packer, _ = packer_of("bucketed", bucket_bytes)
    return dict(item for parcel in packer.parcels(weights) for item in parcel.named_tensors)


def test_bucketed_shares_a_tensor_that_fills_its_storage():
    plain = torch.ones(4, 4)
    weights = {"plain": plain, "transposed": torch.ones(2, 8).T, "tied": plain}
    sent = bucketed(weights.items())
    assert {n: t.data_ptr() for n, t in sent.items()} == {
        n: t.data_ptr() for n, t in weights.items()
    }


def test_bucketed_copies_a_view_into_a_bigger_storage():
    fused = filled((8, 4, 4), torch.bfloat16)
    sent = bucketed((f"expert.{i}", fused[i]) for i in range(8))
    for i in range(8):
        tensor = sent[f"expert.{i}"]
        assert tensor.untyped_storage().nbytes() == tensor.nbytes == 32
        assert tensor.data_ptr() != fused[i].data_ptr()
        assert content(tensor) == content(fused[i])


def test_bucketed_does_not_pin_the_storage_of_a_fused_tensor():
    alive_while_held = []

    def export():
        fused = torch.ones(4, 64)
        storage = StorageWeakRef(fused.untyped_storage())
        for i in range(4):
            yield f"expert.{i}", fused[i]
        del fused
        alive_while_held.append(not storage.expired())
        yield "norm", torch.ones(4)

    sent = bucketed(export(), bucket_bytes=1 << 20)  # all are held for one bucket
    assert alive_while_held == [False]
    assert len(sent) == 5


# Memory of the flattened mode: one staging buffer.


def test_flattened_buckets_reuse_one_shared_buffer():
    packer, report = packer_of("flattened", bucket_bytes=1024)
    weights = [(f"t{i}", filled((256,), torch.float32, i)) for i in range(3)]
    weights += [("small", filled((4,), torch.int8))]
    sequence, pointers, sizes = SyncSequence(), set(), []
    for parcel in packer.parcels(weights):
        ((text, flat),) = parcel.named_tensors
        sequence.accept(decode(text))
        pointers.add(flat.data_ptr())
        sizes.append(flat.numel())
        assert flat.is_shared()
        assert flat.dtype == torch.uint8
        assert parcel.load_format == FLATTENED_LOADER
    assert sizes == [1024, 1024, 1024, 256]
    assert len(pointers) == 1
    assert report.staging_bytes == 1024


def test_flattened_buffer_grows_for_a_tensor_larger_than_a_bucket_and_shrinks_never():
    packer, report = packer_of("flattened", bucket_bytes=256)
    weights = [("a", torch.ones(4)), ("big", torch.ones(1024)), ("b", torch.full((4,), 2.0))]
    held = []
    for parcel in packer.parcels(weights):
        ((_, flat),) = parcel.named_tensors
        held.append((flat.numel(), flat.untyped_storage().nbytes()))
    assert held == [(256, 256), (4096, 4096), (256, 4096)]
    assert report.staging_bytes == 4096


def test_flattened_lets_go_of_a_fused_tensor_once_its_views_are_packed():
    alive = []

    def export():
        fused = torch.ones(4, 64)
        storage = StorageWeakRef(fused.untyped_storage())
        for i in range(4):
            yield f"expert.{i}", fused[i]
        del fused
        for name in ("after", "later"):
            alive.append(not storage.expired())
            yield name, torch.ones(64)

    received("flattened", export(), bucket_bytes=1024)
    assert alive == [True, False]


@both_modes
def test_no_more_than_a_bucket_and_the_next_tensor_is_held(mode):
    refs, alive = [], []

    def export():
        for index in range(24):
            tensor = torch.ones(64)
            refs.append(StorageWeakRef(tensor.untyped_storage()))
            alive.append(sum(not ref.expired() for ref in refs))
            yield f"t{index}", tensor
            del tensor

    packer, _ = packer_of(mode, bucket_bytes=4 * 256)
    parcels = packer.parcels(export())
    while (parcel := next(parcels, None)) is not None:
        del parcel  # the consumer holds nothing while it asks for the next one
    assert len(refs) == 24
    assert max(alive) == 5


def test_every_flattened_sync_has_an_id_of_its_own():
    ids = set()
    for _ in range(2):
        packer, _ = packer_of("flattened", bucket_bytes=256)
        of_sync = {
            decode(p.named_tensors[0][0]).sync_id
            for p in packer.parcels([(f"t{i}", torch.ones(1)) for i in range(3)])
        }
        assert len(of_sync) == 1
        ids |= of_sync
    assert len(ids) == 2
