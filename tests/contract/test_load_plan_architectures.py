"""A replayed load plan leaves the same bytes as SGLang's own `load_weights`, on every class that a
CPU can build.

For each architecture and bucket layout: load and trace with one set of random weights, prove the
plan with its own self-check, then load a second set eagerly, go back to the first, replay the
second, and compare every storage that the model reaches. The negative control drops one copy and
must be caught by the same comparison.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from contract.tiny_architecture_cases import CASES
from contract.tiny_architectures import (
    CannotBuild,
    Case,
    NamedWeights,
    Ranks,
    build_model,
    finish_loading,
    prepare_process,
    random_weights,
    save_checkpoint,
)
from sglang_loader.load_plan import (
    BucketLayout,
    DestinationProbe,
    LoadPlan,
    PlanBuilder,
    PlanExecutor,
    self_check,
)
from sglang_loader.load_plan.verify import differing, snapshot

prepare_process()
pytest.importorskip("sglang", reason="needs the SGLang that the plugin supports")

MIN_PROVED = 64
CONTEXT = {"tp_rank": 0, "tp_size": 1, "expert_map": None, "quantization": None}
LAYOUTS = ("single", "many", "cut")
_proved: dict[str, set[str]] = {}
_not_built: dict[str, str] = {}


@dataclasses.dataclass(frozen=True)
class Built:
    """One tiny model that was loaded once, and two sets of weights for it."""

    name: str
    model: nn.Module
    first: NamedWeights
    second: NamedWeights


@pytest.fixture(scope="session")
def rendezvous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks") / "rendezvous"


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def built(
    request: pytest.FixtureRequest, rendezvous: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Built]:
    case: Case = request.param
    folder = tmp_path_factory.mktemp("checkpoint")
    try:
        like = save_checkpoint(case, folder)
        model = build_model(case, folder, Ranks(rendezvous))
    except CannotBuild as reason:
        _not_built[case.name] = str(reason)
        pytest.skip(str(reason))
    first = random_weights(like, 1)
    model.load_weights(iter(first))
    finish_loading(model)
    yield Built(case.name, model, first, random_weights(like, 2))


def split(weights: NamedWeights, how: str) -> list[NamedWeights]:
    """The weights of each bucket: all in one, eight tensors in each, or cut in the middle."""
    size = {"single": len(weights), "many": 8, "cut": math.ceil(len(weights) / 2)}[how]
    return [weights[i : i + size] for i in range(0, len(weights), size)]


def pack(weights: NamedWeights) -> tuple[BucketLayout, torch.Tensor]:
    layout = BucketLayout.pack((name, t.shape, t.dtype) for name, t in weights)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for (_, view), (_, tensor) in zip(layout.views(buffer), weights, strict=True):
        view.copy_(tensor)
    return layout, buffer


def load_eagerly(model: nn.Module, buckets: list[NamedWeights]) -> None:
    for bucket in buckets:
        model.load_weights([(name, tensor.clone()) for name, tensor in bucket])


def replay(plan: LoadPlan, buffers: list[torch.Tensor]) -> None:
    executor = PlanExecutor(plan)
    for i, buffer in enumerate(buffers):
        executor.replay(i, buffer.clone())


def without_one_copy(plan: LoadPlan) -> LoadPlan:
    """The negative control: the same plan, less the first copy of its first bucket."""
    first, *rest = plan.buckets
    broken = dataclasses.replace(first, copies=first.copies[1:])
    return dataclasses.replace(plan, buckets=(broken, *rest))


@pytest.mark.parametrize("how", LAYOUTS)
def test_replay_is_byte_identical(built: Built, how: str) -> None:
    model = built.model
    builder = PlanBuilder(model, model.load_weights, CONTEXT)
    buckets = [pack(bucket) for bucket in split(built.first, how)]
    for layout, buffer in buckets:
        builder.add_bucket(layout, buffer)
    plan = builder.finish()
    result = self_check(model, plan, model.load_weights, [buffer for _, buffer in buckets])
    assert result.ok, result.reason

    later = split(built.second, how)
    buffers = [pack(bucket)[1] for bucket in later]
    load_eagerly(model, later)
    expected = snapshot(plan.destinations)
    load_eagerly(model, split(built.first, how))
    assert differing(plan.destinations, expected), "the two sets of weights are the same"
    replay(plan, buffers)
    assert differing(plan.destinations, expected) == ()
    assert DestinationProbe(model, plan.destinations).mismatch() is None

    broken = without_one_copy(plan)
    load_eagerly(model, split(built.first, how))
    replay(broken, buffers)
    assert differing(plan.destinations, expected), "a plan without one copy went unnoticed"
    assert not self_check(model, broken, model.load_weights, buffers).ok
    assert differing(plan.destinations, expected) == (), "a failed check left other weights"
    _proved.setdefault(built.name, set()).add(how)


def test_enough_architectures_were_proved() -> None:
    """Guards against a suite that skips everything; only where the whole file ran."""
    if len(_proved) + len(_not_built) < len(CASES):
        pytest.skip("only a part of the architectures was selected, or some failed")
    print(f"proved {len(_proved)}, not built: {_not_built}")
    assert len(_proved) >= MIN_PROVED, _not_built
    assert all(len(layouts) == len(LAYOUTS) for layouts in _proved.values()), _proved
