"""What this machine can do for the weight sync: GPUs, CUDA IPC, memory saver, NCCL, /dev/shm."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from verl_sglang_sync.doctor.check import Check, failed, last_line, passed, warned
from verl_sglang_sync.doctor.cuda_ipc_probe import CudaIpcFacts
from verl_sglang_sync.doctor.memory_saver_probe import MemorySaverFacts
from verl_sglang_sync.doctor.probe import ProbeError, run_probe

SHM = Path("/dev/shm")
SHM_WANTED_BYTES = 2 << 30
DOCKER_SHM = "in a container: docker run --shm-size=16g, or --ipc=host"
NO_GPU = "no GPU: not tried"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware, as torch sees it.

    Attributes:
        gpus: names of the visible GPUs.
        driver: version of NVIDIA's driver, if it can be found out.
        cuda: version of the CUDA runtime that torch was built with.
        cpus: usable cores.
        ram_bytes: memory of the host, in bytes.
    """

    gpus: tuple[str, ...]
    driver: str | None
    cuda: str | None
    cpus: int
    ram_bytes: int

    @property
    def has_gpu(self) -> bool:
        """True if the weight sync can run on GPUs here."""
        return bool(self.gpus)

    @property
    def environment(self) -> dict[str, str]:
        """What SGLang needs in order to be imported on this machine."""
        return {} if self.has_gpu else {"SGLANG_USE_CPU_ENGINE": "1"}


def look_at_machine() -> Machine:
    """Ask torch, the driver and the operating system; without torch there is no GPU to speak of."""
    gpus: tuple[str, ...] = ()
    cuda = None
    with suppress(ImportError):  # the missing package is reported with the versions
        import torch

        cuda = torch.version.cuda
        if torch.cuda.is_available():
            indices = range(torch.cuda.device_count())
            gpus = tuple(torch.cuda.get_device_name(index) for index in indices)
    return Machine(
        gpus=gpus,
        driver=_driver() if gpus else None,
        cuda=cuda,
        cpus=len(os.sched_getaffinity(0)),
        ram_bytes=psutil.virtual_memory().total,
    )


def gpu_check(machine: Machine) -> Check:
    """Which GPUs there are; none is a warning, because the CPU platform exists."""
    if not machine.has_gpu:
        return warned(
            "GPU",
            f"none visible; the CPU platform (VERL_PLATFORM=cpu) would have {machine.cpus} cores "
            f"and {machine.ram_bytes / 2**30:.0f} GiB",
            "it runs tiny models, for development: see recipes/grpo_cpu_tiny.sh",
        )
    names = ", ".join(
        f"{machine.gpus.count(name)} x {name}" for name in dict.fromkeys(machine.gpus)
    )
    return passed("GPU", f"{names}; driver {machine.driver or 'unknown'}, CUDA {machine.cuda}")


def cuda_ipc_check(machine: Machine) -> Check:
    """Share a CUDA tensor with another process: every bucket travels in this way."""
    title = "CUDA IPC"
    if not machine.has_gpu:
        return passed(title, NO_GPU)
    advice = "in a container: --ipc=host (or a large --shm-size) and a shared PID namespace"
    return _probed(title, advice, lambda: _judge_ipc(title, advice))


def _judge_ipc(title: str, advice: str) -> Check:
    facts = run_probe("verl_sglang_sync.doctor.cuda_ipc_probe", CudaIpcFacts)
    if facts.received is None:
        return failed(title, "the other process could not open the tensor", advice)
    if facts.received != facts.expected:
        return failed(title, f"read {facts.received}, expected {facts.expected}", advice)
    return passed(title, "another process read a shared tensor")


def memory_saver_check(machine: Machine) -> Check:
    """Release and resume a region: staged sleep and wake-up of the engine need it."""
    title = "torch_memory_saver"
    try:
        import torch_memory_saver
    except ImportError as error:
        return failed(title, f"cannot be imported: {error}", 'pip install "torch-memory-saver"')
    if not machine.has_gpu:
        return passed(title, "can be imported; the CPU engine keeps its memory and does without it")
    advice = "the engine could not sleep: actor_rollout_ref.rollout.free_cache_engine=False"
    with torch_memory_saver.configure_subprocess():
        return _probed(title, advice, lambda: _judge_memory_saver(title, advice))


def _judge_memory_saver(title: str, advice: str) -> Check:
    facts = run_probe("verl_sglang_sync.doctor.memory_saver_probe", MemorySaverFacts)
    megabytes = facts.freed_bytes >> 20, facts.region_bytes >> 20
    if facts.freed_bytes < facts.region_bytes // 2 or not facts.usable:
        return failed(
            title,
            f"releasing {megabytes[1]} MiB freed {megabytes[0]} MiB, "
            f"usable afterwards: {facts.usable}",
            advice,
        )
    return passed(title, f"released and resumed {megabytes[1]} MiB")


def _probed(title: str, advice: str, judge: Callable[[], Check]) -> Check:
    try:
        return judge()
    except ProbeError as error:
        return failed(title, last_line(str(error)), f"{advice}\n{error}")


def nccl_check(machine: Machine) -> Check:
    """NCCL's version, with which trainers on several GPUs gather their shards."""
    import torch

    if not torch.distributed.is_nccl_available():
        if machine.has_gpu:
            return failed("NCCL", "torch was built without it", "install a CUDA build of torch")
        return passed("NCCL", "not in this torch; the CPU platform uses gloo")
    found = ".".join(map(str, torch.cuda.nccl.version()))
    return passed("NCCL", found if machine.has_gpu else f"{found}; the CPU platform uses gloo")


def shared_memory_check(machine: Machine) -> Check:
    """Size of /dev/shm: NCCL, Ray and, on a CPU, the buckets themselves live there."""
    title = str(SHM)
    if not SHM.is_dir():
        return warned(title, "does not exist", DOCKER_SHM)
    usage = shutil.disk_usage(SHM)
    detail = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    if usage.free < SHM_WANTED_BYTES:
        return warned(title, f"{detail}; {SHM_WANTED_BYTES >> 30} GiB wanted", DOCKER_SHM)
    return passed(title, detail)


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return result.stdout.split("\n", 1)[0].strip() or None
