"""The check of a whole recipe: what cannot run is named before anything starts."""

import logging
import re

import pytest
from omegaconf import OmegaConf
from sglang.srt.model_executor import cuda_graph_config

from unit.composed_recipe import ROLLOUT, SECTION, compose
from verl_sglang_sync.config import COMPILED_KEYS, PRESET_KEYS
from verl_sglang_sync.preflight import (
    RecipeError,
    check_recipe,
    makes_breakable_graphs,
    with_recipe_check,
)

MODEL = "actor_rollout_ref.model"
BUCKET = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
CHOSEN = {preset: f"+weight_sync={preset}" for preset in ("flattened", "compiled")}
LOADER = f"{ROLLOUT}.engine_kwargs.sglang.custom_weight_loader"


@pytest.fixture(scope="module")
def recipes():
    """verl's recipe with each preset, composed once; `recipe(...)` changes copies.

    Only what the check reads: copies of the rest would take most of the time.
    """
    composed = {preset: compose(flag) for preset, flag in CHOSEN.items()} | {None: compose()}
    for preset, config in composed.items():
        part = OmegaConf.masked_copy(
            config.actor_rollout_ref, ["rollout", "model", "hybrid_engine"]
        )
        composed[preset] = OmegaConf.masked_copy(config, ["actor_rollout_ref", "trainer"])
        composed[preset].actor_rollout_ref = part
    return composed


@pytest.fixture
def recipe(recipes):
    """`recipe(preset, {key: value})`: a changed copy of a composed recipe."""

    def changed(preset, changes=()):
        config = recipes[preset].copy()
        for key, value in dict(changes).items():
            OmegaConf.update(config, key, value, merge=False, force_add=True)
        return config

    return changed


DELTAS = {
    f"{ROLLOUT}.checkpoint_engine.backend": "delta_sharded",
    "trainer.v1.trainer_mode": "separate_async",
}
GRAPHS = {f"{SECTION}.release_cuda_graphs": True}
PREFILL = f"{ROLLOUT}.engine_kwargs.sglang.cuda_graph_backend_prefill"
GRAPH_CONFIG = f"{ROLLOUT}.engine_kwargs.sglang.cuda_graph_config"
PREFILL_BACKEND = f"{GRAPH_CONFIG}.prefill.backend"


GOOD = {
    "as it is": {},
    "staged": {f"{ROLLOUT}.multi_stage_wake_up": True},
    "smallest bucket": {BUCKET: 1},
    "merged Megatron LoRA": {f"{MODEL}.lora.rank": 8, f"{MODEL}.lora.merge": True},
    "users' loaders": {LOADER: ["my.loader"]},
    "graphs asleep": {**GRAPHS, PREFILL: "disabled"},
    "graphs asleep, by phase": {**GRAPHS, GRAPH_CONFIG: {"prefill": {"backend": "disabled"}}},
    "no graphs": {f"{ROLLOUT}.enforce_eager": True},
    "fp8": {f"{ROLLOUT}.quantization": "fp8"},
    "deltas for standalone replicas": DELTAS,
}


@pytest.mark.parametrize("changes", GOOD.values(), ids=GOOD.keys())
@pytest.mark.parametrize("preset", CHOSEN)
def test_recipes_that_can_run_pass(recipe, preset, changes):
    config = recipe(preset, changes)
    before = OmegaConf.to_container(config)
    assert check_recipe(config).mode == preset
    assert OmegaConf.to_container(config) == before


DP_ATTENTION = {
    f"{ROLLOUT}.data_parallel_size": 2,
    f"{ROLLOUT}.engine_kwargs.sglang.enable_dp_attention": True,
}
BAD = {
    "vLLM": (
        {f"{ROLLOUT}.name": "vllm"},
        [f"cannot run with this recipe:\n  - {ROLLOUT}.name='vllm': allowed: 'sglang'"],
    ),
    "no rollout": ({f"{ROLLOUT}.name": "???"}, [f"{ROLLOUT}.name=None: allowed: 'sglang'"]),
    "empty bucket": ({BUCKET: 0}, [f"{BUCKET}=0: expected a whole number of MiB from 1"]),
    "disaggregation": (
        {f"{ROLLOUT}.disaggregation.enabled": True},
        [f"{ROLLOUT}.disaggregation.enabled=True: allowed: False"],
    ),
    "data parallelism": (
        {f"{ROLLOUT}.data_parallel_size": 2},
        [f"{ROLLOUT}.data_parallel_size=2: allowed: 1, or {ROLLOUT}.engine_kwargs.sglang.enable_"],
    ),
    "an adapter with DP attention": (
        {f"{MODEL}.lora_rank": 8, **DP_ATTENTION},
        [f"{ROLLOUT}.data_parallel_size=2 with a LoRA served as an adapter: allowed: 1"],
    ),
    "deltas of what they do not have": (
        {**DELTAS, f"{MODEL}.lora_rank": 8, f"{ROLLOUT}.quantization": "fp8"},
        [
            f"{ROLLOUT}.checkpoint_engine.backend='delta_sharded' with a LoRA: allowed: no LoRA",
            f"{ROLLOUT}.quantization='fp8' with {ROLLOUT}.checkpoint_engine.backend='delta_",
        ],
    ),
    "deltas of a merged LoRA": (
        {**DELTAS, f"{MODEL}.lora_rank": 8, f"{MODEL}.lora.merge": True},
        ["with a LoRA: allowed: no LoRA"],
    ),
    "other quantization": (
        {f"{ROLLOUT}.quantization": "torchao"},
        [f"{ROLLOUT}.quantization='torchao': allowed: null, 'fp8'"],
    ),
    "no number of nodes": (
        {"trainer.nnodes": ""},
        ["trainer.nnodes='': expected a whole number of at least 1"],
    ),
    "GPUs in words": (
        {"trainer.n_gpus_per_node": "8", "trainer.nnodes": None},
        [
            "trainer.n_gpus_per_node='8': expected a whole number of at least 1",
            "trainer.nnodes=None: expected a whole number of at least 1",
        ],
    ),
    "no GPUs": ({"trainer.n_gpus_per_node": 0}, ["trainer.n_gpus_per_node=0: expected a whole"]),
    "rollouts elsewhere": (
        {"trainer.v1.trainer_mode": "separate_async"},
        ["trainer.v1.trainer_mode='separate_async' with", "Use +weight_sync=disaggregated"],
    ),
    "a loader that is no list": ({LOADER: "a.b"}, [f"{LOADER}='a.b': expected a list of dotted"]),
    "graphs that are not there": (
        {**GRAPHS, f"{ROLLOUT}.enforce_eager": True},
        [f"{ROLLOUT}.enforce_eager=True with {SECTION}.release_cuda_graphs=True: SGLang"],
    ),
    "graphs that SGLang does not release": (
        {**GRAPHS, PREFILL: "breakable"},
        [f"{PREFILL}=breakable with {SECTION}.release_cuda_graphs=True: SGLang"],
    ),
    "graphs that no phase releases": (
        {**GRAPHS, PREFILL: "disabled", GRAPH_CONFIG: {"prefill": {"backend": "breakable"}}},
        [f"{PREFILL_BACKEND}=breakable with {SECTION}.release_cuda_graphs=True: SGLang"],
    ),
}


def test_graphs_by_default_are_refused_as_sglang_does(recipe):
    """From 0.5.15 on SGLang makes graphs of prefills by default that cannot be released."""
    config = recipe("flattened", GRAPHS)
    assert makes_breakable_graphs() == hasattr(cuda_graph_config, "default_prefill_backend")
    if makes_breakable_graphs():
        text = f"{PREFILL}=None with {SECTION}.release_cuda_graphs=True: by default"
        with pytest.raises(RecipeError, match=re.escape(text)):
            check_recipe(config)
    else:
        check_recipe(config)


@pytest.mark.parametrize(("changes", "texts"), BAD.values(), ids=BAD.keys())
def test_impossible_recipes_are_refused_with_allowed_values(recipe, changes, texts):
    with pytest.raises(RecipeError) as error:
        check_recipe(recipe("flattened", changes))
    for text in texts:
        assert text in str(error.value)


@pytest.mark.parametrize(
    "name", [name for name in BAD if not any(SECTION in key for key in BAD[name][0])]
)
def test_without_a_preset_nothing_is_checked(recipe, name):
    assert check_recipe(recipe(None, BAD[name][0])) is None


def test_a_preset_as_plain_value_is_refused(recipe):
    with pytest.raises(RecipeError, match="weight_sync='flattened': Hydra added a plain value"):
        check_recipe(recipe(None, {"weight_sync": "flattened"}))


def test_a_config_without_a_rollout_is_left_alone():
    assert check_recipe(OmegaConf.create({"model": {}})) is None


@pytest.mark.parametrize(
    ("preset", "changes", "warning"),
    (
        (None, {"multi_stage_wake_up": True}, "has no effect without +weight_sync"),
        (None, {"multi_stage_wake_up": True, "name": "vllm"}, None),
        (None, {}, None),
        (
            "flattened",
            {"multi_stage_wake_up": True, "free_cache_engine": False},
            "multi_stage_wake_up=True is ignored: free_cache_engine=False",
        ),
        ("flattened", {"multi_stage_wake_up": True}, None),
        (
            "compiled",
            {"checkpoint_engine.backend": "delta_sharded"},
            "verl's own backend updates the standalone replicas",
        ),
        ("flattened", {"free_cache_engine": False}, None),
    ),
)
def test_a_flag_that_is_ignored_says_so(recipe, caplog, preset, changes, warning):
    with caplog.at_level(logging.WARNING, logger="verl_sglang_sync"):
        check_recipe(recipe(preset, {f"{ROLLOUT}.{key}": v for key, v in changes.items()}))
    assert [warning in message for message in caplog.messages] == ([True] if warning else [])


MTP = f"{MODEL}.mtp"
TRAINED = {f"{MTP}.enable": True, f"{MTP}.enable_rollout": True}
EAGLE = {f"{ROLLOUT}.engine_kwargs.sglang.speculative_algorithm": "EAGLE"}


@pytest.mark.parametrize(
    ("changes", "is_synced", "is_remarked"),
    (
        ({}, False, False),
        (EAGLE, False, True),
        ({f"{ROLLOUT}.engine_kwargs.sglang.speculative_algorithm": "NGRAM"}, False, False),
        (TRAINED, True, False),
        ({**EAGLE, f"{SECTION}.draft_weights": "synced"}, True, False),
        ({**EAGLE, f"{SECTION}.draft_weights": "frozen"}, False, False),
        ({**TRAINED, f"{SECTION}.draft_weights": "frozen"}, False, False),
    ),
    ids=str,
)
def test_a_draft_of_the_trainer_is_synced(recipe, caplog, changes, is_synced, is_remarked):
    with caplog.at_level(logging.WARNING, logger="verl_sglang_sync"):
        assert check_recipe(recipe("compiled", changes)).syncs_draft == is_synced
    assert ["no sync changes the draft" in text for text in caplog.messages] == [True] * is_remarked


def test_a_recipe_is_checked_before_verls_validation(recipe):
    seen = []

    def validate_config(config, use_reference_policy, *, use_critic):
        seen.append((config, use_reference_policy, use_critic))
        return "verl's reply"

    validate = with_recipe_check(validate_config)
    good, bad = recipe("flattened"), recipe("flattened", {BUCKET: 0})
    assert validate(good, True, use_critic=False) == "verl's reply"
    assert seen == [(good, True, False)]
    with pytest.raises(RecipeError):
        validate(bad, True, use_critic=False)
    assert len(seen) == 1
    assert validate.__wrapped__ is validate_config


OTHER_VALUES = {
    "request_timeout_s": 5.0,
    "timeouts_s": {"update": 5.0},
    "report_file": "syncs.jsonl",
    "release_cuda_graphs": True,
    "stale_requests_timeout_s": 5.0,
    "router_url": "http://router:1",
    "manifest_check": "off",
    "draft_weights": "synced",
    "prove_every_n_syncs": 2,
    "on_fallback": "error",
    "routes": [],
}
SLEEP = {"release_cuda_graphs"}
SYNC = {
    *("timeouts_s", "manifest_check", "prove_every_n_syncs", "on_fallback"),
    "routes",
}
NCCL = {f"{ROLLOUT}.checkpoint_engine.backend": "nccl"}
BACKEND = {
    f"{ROLLOUT}.checkpoint_engine.backend": "sglang_sync",
    "trainer.v1.trainer_mode": "separate_async",
}
HYBRID = "actor_rollout_ref.hybrid_engine"
WITHOUT_EFFECT = {  # recipe: what it sets, its modes, the keys that nothing reads
    "colocated": ({}, CHOSEN, set()),
    "engines stay awake": ({f"{ROLLOUT}.free_cache_engine": False}, CHOSEN, SLEEP),
    "broadcast": ({**BACKEND, HYBRID: False}, ("flattened", "compiled"), SLEEP),
    "broadcast, and engines beside the trainer": (
        {**BACKEND, HYBRID: True},
        ("flattened", "compiled"),
        set(),
    ),
    "verl's own update": ({**NCCL, HYBRID: False}, CHOSEN, SLEEP | SYNC),
    "verl's own update, and engines beside the trainer": ({**NCCL, HYBRID: True}, CHOSEN, set()),
    "DP attention": (DP_ATTENTION, CHOSEN, set()),
    "no hybrid engine, but no other backend": ({HYBRID: False}, CHOSEN, set()),
    "a LoRA adapter": ({f"{MODEL}.lora_rank": 8}, CHOSEN, SLEEP),
    "a LoRA adapter, Megatron": ({f"{MODEL}.lora.rank": 8}, CHOSEN, SLEEP),
    "a merged LoRA": ({f"{MODEL}.lora_rank": 8, f"{MODEL}.lora.merge": True}, CHOSEN, set()),
    "a draft model": (EAGLE, CHOSEN, set()),
}


def test_every_key_is_in_the_table():
    assert OTHER_VALUES.keys() == {*PRESET_KEYS, *COMPILED_KEYS} - {"mode"}


@pytest.mark.parametrize("key", OTHER_VALUES)
@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_key_that_does_nothing_is_remarked(recipe, caplog, name, key):
    base, modes, without_effect = WITHOUT_EFFECT[name]
    if base != EAGLE:
        without_effect = {*without_effect, "draft_weights"}
    changes = {**base, PREFILL: "disabled", f"{SECTION}.{key}": OTHER_VALUES[key]}
    for mode in modes:
        is_ignored = key in without_effect or (key in COMPILED_KEYS and mode != "compiled")
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="verl_sglang_sync"):
            settings = check_recipe(recipe(mode, changes))
        assert getattr(settings, key) == OTHER_VALUES[key], "as the recipe says"
        remarks = [text for text in caplog.messages if "without effect in this recipe" in text]
        assert len(remarks) == is_ignored
        assert all(f"{key}={OTHER_VALUES[key]!r} (" in text for text in remarks)


def test_a_compiled_recipe_may_run_flattened(recipe, caplog):
    with caplog.at_level(logging.WARNING, logger="verl_sglang_sync"):
        assert (
            check_recipe(recipe("compiled", {f"{SECTION}.mode": "flattened"})).mode == "flattened"
        )
    assert not caplog.messages, "its defaults are no user's wish"


def test_keys_that_do_nothing_are_one_remark(recipe, caplog):
    keys = {"release_cuda_graphs": True, "draft_weights": "synced"}
    awake = {f"{ROLLOUT}.free_cache_engine": False, PREFILL: "disabled"}
    changes = awake | {f"{SECTION}.{key}": value for key, value in keys.items()}
    with caplog.at_level(logging.WARNING, logger="verl_sglang_sync"):
        check_recipe(recipe("compiled", changes))
    (remark,) = caplog.messages
    assert all(f"{key}={value!r}" in remark for key, value in keys.items())
