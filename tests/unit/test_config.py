"""The settings: presets on disk, Hydra's composition with verl's recipe, and refusals."""

import dataclasses
import math
import re
from importlib.resources import files

import pytest
from omegaconf import OmegaConf

from unit.composed_recipe import SECTION, compose
from verl_sglang_sync.config import (
    BUCKET_KEY,
    COMPILED_KEYS,
    DISAGGREGATED_BACKEND,
    FLATTENED_ALIAS,
    MODES,
    PRESET_KEYS,
    REMOVED_VALUES,
    WeightSyncConfig,
)
from verl_sglang_sync.config import PRESETS as KNOWN_PRESETS
from verl_sglang_sync.http_settings import LIMITS

PRESETS = sorted(
    path.name.removesuffix(".yaml")
    for path in (files("verl_sglang_sync.conf") / "weight_sync").iterdir()
)
VERL_KEYS = {"bucket_bytes", "multi_stage_wake_up", "free_cache_engine", "exports_draft"}


def rollout(**changes):
    """A rollout section with every key that is read; `changes` by key, `__` for a dot."""
    config = OmegaConf.create(
        {
            "name": "sglang",
            "multi_stage_wake_up": True,
            "free_cache_engine": True,
            "checkpoint_engine": {"update_weights_bucket_megabytes": 512},
            "custom": {"weight_sync": {"mode": "flattened"}},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True, merge=False)
    return config


def test_the_presets_on_disk_are_known():
    assert (
        set(PRESETS) == {*KNOWN_PRESETS, FLATTENED_ALIAS} == {*MODES, "disaggregated", "bucketed"}
    )


def test_every_setting_is_a_presets_key_or_verls():
    fields = {field.name for field in dataclasses.fields(WeightSyncConfig)}
    assert fields == {*PRESET_KEYS, *COMPILED_KEYS} | VERL_KEYS


def test_settings_are_read_from_verls_dataclass():
    from verl.workers.config import CheckpointEngineConfig, RolloutConfig

    config = RolloutConfig(
        name="sglang",
        custom={"weight_sync": {"mode": "flattened"}},
        checkpoint_engine=CheckpointEngineConfig(update_weights_bucket_megabytes=7),
        multi_stage_wake_up=True,
        free_cache_engine=False,
    )
    assert WeightSyncConfig.from_rollout(config) == WeightSyncConfig(
        mode="flattened", bucket_bytes=7 << 20, multi_stage_wake_up=True, free_cache_engine=False
    )
    assert WeightSyncConfig.from_rollout(RolloutConfig(name="sglang")) is None


@pytest.mark.parametrize("custom", (None, {}, {"somebody": {"elses": "key"}}))
def test_without_a_preset_there_are_no_settings(custom):
    config = rollout(custom=custom, checkpoint_engine=None)  # nothing else is looked at
    assert WeightSyncConfig.from_rollout(config) is None


ROLLOUT = "actor_rollout_ref.rollout"
A_NUMBER = "expected a number greater than 0 and at most 86400"
ALL_KEYS = (*PRESET_KEYS, *COMPILED_KEYS)
OPERATIONS = ", ".join(LIMITS)
IN_SECTION = {  # key: values, and what is allowed
    "prove_every_n_syncs": ((-1, 1.5, True, "2"), "whole number from 0"),
    "keep_staging_buffers": ((True, False), "removed (staging buffers are freed after each sync"),
    "routes": (("pull", ["send"], None, 1, [["pull"]]), "allowed in it: pull, exchange"),
    "read_in_place": ((True, False), "this key was removed (use routes=[exchange]"),
    "exchange_shards": ((True, False), "this key was removed (use routes=[pull]"),
    "mode": (("fastest", "Flattened", "", None, 1), "allowed: flattened, compiled"),
    "request_timeout_s": ((0, -1, 0.0, True, "60", None, 86_401, math.inf, math.nan), A_NUMBER),
    **{f"timeouts_s.{name}": ((0, "60", math.inf), A_NUMBER) for name in LIMITS},
    "timeouts_s.updates": ((5,), f"unknown operation, allowed: {OPERATIONS}"),
    "timeouts_s": ((5,), f"expected seconds by operation: {OPERATIONS}"),
    "report_file": (("", 3, False), "expected a file path or null"),
    "host_backup": (("on", "auto", True), "removed (mode=flattened keeps all weights on the host"),
    "release_cuda_graphs": ((1, "true", None), "allowed: true, false"),
    "sleep_order": (([],), "this key was removed (use release_cuda_graphs=true"),
    "wake_order": (("weights",), "this key was removed (use release_cuda_graphs=true"),
    "stale_requests_timeout_s": ((-1, "60", None), "expected a number of at least 0 and at most 8"),
    "stale_requests": (("wait", "refuse"), "use stale_requests_timeout_s, where 0 refuses a req"),
    "manifest_check": (("Error", "", None, 0, True), "allowed: error, off"),
    "draft_weights": (("Synced", "", None, True), "allowed: auto, synced, frozen"),
    "router_url": (
        ("", "10.0.0.1:30000", "ftp://h", "http://::1:30000", 30000),
        "expected a URL such as http://10.0.0.1:30000",
    ),
    "bucket_mb": ((3,), f"unknown key, allowed: {', '.join(ALL_KEYS)}"),
    "Mode": (("flattened",), f"unknown key, allowed: {', '.join(ALL_KEYS)}"),
}
REFUSED = {
    **{f"{SECTION}.{key}": found for key, found in IN_SECTION.items()},
    SECTION: (("flattened", True), "+weight_sync=<flattened|compiled|disaggregated>"),
    BUCKET_KEY: ((0, -1, 0.5, 512.0, "512", True, None, 1 << 31), "a whole number of MiB from 1"),
    f"{ROLLOUT}.multi_stage_wake_up": ((1, "true", None), "allowed: true, false"),
    f"{ROLLOUT}.free_cache_engine": ((1, "true", None), "allowed: true, false"),
}


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        *((key, value, allowed) for key, (values, allowed) in REFUSED.items() for value in values),
        (f"{SECTION}.report_file", "~no_such_user/x", "there is no such user on this host"),
    ],
)
def test_bad_values_are_refused_with_what_is_allowed(key, value, allowed):
    changes = {f"{SECTION}.mode": "flattened", key: value}
    config = rollout(
        **{k.removeprefix(f"{ROLLOUT}.").replace(".", "__"): v for k, v in changes.items()}
    )
    with pytest.raises(ValueError, match=re.escape(f"{key}={value!r}: ")) as error:
        WeightSyncConfig.from_rollout(config)
    assert allowed in str(error.value)


def test_bucketed_is_another_name_of_flattened():
    settings = WeightSyncConfig.from_rollout(rollout(custom__weight_sync__mode="bucketed"))
    assert settings == WeightSyncConfig.from_rollout(rollout())


def test_a_request_need_not_wait():
    settings = WeightSyncConfig.from_rollout(
        rollout(custom__weight_sync__stale_requests_timeout_s=0)
    )
    assert settings.stale_requests_timeout_s == 0


def test_the_routers_key_is_refused_and_hidden():
    section = {"mode": "flattened", "router_url": "http://r:1", "router_api_key": "secret"}
    with pytest.raises(ValueError, match="VERL_SGLANG_SYNC_ROUTER_API_KEY") as error:
        WeightSyncConfig.from_rollout(rollout(custom__weight_sync=section))
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"custom__weight_sync__mode": "???"}, f"{SECTION}.mode=None: allowed: flattened"),
        ({"checkpoint_engine": {}}, f"{BUCKET_KEY}=None"),
    ],
)
def test_what_nobody_gave_is_refused(changes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        WeightSyncConfig.from_rollout(rollout(**changes))


# Composed with verl's own recipe.


@pytest.fixture(scope="module")
def recipes():
    return {preset: compose(f"+weight_sync={preset}") for preset in PRESETS} | {None: compose()}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_the_known_keys_and_defaults(recipes, preset):
    keys = OmegaConf.to_container(OmegaConf.select(recipes[preset], SECTION))
    mode = "compiled" if preset in ("compiled", "disaggregated") else "flattened"
    assert set(keys) == {*PRESET_KEYS, *(COMPILED_KEYS if mode == "compiled" else ())}
    assert keys.pop("timeouts_s") == dict.fromkeys(LIMITS)
    assert keys.pop("routes", ["pull", "exchange"]) == ["pull", "exchange"]
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(WeightSyncConfig)
        if field.default is not dataclasses.MISSING and field.name in keys
    }
    assert keys == {"mode": mode, **defaults}
    settings = WeightSyncConfig.from_rollout(recipes[preset].actor_rollout_ref.rollout)
    assert settings == WeightSyncConfig(
        mode=mode, bucket_bytes=2048 << 20, multi_stage_wake_up=False, free_cache_engine=True
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_changes_nothing_else_of_the_recipe(recipes, preset):
    with_preset = OmegaConf.to_container(recipes[preset])
    without = OmegaConf.to_container(recipes[None])
    assert with_preset != without
    rollout = with_preset["actor_rollout_ref"]["rollout"]
    assert list(rollout.pop("custom")) == ["weight_sync"]
    if preset == "disaggregated":
        assert rollout["checkpoint_engine"].pop("backend") == DISAGGREGATED_BACKEND
        rollout["checkpoint_engine"]["backend"] = "naive"
        environment = with_preset["ray_kwargs"]["ray_init"]["runtime_env"].pop("env_vars")
        assert environment == {"NCCL_CUMEM_ENABLE": "0"}
    assert with_preset == without


def test_off_is_read_if_yaml_makes_it_false():
    config = rollout(custom__weight_sync__manifest_check=False)
    assert WeightSyncConfig.from_rollout(config).manifest_check == "off"


@pytest.mark.parametrize(("key", "value"), REMOVED_VALUES)
def test_a_removed_value_names_its_replacement(key, value):
    config = rollout(**{f"custom__weight_sync__{key}": value})
    said = f"{SECTION}.{key}={value!r}: this value was removed (use "
    with pytest.raises(ValueError, match=re.escape(said)):
        WeightSyncConfig.from_rollout(config)


def test_the_host_keeps_less_with_a_load_plan(recipes):
    def host_backup(preset):
        return WeightSyncConfig.from_rollout(recipes[preset].actor_rollout_ref.rollout).host_backup

    kept = {preset: host_backup(preset) for preset in (*MODES, "disaggregated")}
    assert kept == {"flattened": "on", "compiled": "auto", "disaggregated": "auto"}


def test_there_are_at_most_twelve_settings():
    assert len(ALL_KEYS) <= 12
