"""EPLB moves experts between two syncs: the plan steps aside, the next one knows the new places.

A real SGLang model with redundant experts, and SGLang's own expert map.
"""

import inspect
from functools import partial

import pytest
import torch

from contract.tiny_architecture_cases import case_named
from contract.tiny_architectures import Ranks, prepare_process, stop_process_groups
from contract.tiny_engine import TinyEngine
from sglang_loader.upstream import engine_context, launch_arguments

prepare_process()

NUM_REDUNDANT = 2
AT_FIRST = [0, 1, 2, 3, 0, 1]
REMAPPED = [3, 1, 0, 2, 2, 3]


def place(physical, model, *, nearest=False):
    """Set SGLang's map, or change it in place as a rebalancing does.

    Args:
        physical: logical expert of each physical one, in every layer.
        model: whose.
        nearest: as at SGLang's launch, which keeps one place for each logical expert.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.eplb import expert_location

    arguments, num_layers = launch_arguments(), model.config.num_hidden_layers
    make = expert_location.ExpertLocationMetadata.init_by_mapping
    given = {
        "server_args": arguments,  # which 0.5.23 does not ask for
        "model_config": ModelConfig.from_server_args(arguments),
        "physical_to_logical_map": torch.tensor([physical] * num_layers),
        "moe_ep_rank": 0 if nearest else None,
    }
    made = make(**{name: given[name] for name in inspect.signature(make).parameters})
    current = expert_location.get_global_expert_location_metadata()
    if current is None:
        expert_location.set_global_expert_location_metadata(made)
    else:
        current.update(made, update_layer_ids=list(range(num_layers)))


def forget_places():
    """A map of the module in 0.5.14, of the process's resources in later releases."""
    from sglang.srt.eplb import expert_location

    if hasattr(expert_location, "_global_expert_location_metadata"):
        expert_location._global_expert_location_metadata = None
    else:
        expert_location.set_global_expert_location_metadata(None, allow_overwrite=True)


@pytest.fixture(params=("qwen3-moe", "deepseek-v2-lite"))
def engine(request, tmp_path):
    ranks, options = Ranks(tmp_path / "rendezvous"), {"ep_num_redundant_experts": NUM_REDUNDANT}
    options["once_built"] = partial(place, AT_FIRST)
    try:
        yield TinyEngine(case_named(request.param), tmp_path / "model", ranks, **options)
    finally:
        forget_places()
        stop_process_groups()


def learn(engine):
    """A plan is made, and holds."""
    engine.sync(engine.second)
    outcome = engine.sync(engine.first)
    assert (outcome.num_eager, outcome.reason) == (0, None)


def test_after_a_remap_a_new_plan_is_right(engine):
    learn(engine)
    before = engine.eager(engine.second)
    assert engine.sync(engine.second).num_eager == 0
    assert engine.has(before)
    place(REMAPPED, engine.model)
    after = engine.eager(engine.first)
    outcome = engine.sync(engine.first)
    assert outcome.num_replayed == 0
    assert "expert_map was" in (outcome.reason or "")
    assert engine.has(after)
    expected = engine.eager(engine.second)
    assert not engine.has(expected)
    outcome = engine.sync(engine.second)
    assert (outcome.num_eager, outcome.reason) == (0, None)
    assert engine.has(expected)
    same = [torch.equal(one, other) for one, other in zip(before, expected, strict=True)]
    assert not all(same), "the remap changed nothing"


def test_a_place_more_for_an_expert_is_noticed(engine):
    """At its launch SGLang may load one of two places; after a rebalancing, both."""
    place(AT_FIRST, engine.model, nearest=True)
    if engine_context(engine.model)["expert_map"][0][-1] > 1:
        pytest.skip("this SGLang keeps all places of an expert where ranks exchange no tokens")
    learn(engine)
    place(AT_FIRST, engine.model)  # the same experts in the same places, but each is loaded now
    expected = engine.eager(engine.second)
    assert engine.sync(engine.second).num_replayed == 0
    assert engine.has(expected)
