"""Probe: releases and resumes GPU memory with torch_memory_saver, as SGLang does with its weights.

Runs under `torch_memory_saver.configure_subprocess()`, which preloads its library.
"""

from __future__ import annotations

import msgspec

from verl_sglang_sync.doctor.probe import write_facts

REGION_BYTES = 256 << 20
TAG = "doctor"


class MemorySaverFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What releasing a region did.

    Attributes:
        region_bytes: bytes held by the region.
        freed_bytes: bytes that became free on the GPU while it was released.
        usable: the memory can be written and read after it was resumed.
    """

    region_bytes: int
    freed_bytes: int
    usable: bool


def collect() -> MemorySaverFacts:
    """Hold, release and resume a region on the current GPU."""
    import torch
    from torch_memory_saver import torch_memory_saver as saver

    with saver.region(tag=TAG):
        region = torch.zeros(REGION_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    free_before, _ = torch.cuda.mem_get_info()
    saver.pause(TAG)
    free_while, _ = torch.cuda.mem_get_info()
    saver.resume(TAG)
    region.fill_(3)
    return MemorySaverFacts(
        region_bytes=REGION_BYTES,
        freed_bytes=free_while - free_before,
        usable=int(region[:: REGION_BYTES // 16].sum()) == 3 * 16,
    )


if __name__ == "__main__":
    write_facts(collect())
