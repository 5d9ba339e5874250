"""verl's public recipes with a preset: each runs, or is refused for a reason that README names."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf, open_dict

from contract.public_recipes import COMBINATIONS, WORDS
from unit.composed_recipe import ROLLOUT, compose
from verl_sglang_sync.preflight import RecipeError, examine

README = Path(__file__).parents[2] / "README.md"
REFUSED = {
    r"data_parallel_size=\d+: allowed: 1": "data parallelism without DP attention",
}
"""Reasons in the preflight's words, and what README's table says of each."""
ENGINES = ("megatron", "veomni", "torchtitan")
BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"
ROWS = COMBINATIONS.strip().splitlines()


@pytest.fixture(scope="module")
def recipes():
    """verl's own recipe by engine of the trainer and preset, composed once."""
    composed = {}

    def recipe(engine, preset):
        if (engine, preset) not in composed:
            chosen = [f"model_engine={engine}"] if engine else []
            config = compose(*chosen, f"+weight_sync={preset}")
            parts = OmegaConf.masked_copy(config, ["actor_rollout_ref", "trainer"])
            composed[engine, preset] = parts
        return composed[engine, preset].copy()

    return recipe


def combined(recipes, row):
    """The recipe with a row's settings, and with the preset that README gives for its trainer."""
    words = row.split()
    engine = next((word for word in words if word in ENGINES), None)
    preset = "disaggregated" if "separate_async" in words else "compiled"
    settings = [WORDS[word] for word in words if word not in ENGINES]
    if preset == "disaggregated":  # it has a backend of its own
        settings = [setting for setting in settings if not setting.startswith(BACKEND)]
    config = recipes(engine, preset)
    with open_dict(config):
        config.merge_with(OmegaConf.from_dotlist(settings))
    return config


def problems_of(config):
    try:
        examine(config)
    except RecipeError as error:
        return [line for line in str(error).splitlines() if line.startswith("  - ")]
    return []


def test_public_recipes_run_or_readme_names_the_reason(recipes):
    refused = {}
    for row in ROWS:
        for problem in problems_of(combined(recipes, row)):
            reasons = [said for found, said in REFUSED.items() if re.search(found, problem)]
            assert reasons, f"{row}: {problem}"
            refused[row] = reasons
    assert len(ROWS) > 90 and 0 < len(refused) < len(ROWS) / 10, refused
    table = README.read_text()
    assert all(said in table for reasons in refused.values() for said in reasons)


def test_every_word_occurs():
    assert set(WORDS) == set(COMBINATIONS.split())
