"""The engine's side of a flattened bucket: what reaches `load_weights`, and what is refused."""

import pkgutil

import pytest
import torch

from sglang_loader.bucket_loader import (
    LOADERS,
    load_flattened_bucket,
    load_named_tensors,
    tensor_views,
)
from sglang_loader.manifest import (
    WIRE_VERSION,
    BucketManifest,
    ManifestError,
    TensorEntry,
    decode,
    encode,
)
from verl_sglang_sync.packing import FlattenedPacker
from verl_sglang_sync.report import SyncReport

CPU = torch.device("cpu")


class RecordingModel:
    """Keeps copies of what its `load_weights` is given, call by call."""

    def __init__(self):
        self.calls = []

    def load_weights(self, weights):
        self.calls.append([(name, tensor.clone()) for name, tensor in weights])


def buckets(num_tensors=6, bucket_bytes=512):
    """The pairs a sync of `num_tensors` float tensors sends, two to a bucket; copied."""
    packer = FlattenedPacker(
        device=CPU, bucket_bytes=bucket_bytes, report=SyncReport(mode="flattened", replica=0)
    )
    weights = [(f"t{i}", torch.arange(4.0) + i) for i in range(num_tensors)]
    return [
        [(text, flat.clone())]
        for parcel in packer.parcels(weights)
        for text, flat in parcel.named_tensors
    ]


def test_the_loaders_paths_name_the_loaders():
    assert [pkgutil.resolve_name(path.replace(".load_", ":load_")) for path in LOADERS] == [
        load_flattened_bucket,
        load_named_tensors,
    ]


def test_one_load_weights_call_per_bucket():
    model = RecordingModel()
    for bucket in buckets():
        load_flattened_bucket(model, bucket)
    assert [[name for name, _ in call] for call in model.calls] == [
        ["t0", "t1"],
        ["t2", "t3"],
        ["t4", "t5"],
    ]
    for call in model.calls:
        for name, tensor in call:
            assert torch.equal(tensor, torch.arange(4.0) + int(name[1:]))


def test_named_tensors_are_handed_on():
    model, pair = RecordingModel(), ("t", torch.arange(3))
    load_named_tensors(model, [pair])
    (((name, tensor),),) = model.calls
    assert name == "t"
    assert torch.equal(tensor, pair[1])


def test_draft_and_target_model_of_one_process_each_get_every_bucket():
    draft, target = RecordingModel(), RecordingModel()
    for bucket in buckets():
        load_flattened_bucket(draft, bucket)
        load_flattened_bucket(target, bucket)
    assert len(draft.calls) == len(target.calls) == 3


def test_a_bucket_out_of_order_is_refused_before_anything_is_loaded():
    model, (first, _, third) = RecordingModel(), buckets()
    load_flattened_bucket(model, first)
    for wrong in (third, first):
        with pytest.raises(ManifestError, match="expected bucket 1"):
            load_flattened_bucket(model, wrong)
    assert len(model.calls) == 1


def test_a_bucket_is_exactly_one_pair():
    bucket = buckets()[0]
    for wrong, count in (([], 0), (bucket * 2, 2)):
        with pytest.raises(ManifestError, match=rf"one \(manifest, buffer\), got {count}"):
            load_flattened_bucket(RecordingModel(), wrong)


WRONG_BUFFERS = {
    "too short": lambda flat: flat[:-1],
    "other dtype": lambda flat: flat.view(torch.int8),
    "two dimensions": lambda flat: flat.view(2, -1),
}


@pytest.mark.parametrize("change", WRONG_BUFFERS.values(), ids=WRONG_BUFFERS.keys())
def test_a_buffer_that_does_not_fit_the_manifest_is_refused(change):
    ((text, flat),) = buckets()[0]
    model = RecordingModel()
    with pytest.raises(ManifestError, match=r"bucket 0: buffer is .* expected uint8 of at least"):
        load_flattened_bucket(model, [(text, change(flat))])
    assert model.calls == []
    load_flattened_bucket(model, [(text, flat)])


def one_entry(*fields, nbytes=64):
    return BucketManifest(
        version=WIRE_VERSION,
        sync_id="s",
        index=0,
        last=True,
        num_tensors=1,
        nbytes=nbytes,
        tensors=(TensorEntry(*fields),),
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        (("w", "float77", (4,), 0, 16), "'w': unknown dtype 'float77'"),
        (("w", "nn", (4,), 0, 16), "'w': unknown dtype 'nn'"),
        (("w", "float32", (4,), 0, 32), r"'w': shape '\[4\]' is invalid for input of size 8"),
        (("w", "float32", (4,), 0, 12), "'w': "),
        (("w", "float32", (4,), 2, 16), "'w': .*storage_offset.*divisible"),
    ),
)
def test_entries_that_do_not_describe_their_bytes_are_refused_by_name(fields, message):
    with pytest.raises(ManifestError, match=message):
        manifest = decode(encode(one_entry(*fields)))
        tensor_views(manifest, torch.zeros(64, dtype=torch.uint8))


def test_views_share_the_buffer():
    flat = torch.zeros(64, dtype=torch.uint8)
    ((_, view),) = tensor_views(one_entry("w", "int32", (2, 2), 16, 16), flat)
    flat[16] = 7
    assert view.tolist() == [[7, 0], [0, 0]]
    assert view.data_ptr() == flat.data_ptr() + 16
