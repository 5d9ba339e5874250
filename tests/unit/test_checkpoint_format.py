"""Exported tensors get the names and layouts of the checkpoint, one after the other.

Whole models are in `contract/test_checkpoint_format`.
"""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    _IdentityOp,
)

from verl_sglang_sync.verl.checkpoint_format import in_checkpoint_format

EXPERTS = WeightConverter(
    [".experts.*.w1.weight", ".experts.*.w3.weight"],
    ".experts.gate_up_proj",
    [MergeModulelist(dim=0), Concatenate(dim=1)],
)
QKV = ["attn.q_proj", "attn.k_proj", "attn.v_proj"]
FUSED = "layers.0.mlp.experts.gate_up_proj"


class Quantised(ConversionOps):
    """As those of a checkpoint that is dequantised when it is loaded."""

    def convert(self, input_dict, **kwargs):
        raise AssertionError("not to be called: it computes")

    @property
    def reverse_op(self):
        return _IdentityOp()


def model_of(*conversions):
    """A model that was loaded with these."""
    model = nn.Module()
    model.config = SimpleNamespace(model_type="mixtral")
    model._weight_conversions = list(conversions)
    return model


def saved(model, **tensors):
    """What becomes of tensors, whose names have `__` for a dot."""
    named = [(name.replace("__", "."), tensor) for name, tensor in tensors.items()]
    return dict(in_checkpoint_format(named, model))


def numbered(*shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def test_experts_are_taken_apart_without_a_copy():
    # transformers 5.19 copies what it cuts off
    copies = Chunk(dim=1).convert({"a": numbered(2, 4)}, ["a"], ["b", "c"])["b"].is_contiguous()
    fused = numbered(3, 4, 5)
    model = model_of(WeightRenaming(".block_sparse_moe.", ".mlp."), EXPERTS)
    found = saved(model, layers__0__mlp__experts__gate_up_proj=fused)
    assert list(found) == [
        f"layers.0.block_sparse_moe.experts.{i}.{kind}.weight"
        for i in range(3)
        for kind in ("w1", "w3")
    ]
    for i in range(3):
        for kind, rows in (("w1", slice(0, 2)), ("w3", slice(2, 4))):
            tensor = found[f"layers.0.block_sparse_moe.experts.{i}.{kind}.weight"]
            assert torch.equal(tensor, fused[i, rows])
            shared = tensor.untyped_storage()._cdata == fused.untyped_storage()._cdata
            assert shared != copies


def test_tensors_that_are_joined_wait_for_each_other():
    model = model_of(WeightConverter("attn.Wqkv", QKV, [Chunk(dim=0)]))
    parts = [numbered(2, 3) + 10 * i for i in range(3)]
    exported = [
        ("0.attn.q_proj.weight", parts[0]),
        ("1.attn.k_proj.weight", parts[1]),
        ("0.attn.v_proj.weight", parts[2]),
        ("0.norm.weight", parts[0]),
        ("0.attn.k_proj.weight", parts[1]),
    ]
    found = list(in_checkpoint_format(exported, model))
    assert [name for name, _ in found] == [
        "0.norm.weight",
        "0.attn.Wqkv.weight",
        "1.attn.k_proj.weight",  # q and v never came: it is not lost
    ]
    assert torch.equal(found[1][1], torch.cat(parts))


@pytest.mark.parametrize(
    ("conversion", "shape"),
    [
        (WeightConverter("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj",
                         [Transpose(1, 2, check_dims=True)]), (2, 4, 4)),
        (WeightConverter(["gate_up_proj_blocks", "gate_up_proj_scales"], "gate_up_proj$",
                         [Quantised()]), (2, 4, 3)),
        (EXPERTS, (2, 2, 3)),
        (EXPERTS, (2, 3, 5)),
    ],
    ids=["transposed or not", "quantised", "a dimension of one", "no two halves"],
)  # fmt: skip
def test_names_loading_cannot_restore_stay_verls(conversion, shape):
    fused = numbered(*shape)
    model = model_of(conversion, WeightRenaming("vision", "visual"))
    found = saved(model, layers__0__mlp__experts__gate_up_proj=fused, visual__w=numbered(2))
    gate = (shape[1] + 1) // 2
    assert "vision.w" in found
    assert len(found) == 2 * shape[0] + 1
    for i in range(shape[0]):
        prefix = f"layers.0.mlp.experts.{i}"
        assert torch.equal(found[f"{prefix}.gate_proj.weight"], fused[i, :gate])
        assert torch.equal(found[f"{prefix}.up_proj.weight"], fused[i, gate:])


def test_a_fused_checkpoint_layout_is_not_split():
    fused = numbered(2, 6, 4)
    model = model_of(WeightConverter(FUSED[9:], FUSED[9:], [Transpose(1, 2)]))
    [(name, tensor)] = in_checkpoint_format([(FUSED, fused)], model)
    assert name == FUSED
    assert torch.equal(tensor, fused.transpose(1, 2)) and tensor.is_contiguous()


def test_an_irreversible_name_stays():
    model = model_of(WeightRenaming(".x.", ".y."), WeightRenaming(".y.", ".z."))
    found = saved(model, m__z__w=numbered(1), m__y__w=numbered(1))
    assert list(found) == ["m.x.w", "m.y.w"]


def test_base_layers_under_adapters_keep_checkpoint_names():
    model = model_of(WeightRenaming(r"(?<!_)model(?!\.visual)", "model.language_model"))
    found = saved(model, model__language_model__q_proj__base_layer__weight=numbered(1))
    assert list(found) == ["model.q_proj.base_layer.weight"]


def test_a_model_is_not_kept_alive():
    model = model_of(EXPERTS)
    saved(model, lm_head__weight=numbered(1))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
