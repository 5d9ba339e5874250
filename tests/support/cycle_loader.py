"""Custom weight loaders that look at the engine's memory from within, on a CPU too.

Each takes one named tensor whose name is JSON. They load nothing: `LOOK_LOADER` writes what the
process holds to the file `path`, `POISON_LOADER` overwrites with 0xFF (NaN in every floating-point
type) all that lies under the tag "weights" but for what a restore brings back, `STRAY_LOADER`
allocates under that tag what does not belong there.

Without a memory saver (a CPU) nothing is ever lost, so there the memory under the tag is what the
model reaches, and what a restore would bring back is what the load plan leaves out.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from sglang_loader.common.regions.intervals import Interval, num_bytes, subtract
from sglang_loader.host_backup import backup_of
from sglang_loader.host_backup.allocations import (
    Allocations,
    bytes_at,
    nbytes_under,
    under_weights_tag,
)
from sglang_loader.host_backup.saved_bytes import synchronize
from sglang_loader.load_plan.destinations import collect_destinations
from support.reachable_memory import reachable

LOOK_LOADER = "support.cycle_loader.look"
POISON_LOADER = "support.cycle_loader.poison_all_but_the_restored"
STRAY_LOADER = "support.cycle_loader.allocate_under_the_tag"
CYCLE_LOADERS = (LOOK_LOADER, POISON_LOADER, STRAY_LOADER)
STRAY_BYTES = 3 << 20

NamedTensors = list[tuple[str, torch.Tensor]]


def look(model: Any, named_tensors: NamedTensors) -> None:
    """Write hashes and addresses of every storage, NaNs, allocations, and the backup's state."""
    synchronize(next(model.parameters()).device)
    destinations = collect_destinations(model)
    storages = destinations.storages
    allocated = under_the_tag(model)
    backup = backup_of(model)
    assert backup is not None
    state = {
        "hashes": {s.name: _hash(destinations.memory[i]) for i, s in enumerate(storages)},
        "addresses": {s.name: [s.data_ptr, s.nbytes] for s in storages},
        "nan": sorted(
            tensor.name
            for tensor in destinations.tensors
            if tensor.dtype.is_floating_point and _has_nan(destinations, tensor)
        ),
        "pool": _hash_of_ranges(allocated),
        "allocated": {
            "weights": [len(allocated.ranges), num_bytes(allocated.ranges)],
            "segments": {tag: _segment_bytes(tag) for tag in ("weights", "kv_cache")},
        },
        "residue_bytes": num_bytes(restored(model, allocated)),
        "policy": backup.policy,
        "stale": backup.stale,
        "host_bytes": backup.host_bytes,
    }
    Path(json.loads(named_tensors[0][0])["path"]).write_text(json.dumps(state))


def poison_all_but_the_restored(model: Any, named_tensors: NamedTensors) -> None:
    """Overwrite; the number of bytes goes to the file `path`."""
    allocated = under_the_tag(model)
    lost = subtract(allocated.ranges, restored(model, allocated))
    for start, stop in lost:
        bytes_at(allocated.device, start, stop).fill_(0xFF)
    synchronize(allocated.device)
    Path(json.loads(named_tensors[0][0])["path"]).write_text(json.dumps(num_bytes(lost)))


def allocate_under_the_tag(model: Any, named_tensors: NamedTensors) -> None:
    """As a staging buffer would be that somebody makes within a region; the model keeps it."""
    device = next(model.parameters()).device
    region: Any = nullcontext()
    if device.type == "cuda":
        from torch_memory_saver import torch_memory_saver

        region = torch_memory_saver.region(tag="weights")
    with torch.inference_mode(False), region:
        model.stray = torch.zeros(STRAY_BYTES, dtype=torch.uint8, device=device)
    Path(json.loads(named_tensors[0][0])["path"]).write_text(json.dumps(STRAY_BYTES))


def under_the_tag(model: Any) -> Allocations:
    """What is allocated under the tag "weights"."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    return under_weights_tag(model) if on_gpu else reachable(model)


def restored(model: Any, allocated: Allocations) -> list[Interval]:
    """What a resume brings back: the saved ranges while there are any, else what they would be."""
    backup = backup_of(model)
    assert backup is not None
    if backup._saved is not None:
        return list(backup._saved.ranges)
    return backup._worth_saving(allocated.ranges)


def _segment_bytes(tag: str) -> int:
    return nbytes_under([tag], torch.cuda.current_device()) if torch.cuda.is_available() else 0


def _has_nan(destinations: Any, tensor: Any) -> bool:
    raw = destinations.keep_alive[tensor.storage]
    view = torch.empty(0, dtype=tensor.dtype, device=raw.device)
    offset = tensor.offset // tensor.dtype.itemsize
    view.set_(raw, offset, tensor.shape, tensor.stride)
    return bool(view.isnan().any())


def _hash(raw: torch.Tensor) -> str:
    return hashlib.sha256(raw.cpu().numpy().tobytes()).hexdigest()


def _hash_of_ranges(allocated: Allocations) -> str:
    """Of all bytes under the tag, whether or not the model reaches them."""
    digest = hashlib.sha256()
    for start, stop in allocated.ranges:
        digest.update(bytes_at(allocated.device, start, stop).cpu().numpy().tobytes())
    return digest.hexdigest()
