"""Every fault of a sync's tensors is found and named, tensor by tensor.

On a handful of tiny SGLang classes: each tensor in turn is left out, renamed, resized, doubled, and
sent as another kind of number. Complete checkpoints of all architectures are checked where their
load plans are (`test_load_plan_architectures`).
"""

import re

import pytest
import torch

from contract.tiny_architecture_cases import case_named
from contract.tiny_architectures import (
    CannotBuild,
    Ranks,
    build_model,
    prepare_process,
    save_checkpoint,
    stop_process_groups,
)
from contract.tiny_engine import TinyEngine
from contract.weight_check_proof import check, layout_of, specs_of
from sglang_loader.session.findings import Verdict
from sglang_loader.session.weight_check import cached_verdict

prepare_process()

MAX_SUSPECTS = 3
"""Tensors that are named at an error: DeepSeek fuses two, and has a third in hand."""


@pytest.fixture(scope="module")
def rendezvous(tmp_path_factory):
    yield tmp_path_factory.mktemp("ranks") / "rendezvous"
    stop_process_groups()


@pytest.fixture(
    scope="module", params=("qwen2-tied", "phi3", "qwen3-moe", "deepseek-v3", "qwen2_5-vl")
)
def engine(request, rendezvous, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return TinyEngine(case_named(request.param), folder, Ranks(rendezvous))


def verdict(engine, specs, *, blind=False, **more):
    """Of a sync of such tensors; `blind`: the engine has no published checkpoint to look at."""
    return check(engine.model, specs, published=None if blind else engine.specs, **more)


def each(engine):
    """Of the tensors whose names differ in numbers only, the last, with its position."""
    specs = enumerate(engine.specs)
    yield from {re.sub(r"\d+", "*", spec[0]): (i, spec) for i, spec in specs}.values()


def without(engine, index):
    return engine.specs[:index] + engine.specs[index + 1 :]


def changed(engine, index, spec):
    return [*engine.specs[:index], spec, *engine.specs[index + 1 :]]


def names_in(found):
    return [text.split(" ")[0] for text in found]


def test_a_verdict_is_remembered_with_its_tensors(engine):
    for specs, text in ((engine.specs, ""), (engine.specs[:-1], "1 missing")):
        verdict(engine, specs)
        known = cached_verdict([layout_of(specs)], engine.model)
        assert known is not None and text in known.text()
    assert cached_verdict([layout_of(engine.specs)], engine.model) is None


def test_a_tensor_that_is_left_out_is_missing(engine):
    """Without a published checkpoint, other layers tell what is."""
    for i, (name, _, _) in each(engine):
        assert verdict(engine, without(engine, i)) == Verdict(missing=(name,))
        blind = verdict(engine, without(engine, i), blind=True)
        assert blind.missing or blind.doubtful, name
        if name.endswith("self_attn.o_proj.weight"):
            assert len(blind.missing) == 1


def test_a_renamed_tensor_is_unexpected_and_missing(engine):
    for i, (name, dtype, shape) in each(engine):
        other = f"{name}_of_another_model"
        found = verdict(engine, changed(engine, i, (other, dtype, shape)), is_distinct=True)
        if not found.mismatched:  # some loaders refuse what they do not know
            assert found.missing == (name,)
        assert other in names_in(found.unexpected or found.mismatched), (name, found)


MISFITS = {
    "twice its first size": lambda s: (s[0], s[1], (2 * s[2][0], *s[2][1:])),
    "twice its last size": lambda s: (s[0], s[1], (*s[2][:-1], 2 * s[2][-1])),
    "its last size less one": lambda s: (s[0], s[1], (*s[2][:-1], s[2][-1] - 1)),
    "a last size of one": lambda s: (s[0], s[1], (*s[2][:-1], 1)),
    "int32": lambda s: (s[0], torch.int32, s[2]),
    "complex64": lambda s: (s[0], torch.complex64, s[2]),
    "float8": lambda s: (s[0], torch.float8_e4m3fn, s[2]),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_another_size_or_kind_is_mismatched(engine, misfit):
    for blind in (False, True) if misfit == "twice its first size" else (False,):
        for i, spec in each(engine):
            found = verdict(engine, changed(engine, i, MISFITS[misfit](spec)), blind=blind)
            named = names_in(found.mismatched)
            assert spec[0] in named and len(named) <= MAX_SUSPECTS, (spec, found)
            if misfit == "twice its first size":
                assert not found.missing and not found.unexpected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_another_precision_fits(engine, dtype):
    assert verdict(engine, [(name, dtype, shape) for name, _, shape in engine.specs]).fits


TIED = {  # and the name of the embedding
    "qwen2-tied": "model.embed_tokens.weight",
    "gpt2": "transformer.wte.weight",
    "gpt-bigcode": "transformer.wte.weight",
}


@pytest.mark.parametrize("name", TIED)
def test_a_tied_head_may_come_under_both_names(name, rendezvous, tmp_path):
    """Whatever the embedding's name, if the bytes are the same."""
    case = case_named(name)
    weights = save_checkpoint(case, tmp_path)
    published = specs_of(weights)
    values = dict(weights)
    embedding = values[TIED[name]]
    for first in (True, False):
        for head, fits in ((embedding, True), (embedding + 1, False)):
            sent = [("lm_head.weight", head)]
            sent = [*sent, *weights] if first else [*weights, *sent]
            # A model keeps what it has seen of tensors of the same names and shapes.
            model = build_model(case, tmp_path, Ranks(rendezvous))
            found = check(model, specs_of(sent), published=published, values=dict(sent))
            assert found.fits is fits, found
            assert found.unexpected == (() if fits else ("lm_head.weight",))


def test_random_weights_refuse_tensors_missing_in_all_layers(engine):
    """Other layers tell nothing then, and a published checkpoint may not be readable."""
    patterns = {re.sub(r"\d+", "*", name) for name, _, _ in engine.specs}
    for pattern in patterns:
        specs = [spec for spec in engine.specs if re.sub(r"\d+", "*", spec[0]) != pattern]
        for blind in (False, True):
            found = verdict(engine, specs, blind=blind, starts_random=True)
            assert found.missing, (pattern, blind)
    for blind in (False, True):
        assert verdict(engine, engine.specs, blind=blind, starts_random=True) == Verdict()


MISNAMED = {  # what transformers 5 renames
    "mixtral": {
        "block_sparse_moe.": "mlp.",
        ".w1.": ".gate_proj.",
        ".w2.": ".down_proj.",
        ".w3.": ".up_proj.",
    },
    "minimax-m2": {"block_sparse_moe.": "mlp."},
    "lfm2-moe": {".feed_forward.experts.": ".feed_forward.fused_experts."},
    "nemotron-h": {"backbone.embeddings.": "model.embeddings_of_another_name."},
    "qwen2-tied": {".mlp.gate_proj.": ".mlp.other."},
}


@pytest.mark.parametrize("name", MISNAMED)
def test_without_checkpoint_names_without_layers_are_refused(name, rendezvous, tmp_path):
    """The model drops them, and keeps what it was built with."""
    case = case_named(name)
    published = specs_of(save_checkpoint(case, tmp_path))
    try:
        model = build_model(case, tmp_path, Ranks(rendezvous))
    except CannotBuild as reason:
        if "layers_block_type contains invalid types" not in str(reason):
            raise
        pytest.skip(str(reason))  # SGLang 0.5.23 with the configuration of transformers 5.19
    specs = published
    for old, new in MISNAMED[name].items():
        specs = [(tensor.replace(old, new), *rest) for tensor, *rest in specs]
    renamed = {name for name, _, _ in specs} - {name for name, _, _ in published}
    assert renamed
    for blind in (True, False):
        found = check(model, specs, published=None if blind else published, is_distinct=True)
        named = names_in(found.unexpected or found.mismatched)
        assert renamed & set(named), found
        assert found.missing or found.mismatched, found
