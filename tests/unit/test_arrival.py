"""The benchmark's proof of arrival: it holds for fused weights, and only for the same weights; what
its limit is.
"""

import pytest
import torch
from benchmarks.arm import Setting
from benchmarks.arrival import advance, checksums, difference, merged
from benchmarks.broadcast_limit import limit_bytes

from verl_sglang_sync.commands.bench.model_shapes import weights_bytes


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


def test_every_group_differs_after_the_weights_advanced():
    weights = trainers()
    old = checksums(engines(weights))
    for _ in range(20):  # no return to what was there before
        advance(weights)
        assert difference(checksums(weights), old) == list(checksums(weights))


def test_fused_weights_and_their_losses_are_recognised():
    weights = trainers()
    held = engines(weights)
    assert not difference(checksums(weights), checksums(held))
    held[1][1][3, 2] += 1
    assert difference(checksums(weights), checksums(held)) == ["model.layers.0.self_attn"]
    assert difference(checksums(weights), checksums(held[:-1])) == [
        "model.layers.0.self_attn",
        "model.layers.0.input_layernorm",
    ]


def ranks_of(weights, parts=(0, 1)):
    """What TP ranks sum that hold these halves of each matrix, and all of the norm."""
    held = [
        [(name, t if "norm" in name else t.chunk(2, dim=-2)[part]) for name, t in engines(weights)]
        for part in parts
    ]
    return [checksums(tensors, key_of=str) for tensors in held]


def test_two_ranks_parts_are_recognised_only_together():
    weights = trainers()
    expected = checksums(weights)
    assert not difference(expected, merged(ranks_of(weights)))
    of_matrices = ["model.layers.0.self_attn", "model.layers.0.mlp"]
    for parts in ((0,), (0, 0), (1, 1)):  # a rank is missing, or has the other one's
        assert difference(expected, merged(ranks_of(weights, parts))) == of_matrices
    stale = ranks_of(weights)[1]
    advance(weights)
    fresh = ranks_of(weights)[0]
    assert difference(checksums(weights), merged([fresh, stale])) == list(expected)


@pytest.mark.parametrize(
    ("trainers", "engine_tp", "replicas", "part"),
    [(1, 1, 1, 1), (2, 2, 1, 1 / 2), (2, 1, 2, 1), (1, 2, 1, 1), (1, 1, 3, 3), (3, 2, 1, 1 / 2)],
)
def test_the_limit_is_the_busiest_gpus_traffic(trainers, engine_tp, replicas, part):
    setting = Setting(
        model="tiny",
        device="cpu",
        trainers=trainers,
        engine_tp=engine_tp,
        replicas=replicas,
        runs=1,
        bucket_mb=1,
        arm_timeout_s=1,
        start_timeout_s=1,
        folder="",
    )
    assert limit_bytes(setting) == part * weights_bytes("tiny", 4)
