"""Search for the memory under a memory saver's tag. A release loses this memory.

torch_memory_saver 0.0.10 serves a region from one `torch.cuda.MemPool` per tag and backup setting,
and unmaps whole segments of the pool. So the pool's own snapshot has every tensor under the tag,
whether or not a module reaches the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sglang_loader.common.regions.intervals import Interval, merge

WEIGHTS_TAG = "weights"


@dataclass(frozen=True, slots=True)
class Allocations:
    """Memory in use on one device. `ranges` are sorted, disjoint address ranges."""

    device: torch.device
    ranges: tuple[Interval, ...]


def bytes_at(device: torch.device, start: int, stop: int) -> torch.Tensor:
    """View the memory [start, stop) of `device` as a flat uint8 tensor, without owning it."""
    with torch.inference_mode(False), torch.no_grad():
        raw = torch._C._construct_storage_from_data_pointer(start, device, stop - start)
        view = torch.empty(0, dtype=torch.uint8, device=device)
        return view.set_(raw, 0, (stop - start,), (1,))


def under_weights_tag(model: nn.Module) -> Allocations:
    """Find all memory that the memory saver holds under the weights' tag.

    Raises:
        RuntimeError: no parameter was found in such memory, so the memory saver works differently.
    """
    device = next(model.parameters()).device
    segments = [s for s in _segments(WEIGHTS_TAG) if s["device"] == device.index]
    ranges = tuple(merge(ranges_in_use(segments)))
    spans = [(s["address"], s["address"] + s["total_size"]) for s in segments]
    if not any(a <= p.data_ptr() < b for p in model.parameters() for a, b in spans):
        raise RuntimeError(
            "the memory under the tag 'weights' was not found in the memory saver's pools, so it "
            "cannot be saved before a release. Use +weight_sync=flattened, with which SGLang saves "
            "all weights itself"
        )
    return Allocations(device, ranges)


def ranges_in_use(segments: Sequence[Mapping[str, Any]]) -> Iterator[Interval]:
    """Yield the address ranges of the tensors in an allocator snapshot's segments."""
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                # Beyond the requested size a block has padding that no tensor reaches.
                yield block["address"], block["address"] + block["requested_size"]


def nbytes_under(tag: str, device_index: int, *, on_host: bool = False) -> int:
    """Return the device memory under `tag`, in bytes, or 0 if no memory saver runs.

    Args:
        on_host: if True, count only memory that torch_memory_saver itself copies to the host in a
            release.
    """
    return _nbytes_on(_segments(tag, on_host=on_host), device_index)


def nbytes_in_pool(pool_id: tuple[int, int], device_index: int) -> int:
    """Return the device memory of one of torch's memory pools, such as the pool of CUDA graphs."""
    return _nbytes_on(torch.cuda.memory_snapshot(pool_id, include_traces=False), device_index)


def _nbytes_on(segments: Iterable[Mapping[str, Any]], device_index: int) -> int:
    return sum(s["total_size"] for s in segments if s["device"] == device_index)


def enumeration_problem() -> str | None:
    """Return the reason why the memory under a tag cannot be enumerated here, or None."""
    try:
        from torch_memory_saver import torch_memory_saver
    except ImportError as error:
        return f"torch_memory_saver cannot be imported: {error}"
    if not hasattr(torch_memory_saver, "_impl"):
        return "this torch_memory_saver keeps its pools elsewhere"
    if not hasattr(torch.cuda.MemPool, "snapshot"):
        return "this torch cannot take a snapshot of one memory pool"
    return None


def _segments(tag: str, *, on_host: bool = False) -> Iterator[Mapping[str, Any]]:
    """Yield the segments of the memory saver's pools for `tag`.

    Args:
        on_host: if True, only the segments with a host backup.
    """
    # There is no public way to list the pools. The key of a pool starts with its tag and a flag,
    # which is True with a host backup (0.0.10, pinned by a contract test).
    from torch_memory_saver import torch_memory_saver

    implementation = torch_memory_saver._impl
    if implementation is None:
        return
    for key, pool in list(implementation._mem_pools.items()):
        if key[0] == tag and (key[1] or not on_host):
            yield from pool.snapshot(include_traces=False)
