"""The headers of a published checkpoint, the ranks' verdict, and how a reply carries it."""

import json
import struct
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import snapshot_download

from sglang_loader.common.layout import BucketTensor
from sglang_loader.common.regions.geometry import Region
from sglang_loader.common.replies import remarks_in, with_remarks
from sglang_loader.session import weight_check
from sglang_loader.session.findings import RankView, Verdict, judge
from sglang_loader.session.weight_check import published_tensors, served_checkpoint


def test_a_remark_survives_sglangs_added_words():
    remark = Verdict(missing=("a", "b"), doubtful=("c\nd",)).remark()
    assert "2 missing: a, b" in remark
    both = " | ".join([with_remarks([remark, "slow"])] * 2) + " Weight version updated to 3."
    assert remarks_in(both) == [remark, "slow"]
    assert Verdict().remark() == "" and with_remarks([]) == "Success"
    assert remarks_in("Success") == []
    assert "not checked: quantised" in Verdict(not_checked="quantised").remark()


def test_long_lists_are_cut_short_with_their_number():
    verdict = Verdict(missing=tuple(f"layer.{i}" for i in range(500)))
    assert verdict.text().startswith("500 missing: layer.0, layer.1,")
    assert verdict.text().endswith(", and 480 more")


def save(path, tensors, nbytes):
    header = json.dumps(tensors).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(nbytes))


def test_the_headers_of_a_checkpoint(tmp_path):
    assert published_tensors("some/name-on-the-hub") is None
    assert published_tensors(tmp_path) is None
    a = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}
    b = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    save(tmp_path / "one.safetensors", {"a": a, "__metadata__": {"format": "pt"}}, 12)
    save(tmp_path / "two.safetensors", {"b": b}, 4)
    assert published_tensors(tmp_path) == {
        "a": BucketTensor("a", (2, 3), torch.bfloat16, 0),
        "b": BucketTensor("b", (), torch.float32, 0),
    }
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "two.safetensors"}}))
    assert published_tensors(tmp_path) == {"b": BucketTensor("b", (), torch.float32, 0)}
    index.write_text(json.dumps({"weight_map": {"b": "lost.safetensors"}}))
    assert published_tensors(tmp_path) is None
    index.unlink()
    for broken in (b"", struct.pack("<Q", 1 << 60), struct.pack("<Q", 2) + b"[]"):
        (tmp_path / "two.safetensors").write_bytes(broken)
        assert published_tensors(tmp_path) is None
    f4 = {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}
    save(tmp_path / "two.safetensors", {"b": f4}, 1)
    assert published_tensors(tmp_path) is None


def test_the_tensors_of_a_pytorch_checkpoint(tmp_path):
    a = BucketTensor("a", (2, 3), torch.bfloat16, 0)
    b = BucketTensor("b", (), torch.float32, 0)
    torch.save({"optimizer": torch.zeros(3)}, tmp_path / "optimizer.bin")
    assert published_tensors(tmp_path) is None
    torch.save({"a": torch.zeros(2, 3, dtype=torch.bfloat16)}, tmp_path / "pytorch_model-1.bin")
    torch.save({"b": torch.zeros(())}, tmp_path / "pytorch_model-2.bin")
    assert published_tensors(tmp_path) == {"a": a, "b": b}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "pytorch_model-2.bin"}}))
    assert published_tensors(tmp_path) == {"b": b}
    (tmp_path / "pytorch_model-2.bin").write_bytes(b"not a checkpoint")
    assert published_tensors(tmp_path) is None
    save(
        tmp_path / "one.safetensors",
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        4,
    )
    assert published_tensors(tmp_path) == {"a": BucketTensor("a", (1,), torch.float32, 0)}


def test_a_pytorch_checkpoint_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",))

    torch.save({"a": Evil()}, tmp_path / "pytorch_model.bin")
    assert published_tensors(tmp_path) is None
    assert not (tmp_path / "ran").exists()


def test_a_hub_model_is_read_from_cache(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--some--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    refs = tmp_path / "models--some--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    monkeypatch.setattr(
        weight_check, "snapshot_download", partial(snapshot_download, cache_dir=tmp_path)
    )
    arguments = SimpleNamespace(model_path="some/name", revision=None)
    monkeypatch.setattr(weight_check, "launch_arguments", lambda: arguments)
    assert served_checkpoint() is None
    torch.save({"b": torch.zeros(())}, snapshot / "pytorch_model.bin")
    assert served_checkpoint() == {"b": BucketTensor("b", (), torch.float32, 0)}
    for other in ("some/other", "/no/such/folder", "a/b/c"):
        arguments.model_path = other
        assert served_checkpoint() is None


TENSOR = BucketTensor("w", (8, 4), torch.float32, 0)


def part(row, rows):
    return Region(row * 16, (rows, 4), (4, 1), 4)


def reading(*parts):
    return RankView(partial={"w": frozenset(parts)})


ALL, UNUSED = RankView(), RankView(unused=frozenset({"w"}))
VIEWS = {  # of two ranks, and whether that is all of the tensor
    "one expert's rank": ([ALL, UNUSED], True),
    "no rank": ([UNUSED, UNUSED], False),
    "halves": ([reading(part(0, 4)), reading(part(4, 4))], True),
    "quarters": ([reading(part(0, 2)), reading(part(2, 2))], False),
    "the same half": ([reading(part(0, 4))] * 2, False),
    "half and nothing": ([reading(part(0, 4)), UNUSED], False),
    "half and all": ([reading(part(0, 4)), ALL], True),
    "two parts on one": ([reading(part(0, 4), part(4, 4)), UNUSED], True),
    "dtype": ([ALL, RankView(clashes={"w": "int32"})], False),
    "missing": ([ALL, RankView(missing=("v",))], False),
}


@pytest.mark.parametrize(("views", "fits"), VIEWS.values(), ids=VIEWS)
def test_the_ranks_are_judged_together(views, fits):
    assert judge([TENSOR], views, {}).fits is fits


def test_what_the_published_checkpoint_has_is_never_unexpected():
    unused = [RankView(unused=frozenset({"w", "lm_head.weight"}))]
    assert judge([TENSOR], unused, {}).unexpected == ("w",)
    assert judge([TENSOR], unused, {"w": TENSOR}).fits
    blind = judge([TENSOR], unused, None)
    assert blind.fits
    assert blind.doubtful == ("w",)
    embedding = BucketTensor("model.embed_tokens.weight", (8, 4), torch.float32, 0)
    head = BucketTensor("lm_head.weight", (8, 4), torch.float32, 0)
    assert judge([embedding, head], unused, {}).fits
    assert not judge([head], unused, {}).fits


GAP = "model.layers.0.mlp.experts.w2_weight (engine)"
EXPERT = BucketTensor("model.layers.0.mlp.experts.down_proj", (8, 4), torch.float32, 0)


@pytest.mark.parametrize(
    ("published", "unused", "gap", "fits"),
    (
        (None, ["w"], None, True),
        (None, [], GAP, True),
        (None, ["w"], GAP, False),
        ("all", ["w"], GAP, True),
        ("all", [EXPERT.name], GAP, False),
        ("all", [EXPERT.name], None, True),
    ),
)
def test_dropped_tensors_beside_unwritten_parameters_are_refused(published, unused, gap, fits):
    """Beside: in its module, if the published checkpoint has the tensor."""
    known = published and {tensor.name: tensor for tensor in (TENSOR, EXPERT)}
    view = RankView(unused=frozenset(unused), doubtful=(gap,) if gap else ())
    verdict = judge([TENSOR, EXPERT], [view], known)
    assert verdict.fits is fits
    assert set(verdict.unexpected) == set(() if fits else unused)
    assert verdict.missing == (() if fits else (gap,))
    # Another rank that uses the tensor shows that the model takes it.
    assert judge([TENSOR, EXPERT], [view, RankView()], known).fits
