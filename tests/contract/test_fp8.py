"""Rollouts in fp8: what verl quantises arrives in SGLang's fp8 model, replayed as loaded.

verl's own quantiser and SGLang's own model, which a CPU can build and load; its kernels need a GPU.
"""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from contract.load_plan_proof import LAYOUTS, load_eagerly, prove, prove_quantized, split
from contract.test_load_plan_tp import run_ranks
from contract.tiny_architectures import (
    Ranks,
    build_model,
    prepare_process,
    random_weights,
    read_checkpoint,
    save_checkpoint,
    start_world,
    stop_process_groups,
)
from contract.tiny_engine import TinyEngine
from contract.weight_check_proof import check, specs_of
from sglang_loader.load_plan.destinations import collect_destinations
from sglang_loader.load_plan.rounds import num_bytes_read
from support.plan_check import snapshot, uncovered
from support.served_models import case_of, model_override, quantizer

prepare_process()

FP8 = torch.float8_e4m3fn


@pytest.fixture
def ranks(tmp_path):
    """verl's quantiser asks for its rank, in the group that SGLang's model has."""
    alone = Ranks(tmp_path / "rendezvous")
    start_world(alone)
    yield alone
    stop_process_groups()


@pytest.fixture
def quantize(ranks, monkeypatch):
    """The export in fp8; verl's Triton kernel needs a GPU, its other way does not."""
    from verl.utils.kernel import fp8_kernel

    from verl_sglang_sync.verl.engine_format import quantized

    monkeypatch.setattr(fp8_kernel, "_DISABLE_TRITON_FP8", True)
    return lambda weights: quantized(weights, quantizer(), torch.bfloat16)


def weights():
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (64, 256),
        "model.layers.0.self_attn.q_proj.weight": (256, 256),
        "model.layers.0.mlp.gate.weight": (4, 256),
        "model.layers.0.mlp.experts.0.down_proj.weight": (256, 384),
        "model.norm.weight": (256,),
    }
    return [
        (name, torch.randn(shape, generator=generator).bfloat16()) for name, shape in shapes.items()
    ]


def test_what_is_sent_is_what_verl_makes(quantize):
    async def verls():
        stream = quantizer().quant_weights_by_name(weights(), dtype=torch.bfloat16)
        return [item async for item in stream]

    async def ours_within_a_loop():
        return list(quantize(weights()))

    expected = asyncio.run(verls())
    for ours in (list(quantize(iter(weights()))), asyncio.run(ours_within_a_loop())):
        assert [name for name, _ in ours] == [name for name, _ in expected]
        for (_, one), (_, other) in zip(ours, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one.float(), other.float())
    sent = dict(expected)
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    assert (sent[name].dtype, sent[f"{name}_scale_inv"].shape) == (FP8, (2, 3))
    assert len(sent) == len(weights()) + 2
    assert {sent[name].dtype for name, _ in weights()} == {FP8, torch.bfloat16}


def test_a_weight_verl_cannot_quantise_is_not_sent(ranks):
    """verl's kernel fails without a GPU; it logs that, and goes on with the weight as it is."""
    from verl_sglang_sync.verl.engine_format import NotQuantized, quantized

    exported = iter(weights())
    with pytest.raises(NotQuantized, match=r"q_proj\.weight is still torch\.bfloat16"):
        list(quantized(exported, quantizer(), torch.bfloat16))
    assert not list(exported), "the other ranks wait in its collectives"


def test_an_export_that_fails_fails_as_it_did(quantize):
    def export():
        yield weights()[0]
        raise OSError("the trainer's own")

    sent = quantize(export())
    next(sent)
    with pytest.raises(OSError, match="the trainer's own"):
        next(sent)


def test_the_rollout_sends_fp8_and_names_the_source(quantize):
    """The engine can make what it gets of what is in the trainer's memory."""
    from verl.utils.sglang.sglang_fp8_utils import build_sglang_fp8_quant_config

    from verl_sglang_sync.sources.export import Reexport, quantization_of, unquantized
    from verl_sglang_sync.verl.engine_format import EngineFormat

    state = dict(weights())
    hf_config = SimpleNamespace(
        dtype=torch.bfloat16, quantization_config=build_sglang_fp8_quant_config()
    )
    export = Reexport(lambda: iter(state.items()), sources=lambda: state)
    exact = EngineFormat.of_rollout({"quantization": None}, hf_config)
    assert exact.applied(export).sources is not None
    sent = EngineFormat.of_rollout({"quantization": "fp8"}, hf_config).applied(export)
    assert sent.sources() is state
    assert list(unquantized(sent)) == list(state.items())
    quantization = quantization_of(sent)
    assert (quantization.method, quantization.block) == ("torch", (128, 128))
    assert quantization.dtype == torch.bfloat16 and quantization_of(export) is None
    names = [name for name, tensor in sent if tensor.dtype == FP8]
    assert names == [name for name in state if "_proj" in name]
    assert [name for name, tensor in sent if tensor.dtype == FP8] == names, "made anew"


@pytest.fixture
def engine_of(tmp_path, ranks, quantize):
    """Makes a model in fp8 that was loaded once, and two sets of quantised weights."""
    options = {"sent_as": quantize, "quantization": "fp8"}

    def make(name):
        options["json_model_override_args"] = model_override()
        return TinyEngine(case_of(name), tmp_path / "model", ranks, **options)

    return make


def precise(weights):
    """What verl's quantiser passes on if it fails."""
    return [
        (name, tensor.bfloat16() if tensor.dtype == FP8 else tensor)
        for name, tensor in weights
        if not name.endswith("_scale_inv")
    ]


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_replay_is_byte_identical(name, engine_of):
    engine = engine_of(name)
    specs = engine.specs
    assert "a quantised model" in (check(engine.model, specs, published=specs).not_checked or "")
    refused = check(engine.model, specs_of(precise(engine.first)), published=specs)
    assert "(bfloat16, the engine has float8_e4m3fn)" in refused.text()
    assert FP8 in {parameter.dtype for parameter in engine.model.parameters()}
    for how in LAYOUTS:
        plan = prove(engine.model, engine.first, engine.second, how)
        assert uncovered(plan, "parameter") == []


MLA = "q_a_proj,q_b_proj,fused_qkv_a_proj_with_mqa,kv_a_proj_with_mqa,kv_b_proj"
"""What verl's quantiser leaves as it is, and SGLang's models have in fp8 unless told otherwise."""


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        ("qwen3", ""),
        ("qwen3-moe", ""),
        ("qwen2-moe", "shared_expert_gate"),
        ("deepseek-v2-lite", MLA),
        ("deepseek-v3", MLA),
    ],
)
def test_the_table_quantises_what_it_reads(name, ignored, engine_of, tmp_path, monkeypatch):
    """The bytes are those that `load_weights` leaves of verl's own export."""
    monkeypatch.setenv("SGLANG_FP8_IGNORED_LAYERS", ignored)
    engine = engine_of(name)
    for published in (engine.specs, None):
        assert not check(engine.model, engine.specs, published=published).mismatched
    like = read_checkpoint(case_of(name), tmp_path / "model")
    source = random_weights(like, 2)
    for how in LAYOUTS:
        prove_quantized(engine.model, engine.first, engine.second, source, how)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_each_of_two_ranks_quantises_its_part(name, tmp_path):
    save_checkpoint(case_of(name), tmp_path / "model")
    num_read = run_ranks(tmp_path, prove_on_rank, name)
    whole = (tmp_path / "model" / "model.safetensors").stat().st_size
    assert all(num < 0.9 * whole for num in num_read), "every rank reads all blocks"


def prove_on_rank(ranks, folder, name):
    """Return the bytes that one rank reads."""
    from verl.utils.kernel import fp8_kernel

    from verl_sglang_sync.verl.engine_format import quantized

    prepare_process()
    fp8_kernel._DISABLE_TRITON_FP8 = True
    like = read_checkpoint(case_of(name), folder / "model")
    options = {"quantization": "fp8", "json_model_override_args": model_override()}
    model = build_model(case_of(name), folder / "model", ranks, **options)
    sources = [random_weights(like, seed) for seed in (1, 2)]
    first, second = (list(quantized(of, quantizer(), torch.bfloat16)) for of in sources)
    model.load_weights(iter(first))
    table = prove_quantized(model, first, second, sources[1], "cut")
    return sum(num_bytes_read(copy) for step in table.steps for copy, _ in step.copies)


@pytest.mark.parametrize(
    ("name", "mismatched"),
    [
        ("deepseek-v2-lite", {"kv_a_proj_with_mqa.weight", "kv_b_proj.weight"}),
        ("qwen2-moe", {"shared_expert_gate.weight"}),
    ],
)
def test_fp8_weights_on_one_side_are_refused(name, mismatched, engine_of):
    """verl picks by name what it quantises; these models of SGLang differ, and take it silently."""
    engine = engine_of(name)
    for published in (engine.specs, None):
        verdict = check(engine.model, engine.specs, published=published)
        names = {text.split(" ")[0] for text in verdict.mismatched}
        assert {".".join(found.split(".")[-2:]) for found in names} == mismatched


def test_a_loader_that_rebinds_scales_stays_eager(engine_of):
    """DeepSeek takes w_kc and w_vc apart with a scale that is another tensor after every load.

    What it is sent here is refused by the manifest check; eager or replayed, the bytes are alike.
    """
    engine = engine_of("deepseek-v2-lite")
    load_eagerly(engine.model, split(engine.second, "cut"))
    expected = snapshot(collect_destinations(engine.model))
    engine.sync(engine.first, "cut")
    outcome = engine.sync(engine.second, "cut")
    assert outcome.num_replayed == 0
    assert "w_scale was rebound" in (outcome.reason or "")
    assert engine.has(expected)
