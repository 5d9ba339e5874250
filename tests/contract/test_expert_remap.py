"""EPLB moves experts between two syncs: the plan steps aside, the next one knows the new places.

A real SGLang model with redundant experts, and SGLang's own expert map.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from contract.load_plan_proof import load_eagerly, split, sync
from contract.tiny_architecture_cases import case_named
from contract.tiny_architectures import (
    Case,
    NamedWeights,
    Ranks,
    build_model,
    finish_loading,
    prepare_process,
    random_weights,
    save_checkpoint,
    stop_process_groups,
)
from sglang_loader.load_plan.destinations import collect_destinations
from sglang_loader.session.model_loader import ModelLoader, SyncOutcome
from support.plan_check import differing, snapshot

prepare_process()
pytest.importorskip("sglang", reason="needs the SGLang that the plugin supports")

NUM_REDUNDANT = 2
NAMES = ("qwen3-moe", "deepseek-v2-lite")
AT_FIRST = [0, 1, 2, 3, 0, 1]
REMAPPED = [3, 1, 0, 2, 2, 3]


class Engine:
    """A model whose experts SGLang has placed, and its loader."""

    def __init__(self, case: Case, folder: Path, rendezvous: Path) -> None:
        like = save_checkpoint(case, folder)
        self.model = build_model(
            case, folder, Ranks(rendezvous), ep_num_redundant_experts=NUM_REDUNDANT
        )
        self.first, self.second = random_weights(like, 1), random_weights(like, 2)
        self.place(AT_FIRST)
        self.model.load_weights(iter(self.first))
        finish_loading(self.model)
        self.loader = ModelLoader(self.model)
        self.destinations = collect_destinations(self.model)

    def place(self, physical: list[int], *, nearest: bool = False) -> None:
        """Set SGLang's map, or change it in place as a rebalancing does.

        Args:
            physical: logical expert of each physical one, in every layer.
            nearest: as at SGLang's launch, which keeps one place for each logical expert.
        """
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.eplb import expert_location
        from sglang.srt.server_args import get_global_server_args

        arguments = get_global_server_args()
        num_layers = self.model.config.num_hidden_layers
        made = expert_location.ExpertLocationMetadata.init_by_mapping(
            arguments,
            ModelConfig.from_server_args(arguments),
            torch.tensor([physical] * num_layers),
            moe_ep_rank=0 if nearest else None,
        )
        current = expert_location.get_global_expert_location_metadata()
        if current is None:
            expert_location.set_global_expert_location_metadata(made)
        else:
            current.update(made, update_layer_ids=list(range(num_layers)))

    def sync(self, weights: NamedWeights) -> SyncOutcome:
        return sync(self.loader, self.model, weights, "many")

    def eager(self, weights: NamedWeights) -> list[torch.Tensor]:
        """What SGLang's own loader leaves; the model is as it was before."""
        before = snapshot(self.destinations)
        load_eagerly(self.model, split(weights, "many"))
        after = snapshot(self.destinations)
        for i, kept in enumerate(before):
            self.destinations.memory[i].copy_(kept)
        return after

    def has(self, expected: list[torch.Tensor]) -> bool:
        return differing(self.destinations, expected) == ()


@pytest.fixture(params=NAMES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    from sglang.srt.eplb import expert_location

    case = case_named(request.param)
    try:
        yield Engine(case, tmp_path / "model", tmp_path / "rendezvous")
    finally:
        expert_location._global_expert_location_metadata = None
        stop_process_groups()


def learn(engine: Engine) -> None:
    """A plan is made, and holds."""
    engine.sync(engine.second)
    outcome = engine.sync(engine.first)
    assert (outcome.num_eager, outcome.reason) == (0, None)


def test_a_remap_ends_the_plan_and_the_next_one_is_right(engine: Engine) -> None:
    learn(engine)
    before = engine.eager(engine.second)
    assert engine.sync(engine.second).num_eager == 0
    assert engine.has(before)
    engine.place(REMAPPED)
    after = engine.eager(engine.first)
    outcome = engine.sync(engine.first)
    assert outcome.num_replayed == 0
    assert "expert_map was" in (outcome.reason or "")
    assert engine.has(after)
    expected = engine.eager(engine.second)
    assert differing(engine.destinations, expected)
    outcome = engine.sync(engine.second)
    assert (outcome.num_eager, outcome.reason) == (0, None)
    assert engine.has(expected)
    assert any(not torch.equal(one, other) for one, other in zip(before, expected, strict=True)), (
        "the remap changed nothing"
    )


def test_a_place_more_for_an_expert_is_noticed(engine: Engine) -> None:
    """At its launch SGLang may load one of two places; after a rebalancing, both."""
    engine.place(AT_FIRST, nearest=True)
    learn(engine)
    engine.place(AT_FIRST)  # the same experts in the same places, but each is loaded now
    expected = engine.eager(engine.second)
    assert engine.sync(engine.second).num_replayed == 0
    assert engine.has(expected)
