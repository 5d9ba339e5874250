"""What each preset would do on this machine, with verl's default settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_sglang_sync.config import PRESETS, WeightSyncConfig
from verl_sglang_sync.doctor.check import Check, failed, passed, warned
from verl_sglang_sync.doctor.hardware import Machine

ON_GPU = {
    "bucketed": "one request per bucket of at most {bucket}; one CUDA IPC handle per tensor and "
    "TP rank; no staging buffer",
    "flattened": "one request per bucket of at most {bucket}; one CUDA IPC handle per bucket and "
    "TP rank; a staging buffer of one bucket per GPU during the sync",
    "compiled": "one request per sync opens a session per GPU; buckets of at most {bucket} through "
    "two staging buffers, or read in place; the first sync records and checks a load plan, later "
    "ones replay it, and a release then saves only what the plan does not rewrite",
    "disaggregated": "for rollouts on GPUs of their own: the trainer's first rank broadcasts "
    "buckets of at most {bucket} with NCCL out of two staging buffers; two receive buffers per "
    "engine rank",
}
ON_CPU = {
    "bucketed": "one request per bucket of at most {bucket}; every tensor in shared memory",
    "flattened": "one request per bucket of at most {bucket}; one staging buffer in shared memory",
    "compiled": "one request per sync opens a session per rank; buckets of at most {bucket} in "
    "shared memory; the first sync records and checks a load plan, later ones replay it",
    "disaggregated": "the trainer's first rank broadcasts buckets of at most {bucket} with gloo "
    "out of two staging buffers",
}
STAGES = {
    True: "multi_stage_wake_up=True resumes weights, syncs, and then resumes the KV cache",
    False: "multi_stage_wake_up has no effect on memory: a CPU engine releases nothing",
}


def preset_checks(
    sections: Mapping[str, Mapping[str, Any]], machine: Machine, bucket_megabytes: int
) -> list[Check]:
    """Describe every preset.

    Args:
        sections: composed section by preset, as Hydra returned it.
        machine: where it would run.
        bucket_megabytes: verl's default bucket size, in MiB.
    """
    return [_preset(preset, sections.get(preset), machine, bucket_megabytes) for preset in PRESETS]


def _preset(
    preset: str, section: Mapping[str, Any] | None, machine: Machine, bucket_megabytes: int
) -> Check:
    title = f"+weight_sync={preset}"
    if section is None:
        return failed(title, "Hydra does not compose it", "see the Hydra config group's error")
    rollout = {
        "custom": {"weight_sync": dict(section)},
        "checkpoint_engine": {"update_weights_bucket_megabytes": bucket_megabytes},
        "multi_stage_wake_up": True,
        "free_cache_engine": True,
    }
    try:
        settings = WeightSyncConfig.from_rollout(rollout)
    except ValueError as error:
        return failed(title, str(error))
    assert settings is not None
    texts = ON_GPU if machine.has_gpu else ON_CPU
    what = texts[preset].format(bucket=f"{settings.bucket_bytes >> 20} MiB")
    detail = f"{what}. {STAGES[machine.has_gpu]}"
    if not machine.has_gpu:
        return warned(title, detail, "for development only: no GPU here")
    return passed(title, detail)
