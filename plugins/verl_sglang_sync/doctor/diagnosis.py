"""Runs all checks; the slow probes, which import verl and sglang, side by side."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from sglang_loader.probe import SGLangFacts
from verl_sglang_sync.doctor import hardware
from verl_sglang_sync.doctor.check import Check, guarded
from verl_sglang_sync.doctor.entry_points import (
    entry_point_checks,
    hydra_checks,
    sglang_checks,
    verl_checks,
)
from verl_sglang_sync.doctor.hydra_probe import HydraFacts
from verl_sglang_sync.doctor.presets import preset_checks
from verl_sglang_sync.doctor.probe import run_probe
from verl_sglang_sync.doctor.verl_probe import VerlFacts
from verl_sglang_sync.doctor.versions import version_checks

HARDWARE_CHECKS: tuple[tuple[str, Callable[[hardware.Machine], Check]], ...] = (
    ("GPU", hardware.gpu_check),
    ("CUDA IPC", hardware.cuda_ipc_check),
    ("torch_memory_saver", hardware.memory_saver_check),
    ("NCCL", hardware.nccl_check),
    (str(hardware.SHM), hardware.shared_memory_check),
)


def diagnose() -> list[Check]:
    """Look at versions, entry points, hooks, hardware and presets; takes about 20 seconds.

    Returns:
        One check per line of the report, in its order. A check that breaks is a failed check.
    """
    machine = hardware.look_at_machine()
    with ThreadPoolExecutor(max_workers=3) as pool:
        verl = pool.submit(
            run_probe,
            "verl_sglang_sync.doctor.verl_probe",
            VerlFacts,
            environment=machine.environment,
        )
        sglang = pool.submit(
            run_probe, "sglang_loader.probe", SGLangFacts, environment=machine.environment
        )
        hydra = pool.submit(run_probe, "verl_sglang_sync.doctor.hydra_probe", HydraFacts)
        checks = [
            *guarded("versions", version_checks),
            *guarded("entry points", entry_point_checks),
            *guarded("verl plugin", lambda: verl_checks(verl.result())),
            *guarded("SGLang plugin", lambda: sglang_checks(sglang.result())),
            *guarded("Hydra config group", lambda: hydra_checks(hydra.result())),
        ]
    for name, check in HARDWARE_CHECKS:
        checks += guarded(name, lambda check=check: [check(machine)])  # type: ignore[misc]
    checks += guarded("presets", lambda: _presets(hydra, verl, machine))
    return checks


def _presets(
    hydra: Future[HydraFacts], verl: Future[VerlFacts], machine: hardware.Machine
) -> list[Check]:
    return preset_checks(hydra.result().sections, machine, verl.result().bucket_megabytes)
