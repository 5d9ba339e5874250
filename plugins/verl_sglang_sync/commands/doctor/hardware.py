"""Checks of this machine: GPUs, CUDA IPC, torch_memory_saver, NCCL, /dev/shm, ulimits.

`gpus` are the names of the visible GPUs; without any, a check says what the CPU platform does.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from verl_sglang_sync.commands.doctor.check import FAIL, OK, WARN, Check, last_line, run_probe

SHM = Path("/dev/shm")
SHM_WANTED_BYTES = 2 << 30
IPC_BYTES = 1 << 20
OPEN_FILES_WANTED = 8192  # Ray's own warning
INFINIBAND = Path("/dev/infiniband")
REGION_BYTES = 256 << 20


def visible_gpus() -> tuple[str, ...]:
    """Names of the GPUs that torch sees; a missing torch is reported with the versions."""
    with suppress(ImportError):
        import torch

        if torch.cuda.is_available():
            return tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
    return ()


def gpu_check(gpus: Sequence[str]) -> Check:
    """The visible GPUs; none is a warning, because the CPU platform exists."""
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
    return Check("GPU", OK, f"{names}; CUDA {torch.version.cuda}")


FailedReads = dict[tuple[int, int], str]
"""By `(owner, reader)`, why the reader's process cannot read memory of the owner's GPU."""


def failed_reads(num_gpus: int, read: Callable[[int, int], None]) -> FailedReads:
    """Try every pair of GPUs, also each with itself, several at a time. `read`, given owner and
    reader, raises if the reader cannot read.
    """

    def attempt(pair: tuple[int, int]) -> str:
        try:
            read(*pair)
        except Exception as error:
            return last_line(f"{type(error).__name__}: {error}")
        return ""

    pairs = [(owner, reader) for owner in range(num_gpus) for reader in range(num_gpus)]
    with ThreadPoolExecutor(max_workers=8) as pool:
        reasons = zip(pairs, pool.map(attempt, pairs), strict=True)
        return {pair: reason for pair, reason in reasons if reason}


def probe_cuda_ipc() -> FailedReads:
    """Probe: the pairs of GPUs that do not share memory between processes."""
    import torch

    return failed_reads(torch.cuda.device_count(), read_from_another_process)


def read_from_another_process(owner: int, reader: int) -> None:
    """Have a process that sees one GPU alone, as an engine's, sum up a tensor of another GPU;
    raises if that fails, or the sum is wrong.
    """
    import torch

    from sglang_loader.common.shared_memory import share_storage

    tensor = torch.arange(IPC_BYTES, device=f"cuda:{owner}").to(torch.uint8)
    expected = int(tensor.sum())  # the sum also waits until the tensor is written
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    only = {"CUDA_VISIBLE_DEVICES": visible.split(",")[reader] if visible else str(reader)}
    handle = share_storage(tensor.untyped_storage())
    received = run_probe(sum_of, only, handle, timeout_s=120)
    if received != expected:
        raise RuntimeError(f"read {received}, expected {expected}")


def sum_of(handle: Any) -> int:
    """Probe: the sum of the bytes of a `BufferHandle`, mapped on the only visible GPU."""
    import torch

    from sglang_loader.common.shared_memory import map_buffer

    return int(map_buffer(handle, torch.device("cuda", 0)).sum())


def cuda_ipc_check(gpus: Sequence[str], failed: FailedReads) -> Check:
    """Sharing of GPU memory between processes, which every sync on one GPU needs."""
    if not failed:
        tried = f"processes read memory of each other, {len(gpus) ** 2} pairs"
        return Check("CUDA IPC", OK, tried if gpus else "no GPU: not tried")
    lines = "\n".join(f"GPU {r} cannot read GPU {o}: {why}" for (o, r), why in failed.items())
    if any(owner == reader for owner, reader in failed):
        advice = "in a container: --ipc=host (or a large --shm-size) and a shared PID namespace"
        return Check("CUDA IPC", FAIL, lines, advice)
    advice = "weights of other GPUs are exchanged, not read in place"
    return Check("CUDA IPC", WARN, lines, advice)


def memory_saver_check(gpus: Sequence[str]) -> Check:
    """Release and resume of a memory region, which sleep and wake-up of the engine need."""
    import torch_memory_saver

    title, mebibytes = "torch_memory_saver", REGION_BYTES >> 20
    if not gpus:
        detail = "can be imported; the CPU engine keeps its memory and does without it"
        return Check(title, OK, detail)
    with torch_memory_saver.configure_subprocess():  # preloads its library
        freed_bytes, usable = run_probe(release_and_resume)
    if freed_bytes < REGION_BYTES // 2 or not usable:
        detail = f"releasing {mebibytes} MiB freed {freed_bytes >> 20} MiB, usable afterwards: "
        advice = "the engine could not sleep: actor_rollout_ref.rollout.free_cache_engine=False"
        return Check(title, FAIL, f"{detail}{usable}", advice)
    return Check(title, OK, f"released and resumed {mebibytes} MiB")


def release_and_resume() -> tuple[int, bool]:
    """Probe: bytes that releasing a region freed on the GPU, and whether it was usable again."""
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
    """NCCL's version, and the variable that must be equal in trainers and engines."""
    import torch

    cumem, found = os.environ.get("NCCL_CUMEM_ENABLE", "not set"), "not in this torch"
    if torch.distributed.is_nccl_available():
        found = ".".join(map(str, torch.cuda.nccl.version()))
    elif gpus:
        return Check("NCCL", FAIL, found, "install a CUDA build of torch")
    detail = f"{found}; NCCL_CUMEM_ENABLE: {cumem}" + "; the CPU platform uses gloo" * (not gpus)
    if cumem not in ("not set", "0"):
        advice = "unset it: verl sets 0 for SGLang, and NCCL fails between processes that differ"
        return Check("NCCL", WARN, detail, advice)
    return Check("NCCL", OK, detail)


def shared_memory_check() -> Check:
    """Size of /dev/shm, which NCCL, Ray and, on a CPU, the buckets use."""
    usage = shutil.disk_usage(SHM)
    detail = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    if usage.free >= SHM_WANTED_BYTES:
        return Check(str(SHM), OK, detail)
    advice = "in a container: docker run --shm-size=16g, or --ipc=host"
    return Check(str(SHM), WARN, f"{detail}; {SHM_WANTED_BYTES >> 30} GiB wanted", advice)


def limits_check() -> Check:
    """Limits of open files, of which Ray has many, and of locked memory, which InfiniBand uses."""
    title, unlimited = "ulimits", resource.RLIM_INFINITY
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if locked == unlimited else f"{locked >> 10} KiB"
    detail = f"open files {'unlimited' if files == unlimited else files}, locked memory {shown}"
    advice = []
    if files != unlimited and files < OPEN_FILES_WANTED:
        advice.append(f"Ray wants {OPEN_FILES_WANTED} open files: --ulimit nofile=65536")
    if locked != unlimited and INFINIBAND.is_dir():
        advice.append("InfiniBand wants unlimited locked memory: --ulimit memlock=-1")
    return Check(title, WARN if advice else OK, detail, "; ".join(advice))
