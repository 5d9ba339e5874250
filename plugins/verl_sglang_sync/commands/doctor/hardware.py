"""Checks of this machine: memory shared between processes on its GPUs, and NCCL.

`gpus` are the names of the visible GPUs. On a machine without a GPU a check reports what the CPU
platform does.
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
    """Return the names of the GPUs that torch finds."""
    # `version_checks` reports a missing torch.
    with suppress(ImportError):
        import torch

        if torch.cuda.is_available():
            return tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
    return ()


FailedReads = dict[tuple[int, int], str]
"""The reasons why a reader's process cannot read memory of an owner's GPU, by `(owner, reader)`."""


def failed_reads(num_gpus: int, read: Callable[[int, int], None]) -> FailedReads:
    """Try every pair of GPUs, each GPU with itself included.

    Args:
        read: takes owner and reader, and raises if the reader cannot read.
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
    """Find the pairs of GPUs that do not share memory between processes. A probe."""
    import torch

    return failed_reads(torch.cuda.device_count(), read_from_another_process)


def read_from_another_process(owner: int, reader: int) -> None:
    """Read a tensor of `owner` in a new process to which only `reader` is visible, as in an engine.

    Raises:
        ProbeError: the process failed.
        RuntimeError: the process read other bytes.
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
    """Sum the bytes of a `BufferHandle`, mapped on the only visible GPU. A probe."""
    import torch

    from sglang_loader.common.shared_memory import map_buffer

    return int(map_buffer(handle, torch.device("cuda", 0)).sum())


def cuda_ipc_check(gpus: Sequence[str], failed: FailedReads) -> Check:
    """Check that processes share GPU memory, as every sync on one GPU requires."""
    if not failed:
        names = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
        tried = f"{names}: processes read memory of each other, {len(gpus) ** 2} pairs"
        return Check("CUDA IPC", OK, tried if gpus else "no GPU visible: not tried")
    lines = "\n".join(f"GPU {r} cannot read GPU {o}: {reason}" for (o, r), reason in failed.items())
    if any(owner == reader for owner, reader in failed):
        advice = "in a container: --ipc=host (or a large --shm-size) and a shared PID namespace"
        return Check("CUDA IPC", FAIL, lines, advice)
    advice = "weights of other GPUs are exchanged, not pulled"
    return Check("CUDA IPC", WARN, lines, advice)


def nccl_check(gpus: Sequence[str]) -> Check:
    """Check NCCL's version, and the variable that must be equal in trainers and engines."""
    import torch

    cumem, release = os.environ.get("NCCL_CUMEM_ENABLE", "not set"), "not in this torch"
    if torch.distributed.is_nccl_available():
        release = ".".join(map(str, torch.cuda.nccl.version()))
    elif gpus:
        return Check("NCCL", FAIL, release, "install a CUDA build of torch")
    detail = f"{release}, NCCL_CUMEM_ENABLE: {cumem}"
    if not gpus:
        detail += ". The CPU platform uses gloo"
    if cumem not in ("not set", "0"):
        advice = "unset it: verl sets 0 for SGLang, and NCCL fails between processes that differ"
        return Check("NCCL", WARN, detail, advice)
    return Check("NCCL", OK, detail)
