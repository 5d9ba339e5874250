"""Checks of this machine: memory shared between processes on its GPUs, and NCCL.

`gpus` are the names of the visible GPUs. Without any, a check says what the CPU platform does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from verl_sglang_sync.commands.doctor.check import FAIL, OK, WARN, Check, last_line, run_probe

IPC_BYTES = 1 << 20


def visible_gpus() -> tuple[str, ...]:
    """Names of the GPUs that torch sees; a missing torch is reported with the versions."""
    with suppress(ImportError):
        import torch

        if torch.cuda.is_available():
            return tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
    return ()


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
        names = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
        tried = f"{names}: processes read memory of each other, {len(gpus) ** 2} pairs"
        return Check("CUDA IPC", OK, tried if gpus else "no GPU visible: not tried")
    lines = "\n".join(f"GPU {r} cannot read GPU {o}: {why}" for (o, r), why in failed.items())
    if any(owner == reader for owner, reader in failed):
        advice = "in a container: --ipc=host (or a large --shm-size) and a shared PID namespace"
        return Check("CUDA IPC", FAIL, lines, advice)
    advice = "weights of other GPUs are exchanged, not read in place"
    return Check("CUDA IPC", WARN, lines, advice)


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
