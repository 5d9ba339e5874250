"""The manifest on the wire, the headers of a published checkpoint, and the ranks' verdict."""

import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_loader.load_plan.geometry import Region
from sglang_loader.manifest import ManifestError
from sglang_loader.manifest_verdict import ManifestVerdict, decode_verdicts, encode_verdict
from sglang_loader.rehearsal.findings import RankView, judge
from sglang_loader.rehearsal.published import published_tensors
from sglang_loader.weight_manifest import WeightManifest, decode_manifest, encode_manifest

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn])
SPECS = st.lists(
    st.tuples(st.text(max_size=30), DTYPES, st.lists(st.integers(0, 9), max_size=4).map(tuple)),
    unique_by=lambda spec: spec[0],
)
TEXTS = st.lists(st.text(max_size=20)).map(tuple)
VERDICTS = st.builds(
    ManifestVerdict,
    not_checked=st.none() | st.text(),
    unexpected=TEXTS,
    mismatched=TEXTS,
    missing=TEXTS,
    doubtful=TEXTS,
)


@given(SPECS, st.booleans())
def test_a_manifest_comes_back_as_it_was(specs, is_complete):
    manifest = WeightManifest.of(specs, is_complete=is_complete)
    again = decode_manifest(encode_manifest(manifest))
    assert again == manifest
    assert again.specs() == specs


@given(st.lists(VERDICTS, min_size=1, max_size=3))
def test_verdicts_come_back_also_when_sglang_has_joined_them(verdicts):
    assert decode_verdicts(" | ".join(map(encode_verdict, verdicts))) == verdicts


@pytest.mark.parametrize("data", [b"", b"abc", encode_manifest(WeightManifest.of([]))[:-3]])
def test_garbage_is_no_manifest(data):
    with pytest.raises(ManifestError, match="not a manifest"):
        decode_manifest(data)


@pytest.mark.parametrize("text", ["", "Success", "{}{", '{"missing": 3}'])
def test_garbage_is_no_verdict(text):
    with pytest.raises(ManifestError):
        decode_verdicts(text)


def test_another_release_a_name_twice_and_an_unknown_dtype_are_refused():
    other = WeightManifest(version=99, tensors=())
    with pytest.raises(ManifestError, match="version 99"):
        decode_manifest(encode_manifest(other))
    twice = WeightManifest.of([("a", torch.float32, (1,)), ("a", torch.float32, (2,))])
    with pytest.raises(ManifestError, match="2 tensors have only 1 names"):
        twice.specs()
    (tensor,) = WeightManifest.of([("a", torch.float32, (1,))]).tensors
    strange = WeightManifest(version=1, tensors=(type(tensor)("a", "float3", (1,)),))
    with pytest.raises(ManifestError, match="float3"):
        strange.specs()


def test_long_lists_are_cut_short_with_their_number():
    verdict = ManifestVerdict(missing=tuple(f"layer.{i}" for i in range(500)))
    assert verdict.text().startswith("500 missing: layer.0, layer.1,")
    assert verdict.text().endswith(", and 480 more")


def save(path, tensors):
    header = json.dumps(tensors).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def test_the_headers_of_a_checkpoint(tmp_path):
    assert published_tensors("some/name-on-the-hub") is None
    assert published_tensors(tmp_path) is None
    a = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}
    b = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    save(tmp_path / "one.safetensors", {"a": a, "__metadata__": {"format": "pt"}})
    save(tmp_path / "two.safetensors", {"b": b})
    assert published_tensors(tmp_path) == {
        "a": ("a", torch.bfloat16, (2, 3)),
        "b": ("b", torch.float32, ()),
    }
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "two.safetensors"}}))
    assert published_tensors(tmp_path) == {"b": ("b", torch.float32, ())}
    index.write_text(json.dumps({"weight_map": {"b": "lost.safetensors"}}))
    assert published_tensors(tmp_path) is None
    index.unlink()
    for broken in (b"", struct.pack("<Q", 1 << 60), struct.pack("<Q", 2) + b"[]"):
        (tmp_path / "two.safetensors").write_bytes(broken)
        assert published_tensors(tmp_path) is None
    save(tmp_path / "two.safetensors", {"b": {**b, "dtype": "F4"}})
    assert published_tensors(tmp_path) is None


SPEC = ("w", torch.float32, (8, 4))


def part(row, rows):
    return Region(row * 16, (rows, 4), (4, 1), 4)


@pytest.mark.parametrize(
    ("views", "fits"),
    [
        ([RankView(), RankView(idle=frozenset({"w"}))], True),
        ([RankView(idle=frozenset({"w"}))] * 2, False),
        ([RankView(partial={"w": frozenset({part(r, 4)})}) for r in (0, 4)], True),
        ([RankView(partial={"w": frozenset({part(r, 2)})}) for r in (0, 2)], False),
        ([RankView(partial={"w": frozenset({part(0, 4)})})] * 2, False),
        ([RankView(partial={"w": frozenset({part(0, 4)})}), RankView()], True),
        (
            [
                RankView(partial={"w": frozenset({part(0, 4), part(4, 4)})}),
                RankView(idle=frozenset({"w"})),
            ],
            True,
        ),
        ([RankView(), RankView(clashes={"w": "int32"})], False),
        ([RankView(), RankView(missing=("v",))], False),
        ([RankView(), RankView(failure="ValueError")], False),
    ],
    ids=[
        *("one expert's rank", "no rank", "halves", "quarters", "the same half", "half and all"),
        *("two parts on one", "dtype", "missing", "failure"),
    ],
)
def test_the_ranks_are_judged_together(views, fits):
    assert judge([SPEC], views, {}).fits is fits


def test_what_the_published_checkpoint_has_is_never_unexpected():
    idle = [RankView(idle=frozenset({"w", "lm_head.weight"}))]
    assert judge([SPEC], idle, {}).unexpected == ("w",)
    assert judge([SPEC], idle, {"w": SPEC}).fits
    blind = judge([SPEC], idle, None)
    assert blind.fits
    assert blind.doubtful == ("w",)
    embedding = ("model.embed_tokens.weight", torch.float32, (8, 4))
    head = ("lm_head.weight", torch.float32, (8, 4))
    assert judge([embedding, head], idle, {}).fits
    assert not judge([head], idle, {}).fits
