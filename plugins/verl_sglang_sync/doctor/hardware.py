"""Checks of this machine: GPUs, CUDA IPC, torch_memory_saver, NCCL, /dev/shm.

`gpus` are the names of the visible GPUs; without any, a check says what the CPU platform does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from verl_sglang_sync.doctor.check import FAIL, OK, WARN, Check, ProbeError, last_line, run_probe

SHM = Path("/dev/shm")
SHM_WANTED_BYTES = 2 << 30
DOCKER_SHM = "in a container: docker run --shm-size=16g, or --ipc=host"
IPC_ADVICE = "in a container: --ipc=host (or a large --shm-size) and a shared PID namespace"
IPC_ELEMENTS = 1 << 20
IPC_TIMEOUT_S = 120.0
REGION_BYTES = 256 << 20
SAVER_ADVICE = "the engine could not sleep: actor_rollout_ref.rollout.free_cache_engine=False"


def visible_gpus() -> tuple[str, ...]:
    """Names of the GPUs that torch sees; a missing torch is reported with the versions."""
    with suppress(ImportError):
        import torch

        if torch.cuda.is_available():
            return tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
    return ()


def gpu_check(gpus: Sequence[str]) -> Check:
    """Which GPUs there are; none is a warning, because the CPU platform exists."""
    if not gpus:
        cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory().total / 2**30
        return Check(
            "GPU",
            WARN,
            f"none visible; the CPU platform (VERL_PLATFORM=cpu) would have {cores} cores "
            f"and {memory:.0f} GiB",
            "it runs tiny models, for development: see recipes/grpo_cpu_tiny.sh",
        )
    import torch

    names = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    driver = _driver_version() or "unknown"
    return Check("GPU", OK, f"{names}; driver {driver}, CUDA {torch.version.cuda}")


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return result.stdout.split("\n", 1)[0].strip() or None


def cuda_ipc_check(gpus: Sequence[str]) -> Check:
    """Share a CUDA tensor with another process: every bucket travels in this way."""
    title = "CUDA IPC"
    if not gpus:
        return Check(title, OK, "no GPU: not tried")
    try:
        expected, received = run_probe(share_a_cuda_tensor)
    except ProbeError as error:
        return Check(title, FAIL, last_line(str(error)), f"{IPC_ADVICE}\n{error}")
    if received is None:
        return Check(title, FAIL, "the other process could not open the tensor", IPC_ADVICE)
    if received != expected:
        return Check(title, FAIL, f"read {received}, expected {expected}", IPC_ADVICE)
    return Check(title, OK, "another process read a shared tensor")


def share_a_cuda_tensor() -> tuple[int, int | None]:
    """Probe: a tensor's sum, here and as a spawned process reads it (None: it did not answer)."""
    import torch
    import torch.multiprocessing as mp

    tensor = torch.arange(IPC_ELEMENTS, dtype=torch.int64, device="cuda")
    expected, received = int(tensor.sum()), None  # the sum also waits until the tensor is written
    context = mp.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_sum, args=(tensor, sender), daemon=True)
    process.start()
    sender.close()
    with suppress(EOFError):  # the other process died; its traceback is on stderr
        if receiver.poll(IPC_TIMEOUT_S):
            received = int(receiver.recv())
    process.join(timeout=10)
    process.kill()
    return expected, received


def _send_sum(tensor: Any, sender: Connection) -> None:
    sender.send(int(tensor.sum()))


def memory_saver_check(gpus: Sequence[str]) -> Check:
    """Release and resume a region: staged sleep and wake-up of the engine need it."""
    title = "torch_memory_saver"
    try:
        import torch_memory_saver
    except ImportError as error:
        return Check(title, FAIL, f"cannot be imported: {error}", "pip install torch-memory-saver")
    if not gpus:
        detail = "can be imported; the CPU engine keeps its memory and does without it"
        return Check(title, OK, detail)
    try:
        with torch_memory_saver.configure_subprocess():  # preloads its library
            freed_bytes, usable = run_probe(release_and_resume)
    except ProbeError as error:
        return Check(title, FAIL, last_line(str(error)), f"{SAVER_ADVICE}\n{error}")
    if freed_bytes < REGION_BYTES // 2 or not usable:
        detail = f"releasing {REGION_BYTES >> 20} MiB freed {freed_bytes >> 20} MiB, "
        return Check(title, FAIL, f"{detail}usable afterwards: {usable}", SAVER_ADVICE)
    return Check(title, OK, f"released and resumed {REGION_BYTES >> 20} MiB")


def release_and_resume() -> tuple[int, bool]:
    """Probe: bytes that a released region freed on the GPU; is it usable once it is resumed?"""
    import torch
    from torch_memory_saver import torch_memory_saver as saver

    with saver.region(tag="doctor"):
        region = torch.zeros(REGION_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    free_before, _ = torch.cuda.mem_get_info()
    saver.pause("doctor")
    free_while, _ = torch.cuda.mem_get_info()
    saver.resume("doctor")
    region.fill_(3)
    return free_while - free_before, int(region[:: REGION_BYTES // 16].sum()) == 3 * 16


def nccl_check(gpus: Sequence[str]) -> Check:
    """NCCL's version, with which trainers on several GPUs gather their shards."""
    import torch

    if not torch.distributed.is_nccl_available():
        if gpus:
            return Check(
                "NCCL", FAIL, "torch was built without it", "install a CUDA build of torch"
            )
        return Check("NCCL", OK, "not in this torch; the CPU platform uses gloo")
    found = ".".join(map(str, torch.cuda.nccl.version()))
    return Check("NCCL", OK, found if gpus else f"{found}; the CPU platform uses gloo")


def shared_memory_check() -> Check:
    """Size of /dev/shm: NCCL, Ray and, on a CPU, the buckets themselves live there."""
    title = str(SHM)
    if not SHM.is_dir():
        return Check(title, WARN, "does not exist", DOCKER_SHM)
    usage = shutil.disk_usage(SHM)
    detail = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    if usage.free < SHM_WANTED_BYTES:
        return Check(title, WARN, f"{detail}; {SHM_WANTED_BYTES >> 30} GiB wanted", DOCKER_SHM)
    return Check(title, OK, detail)
