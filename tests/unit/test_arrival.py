"""The benchmark's proof of arrival: it holds for fused weights, and only for the same weights."""

import torch
from benchmarks.arrival import advance, checksums, difference


def trainers():
    generator = torch.Generator().manual_seed(0)
    names = ("self_attn.q_proj", "self_attn.k_proj", "mlp.experts.0.up_proj", "input_layernorm")
    shape = (8, 4)
    return [
        (f"model.layers.0.{name}.weight", torch.randn(shape, generator=generator).bfloat16())
        for name in names
    ]


def engines(weights):
    """The same elements, fused and in another order."""
    q, k, up, norm = (tensor.clone() for _, tensor in weights)
    return [
        ("model.layers.0.mlp.experts.w13_weight", up.view(1, 8, 4)),
        ("model.layers.0.self_attn.qkv_proj.weight", torch.cat([q, k])),
        ("model.layers.0.rotary_emb.cos_sin_cache", q),
        ("model.layers.0.input_layernorm.weight", norm),
    ]


def test_fused_weights_are_recognised():
    weights = trainers()
    assert not difference(checksums(weights), checksums(engines(weights)))


def test_every_group_differs_after_the_weights_advanced():
    weights = trainers()
    old = checksums(engines(weights))
    for _ in range(20):  # no return to what was there before
        advance(weights)
        assert difference(checksums(weights), old) == list(checksums(weights))


def test_one_changed_or_lost_element_is_noticed():
    weights = trainers()
    held = engines(weights)
    held[1][1][3, 2] += 1
    assert difference(checksums(weights), checksums(held)) == ["model.layers.0.self_attn"]
    assert difference(checksums(weights), checksums(held[:-1])) == [
        "model.layers.0.self_attn",
        "model.layers.0.input_layernorm",
    ]
