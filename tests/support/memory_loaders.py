"""Custom weight loaders that load nothing: they look at the engine's memory from within.

Each is told what to do by JSON, the name of its one tensor, and writes its answer to the file
`path` that this names. `LOOK_LOADER` writes what the process holds; `POISON_LOADER` overwrites with
0xFF (NaN in every floating-point type) all that lies under the tag "weights" but for what a restore
brings back; `STRAY_LOADER` allocates under that tag what does not belong there; `PUBLISH_LOADER`
claims that syncs write all parameters.

Without a memory saver (a CPU) nothing is ever lost, so there the memory under the tag is what the
model reaches, and what a restore would bring back is what the load plan leaves out.
"""

import hashlib
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch

from sglang_loader.common.copies.strided import synchronize_device
from sglang_loader.common.regions.intervals import Interval, num_bytes, subtract
from sglang_loader.host_backup.allocations import (
    Allocations,
    bytes_at,
    nbytes_under,
    under_weights_tag,
)
from sglang_loader.host_backup.backup import backup_of
from sglang_loader.load_plan.destinations import collect_destinations
from support.engine_loaders import NamedTensors, hash_of
from support.reachable_memory import publish_coverage, reachable

LOOK_LOADER = "support.memory_loaders.look"
POISON_LOADER = "support.memory_loaders.poison_all_but_the_restored"
STRAY_LOADER = "support.memory_loaders.allocate_under_the_tag"
PUBLISH_LOADER = "support.memory_loaders.publish"
MEMORY_LOADERS = (LOOK_LOADER, POISON_LOADER, STRAY_LOADER, PUBLISH_LOADER)
STRAY_BYTES = 3 << 20


def _answer(named_tensors: NamedTensors, answer: Any) -> None:
    Path(json.loads(named_tensors[0][0])["path"]).write_text(json.dumps(answer))


def look(model: Any, named_tensors: NamedTensors) -> None:
    """Hashes and addresses of every storage, NaNs, allocations, and the backup's state."""
    synchronize_device(next(model.parameters()).device)
    destinations = collect_destinations(model)
    storages = destinations.storages
    allocated = under_the_tag(model)
    backup, is_on_gpu = backup_of(model), allocated.device.type == "cuda"
    state = {
        "hashes": {s.name: hash_of(destinations.memory[i]) for i, s in enumerate(storages)},
        "addresses": {s.name: [s.data_ptr, s.nbytes] for s in storages},
        "nan": sorted(
            tensor.name
            for tensor in destinations.tensors
            if tensor.dtype.is_floating_point and _has_nan(destinations, tensor)
        ),
        "pool": _hash_of_ranges(allocated),
        "allocated": {
            "weights": [len(allocated.ranges), num_bytes(allocated.ranges)],
            "segments": {
                tag: nbytes_under(tag, torch.cuda.current_device()) if is_on_gpu else 0
                for tag in ("weights", "kv_cache")
            },
        },
        "residue_bytes": num_bytes(restored(model, allocated)),
        "policy": None if backup is None else backup.policy,
        "stale": None if backup is None else backup.stale,
        "host_bytes": 0 if backup is None else backup.host_bytes,
        "rss": psutil.Process().memory_info().rss,
        "pinned": torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
        if is_on_gpu
        else 0,
    }
    _answer(named_tensors, state)


def poison_all_but_the_restored(model: Any, named_tensors: NamedTensors) -> None:
    """Overwrite; the answer is the number of bytes."""
    allocated = under_the_tag(model)
    lost = subtract(allocated.ranges, restored(model, allocated))
    for start, stop in lost:
        bytes_at(allocated.device, start, stop).fill_(0xFF)
    synchronize_device(allocated.device)
    _answer(named_tensors, num_bytes(lost))


def allocate_under_the_tag(model: Any, named_tensors: NamedTensors) -> None:
    """As a staging buffer would be that somebody makes within a region; the model keeps it."""
    device = next(model.parameters()).device
    region: Any = nullcontext()
    if device.type == "cuda":
        from torch_memory_saver import torch_memory_saver

        region = torch_memory_saver.region(tag="weights")
    with torch.inference_mode(False), region:
        model.stray = torch.zeros(STRAY_BYTES, dtype=torch.uint8, device=device)
    _answer(named_tensors, STRAY_BYTES)


def publish(model: Any, named_tensors: NamedTensors) -> None:
    """Publish the whole storages of the parameters as covered."""
    destinations = collect_destinations(model)
    parameters = {t.storage for t in destinations.tensors if t.kind == "parameter"}
    covered = [destinations.storages[i] for i in parameters]
    publish_coverage(model, {storage.name: [(0, storage.nbytes)] for storage in covered})
    _answer(named_tensors, len(covered))


def under_the_tag(model: Any) -> Allocations:
    """What is allocated under the tag "weights"."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    return under_weights_tag(model) if on_gpu else reachable(model)


def restored(model: Any, allocated: Allocations) -> list[Interval]:
    """What a resume brings back: the saved ranges while there are any, else what they would be."""
    backup = backup_of(model)
    if backup is None:
        return []
    if backup._saved is not None:
        return list(backup._saved.ranges)
    return backup._worth_saving(allocated.ranges)


def _has_nan(destinations: Any, tensor: Any) -> bool:
    raw = destinations.keep_alive[tensor.storage]
    view = torch.empty(0, dtype=tensor.dtype, device=raw.device)
    region = tensor.region
    view.set_(raw, region.offset // region.itemsize, region.shape, region.stride)
    return bool(view.isnan().any())


def _hash_of_ranges(allocated: Allocations) -> str:
    """Of all bytes under the tag, whether or not the model reaches them."""
    digest = hashlib.sha256()
    for start, stop in allocated.ranges:
        digest.update(bytes_at(allocated.device, start, stop).cpu().numpy().tobytes())
    return digest.hexdigest()
