"""Checks of the presets: does Hydra compose them, and what would each do on this machine?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from verl_sglang_sync.config import PRESETS, WeightSyncConfig
from verl_sglang_sync.doctor.check import FAIL, OK, WARN, Check, last_line
from verl_sglang_sync.doctor.installation import REINSTALL

PLUGIN = "hydra_plugins.verl_sglang_sync.search_path.WeightSyncSearchPathPlugin"

ON_GPU = {
    "bucketed": "one request per sync opens a session per GPU; buckets of at most {bucket} "
    "through one staging buffer, shared by CUDA IPC; SGLang's own load_weights",
    "flattened": "one request per sync opens a session per GPU; buckets of at most {bucket} "
    "through two staging buffers, shared by CUDA IPC; SGLang's own load_weights",
    "compiled": "one request per sync opens a session per GPU; buckets of at most {bucket} "
    "through two staging buffers, or read in place; the first sync records and checks a load plan, "
    "later ones replay it, and a release then saves only what the plan does not rewrite",
    "disaggregated": "for rollouts on GPUs of their own: the trainer's first rank broadcasts "
    "buckets of at most {bucket} with NCCL out of two staging buffers; two receive buffers per "
    "engine rank",
}
ON_CPU = {
    "bucketed": "one request per sync opens a session per rank; buckets of at most {bucket} "
    "through one staging buffer in shared memory; SGLang's own load_weights",
    "flattened": "one request per sync opens a session per rank; buckets of at most {bucket} "
    "through two staging buffers in shared memory; SGLang's own load_weights",
    "compiled": "one request per sync opens a session per rank; buckets of at most {bucket} in "
    "shared memory; the first sync records and checks a load plan, later ones replay it",
    "disaggregated": "the trainer's first rank broadcasts buckets of at most {bucket} with gloo "
    "out of two staging buffers",
}
STAGES = {
    True: "multi_stage_wake_up=True resumes weights, syncs, and then resumes the KV cache",
    False: "multi_stage_wake_up has no effect on memory: a CPU engine releases nothing",
}


class HydraFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What Hydra found.

    Attributes:
        discovered: our search-path plugin is among those that Hydra found by itself.
        sections: composed section by preset.
        errors: Hydra's message by preset that does not compose.
    """

    discovered: bool
    sections: dict[str, dict[str, Any]]
    errors: dict[str, str]


def look_at_hydra() -> HydraFacts:
    """Probe: Hydra's own discovery and composition; imports Hydra only."""
    from hydra import compose, initialize
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin
    from omegaconf import OmegaConf

    found = Plugins.instance().discover(SearchPathPlugin)
    sections: dict[str, Any] = {}
    errors = {}
    with initialize(version_base=None, config_path=None):
        for preset in PRESETS:
            try:
                config = compose(overrides=[f"+weight_sync={preset}"])
                section = config.actor_rollout_ref.rollout.custom.weight_sync
                sections[preset] = OmegaConf.to_container(section)
            except Exception as error:
                errors[preset] = f"{type(error).__name__}: {error}"
    discovered = PLUGIN in {f"{cls.__module__}.{cls.__qualname__}" for cls in found}
    return HydraFacts(discovered=discovered, sections=sections, errors=errors)


def hydra_check(facts: HydraFacts) -> Check:
    """Does Hydra find the presets, and compose each?"""
    title = "Hydra config group"
    if not facts.discovered:
        return Check(title, FAIL, "Hydra did not find the search-path plugin", REINSTALL)
    if facts.errors:
        errors = "\n".join(f"+weight_sync={name}: {text}" for name, text in facts.errors.items())
        return Check(title, FAIL, last_line(errors), errors)
    presets = ", ".join(f"+weight_sync={preset}" for preset in facts.sections)
    return Check(title, OK, f"composes {presets}")


def preset_checks(
    sections: Mapping[str, Mapping[str, Any]], *, has_gpu: bool, bucket_megabytes: int
) -> list[Check]:
    """Describe every preset.

    Args:
        sections: composed section by preset, as Hydra returned it.
        has_gpu: it would run on GPUs.
        bucket_megabytes: verl's default bucket size, in MiB.
    """
    checks = []
    for preset in PRESETS:
        title = f"+weight_sync={preset}"
        if preset not in sections:
            advice = "see the Hydra config group's error"
            checks.append(Check(title, FAIL, "Hydra does not compose it", advice))
            continue
        rollout = {
            "custom": {"weight_sync": sections[preset]},
            "checkpoint_engine": {"update_weights_bucket_megabytes": bucket_megabytes},
            "multi_stage_wake_up": True,
            "free_cache_engine": True,
        }
        try:
            WeightSyncConfig.from_rollout(rollout)
        except ValueError as error:
            checks.append(Check(title, FAIL, str(error)))
            continue
        what = (ON_GPU if has_gpu else ON_CPU)[preset].format(bucket=f"{bucket_megabytes} MiB")
        detail = f"{what}. {STAGES[has_gpu]}"
        advice = "" if has_gpu else "for development only: no GPU here"
        checks.append(Check(title, OK if has_gpu else WARN, detail, advice))
    return checks
