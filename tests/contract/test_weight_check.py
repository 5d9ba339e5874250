"""Every fault of a sync's tensors is found and named, tensor by tensor.

On a handful of tiny SGLang classes: each tensor in turn is left out, renamed, resized, doubled, and
sent as another kind of number. Complete checkpoints of all architectures are checked where their
load plans are (`test_load_plan_architectures`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from contract.tiny_architecture_cases import case_named
from contract.tiny_architectures import (
    Ranks,
    build_model,
    finish_loading,
    prepare_process,
    save_checkpoint,
    stop_process_groups,
)
from contract.weight_check_proof import check, layout_of, specs_of
from sglang_loader.session.findings import Verdict
from sglang_loader.session.published import Spec
from sglang_loader.session.weight_check import known_verdict

prepare_process()
pytest.importorskip("sglang", reason="needs the SGLang that the plugin supports")

MAX_SUSPECTS = 3
"""Tensors that are named at an error: DeepSeek fuses two, and has a third in hand."""
NAMES = ("qwen2-tied", "phi3", "qwen3-moe", "deepseek-v3", "qwen2_5-vl")


@dataclass(frozen=True)
class Engine:
    """A tiny model, and what its checkpoint holds."""

    model: nn.Module
    specs: list[Spec]

    def check(self, specs: list[Spec], *, blind: bool = False) -> Verdict:
        """The verdict; `blind`: the engine has no published checkpoint to look at."""
        return check(self.model, specs, published=None if blind else self.specs)

    @property
    def some(self) -> list[int]:
        """Of the tensors whose names differ in numbers only, the last."""
        by_pattern = {re.sub(r"\d+", "*", name): i for i, (name, _, _) in enumerate(self.specs)}
        return list(by_pattern.values())


@pytest.fixture(scope="module", params=NAMES)
def engine(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    case = case_named(request.param)
    folder = tmp_path_factory.mktemp("checkpoint")
    weights = save_checkpoint(case, folder)
    model = build_model(case, folder, Ranks(tmp_path_factory.mktemp("ranks") / "rendezvous"))
    model.load_weights(iter(weights))
    finish_loading(model)
    yield Engine(model, specs_of(weights))
    stop_process_groups()


def changed(specs: list[Spec], index: int, change: Callable[[Spec], Spec]) -> list[Spec]:
    return [change(spec) if i == index else spec for i, spec in enumerate(specs)]


def names_in(found: tuple[str, ...]) -> list[str]:
    return [text.split(" ")[0] for text in found]


def test_a_verdict_is_remembered_with_its_tensors(engine: Engine) -> None:
    for specs, text in ((engine.specs, ""), (engine.specs[:-1], "1 missing")):
        engine.check(specs)
        known = known_verdict([layout_of(specs)], engine.model)
        assert known is not None and text in known.text()
    assert known_verdict([layout_of(engine.specs)], engine.model) is None


def test_a_tensor_that_is_left_out_is_missing(engine: Engine) -> None:
    for i in engine.some:
        verdict = engine.check(engine.specs[:i] + engine.specs[i + 1 :])
        assert verdict == Verdict(missing=(engine.specs[i][0],))


def test_a_tensor_under_another_name_is_unexpected_and_missing(engine: Engine) -> None:
    for i in engine.some:
        name, dtype, shape = engine.specs[i]
        other = f"{name}_of_another_model"
        verdict = engine.check(changed(engine.specs, i, lambda _: (other, dtype, shape)))  # noqa: B023
        if not verdict.mismatched:  # some loaders refuse what they do not know
            assert verdict.missing == (name,)
        assert other in names_in(verdict.unexpected or verdict.mismatched), (name, verdict)


def test_a_tensor_of_another_size_is_mismatched(engine: Engine) -> None:
    for blind in (False, True):
        for i in engine.some:
            doubled = changed(engine.specs, i, lambda s: (s[0], s[1], (2 * s[2][0], *s[2][1:])))
            verdict = engine.check(doubled, blind=blind)
            named = names_in(verdict.mismatched)
            assert engine.specs[i][0] in named, verdict
            assert len(named) <= MAX_SUSPECTS, verdict
            assert not verdict.missing
            assert not verdict.unexpected


def test_a_tensor_with_another_last_dimension_is_mismatched(engine: Engine) -> None:
    for i in engine.some:
        for size in (lambda n: 2 * n, lambda n: n - 1, lambda n: 1):
            cut = changed(
                engine.specs,
                i,
                lambda s: (s[0], s[1], (*s[2][:-1], size(s[2][-1]))),  # noqa: B023
            )
            named = names_in(engine.check(cut).mismatched)
            assert engine.specs[i][0] in named and len(named) <= MAX_SUSPECTS, cut[i]


def test_a_tensor_of_another_kind_of_number_is_mismatched(engine: Engine) -> None:
    for i in engine.some:
        for dtype in (torch.int32, torch.complex64, torch.float8_e4m3fn):
            other = changed(engine.specs, i, lambda s: (s[0], dtype, s[2]))  # noqa: B023
            named = names_in(engine.check(other).mismatched)
            assert engine.specs[i][0] in named and len(named) <= MAX_SUSPECTS, other[i]
    for dtype in (torch.float32, torch.float16):
        assert engine.check([(name, dtype, shape) for name, _, shape in engine.specs]).fits


def test_a_tied_head_may_come_under_both_names(engine: Engine) -> None:
    names = {name for name, _, _ in engine.specs}
    if "lm_head.weight" in names:
        pytest.skip("not tied")
    embedding = next(spec for spec in engine.specs if spec[0].endswith("embed_tokens.weight"))
    assert engine.check([*engine.specs, ("lm_head.weight", *embedding[1:])]).fits


def test_without_a_published_checkpoint_other_layers_tell_what_is_missing(engine: Engine) -> None:
    for i in engine.some:
        name = engine.specs[i][0]
        verdict = engine.check(engine.specs[:i] + engine.specs[i + 1 :], blind=True)
        assert verdict.missing or verdict.doubtful, name
        if name.endswith("self_attn.o_proj.weight"):
            assert len(verdict.missing) == 1
