"""Checks of this machine: memory shared between processes on its GPUs, and NCCL."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from verl_sglang_sync.commands.doctor.check import FAIL, OK, WARN, Check, error_text, run_probe

IPC_BYTES = 1 << 20


def cuda_ipc_checks(num_gpus: int) -> Iterator[Check]:
    """Check that processes share GPU memory, as every sync on one GPU requires."""
    failed = run_probe(failed_reads, {}, num_gpus) if num_gpus else {}
    lines = "\n".join(f"GPU {r} cannot read GPU {o}: {error}" for (o, r), error in failed.items())
    if any(owner == reader for owner, reader in failed):
        advice = "in a container: --ipc=host (or a large --shm-size) and a shared PID namespace"
        yield Check("CUDA IPC", FAIL, lines, advice)
    elif failed:
        yield Check("CUDA IPC", WARN, lines, "weights of other GPUs are exchanged, not pulled")
    else:
        yield Check("CUDA IPC", OK, f"{num_gpus} GPUs visible, {num_gpus**2} pairs tried")


def failed_reads(num_gpus: int) -> dict[tuple[int, int], str]:
    """Read all GPUs in a process for each GPU. Return errors by `(owner, reader)`. A probe."""
    import torch

    from sglang_loader.common.shared_memory import share_storage

    tensors = [torch.arange(IPC_BYTES, device=f"cuda:{i}").to(torch.uint8) for i in range(num_gpus)]
    sums = [int(tensor.sum()) for tensor in tensors]  # a sum also waits until its tensor is written
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    failed: dict[tuple[int, int], str] = {}
    for reader in range(num_gpus):
        # As in an engine, the process sees its own GPU alone. A handle is for one process.
        only = {"CUDA_VISIBLE_DEVICES": visible.split(",")[reader] if visible else str(reader)}
        # Its own GPU first: an error of CUDA makes all later reads of the process fail.
        owners = [reader, *(owner for owner in range(num_gpus) if owner != reader)]
        try:
            handles = [share_storage(tensors[owner].untyped_storage()) for owner in owners]
            errors = run_probe(read_errors, only, handles, [sums[owner] for owner in owners])
        except Exception as error:
            errors = [error_text(error).splitlines()[-1]] * num_gpus
        pairs = zip(owners, errors, strict=True)
        failed |= {(owner, reader): error for owner, error in pairs if error}
    return failed


def read_errors(handles: Sequence[Any], sums: Sequence[int]) -> list[str]:
    """Sum shared memory on the only visible GPU. Return an error or "" for each handle. A probe."""
    import torch

    from sglang_loader.common.shared_memory import map_buffer

    errors = []
    for handle, expected in zip(handles, sums, strict=True):
        try:
            received = int(map_buffer(handle, torch.device("cuda", 0)).sum())
            errors.append("" if received == expected else f"read {received}, expected {expected}")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}".partition("\n")[0])
    return errors


def nccl_checks(num_gpus: int) -> Iterator[Check]:
    """Check NCCL's version, and the variable that must be equal in trainers and engines."""
    import torch

    release, cumem = "not in this torch", os.environ.get("NCCL_CUMEM_ENABLE", "not set")
    # With GPUs, a torch without NCCL raises an error here, which fails the check.
    if num_gpus or torch.distributed.is_nccl_available():
        release = ".".join(map(str, torch.cuda.nccl.version()))
    status, advice = OK, ""
    if cumem not in ("not set", "0"):
        advice = "unset it: verl sets 0 for SGLang, and NCCL fails between processes that differ"
        status = WARN
    yield Check("NCCL", status, f"{release}, NCCL_CUMEM_ENABLE: {cumem}", advice)
