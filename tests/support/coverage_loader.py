"""Custom weight loaders that drive the engine's host backup from a test, inside its process.

Each takes one named tensor whose name is JSON. They load nothing: `PUBLISH_LOADER` claims that
syncs write all parameters but the named ones, `POISON_LOADER` overwrites what was claimed, and
`STATE_LOADER` writes what the process holds and a hash of every storage to a file.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import psutil
import torch

from sglang_loader.common.regions.intervals import Interval, num_bytes, subtract
from sglang_loader.host_backup import backup_of, publish_coverage
from sglang_loader.host_backup.allocations import nbytes_under, under_weights_tag
from sglang_loader.load_plan.destinations import collect_destinations
from support.reachable_memory import reachable

PUBLISH_LOADER = "support.coverage_loader.publish"
POISON_LOADER = "support.coverage_loader.poison"
STATE_LOADER = "support.coverage_loader.write_state"
COVERAGE_LOADERS = (PUBLISH_LOADER, POISON_LOADER, STATE_LOADER)

NamedTensors = list[tuple[str, torch.Tensor]]


def publish(model: Any, named_tensors: NamedTensors) -> None:
    """Publish every parameter's storage as covered, but for the names in `uncovered`."""
    uncovered = json.loads(named_tensors[0][0])["uncovered"]
    publish_coverage(model, coverage(model, uncovered))


def poison(model: Any, named_tensors: NamedTensors) -> None:
    """Fill what `publish` called covered with 0xFF: NaN in bfloat16."""
    uncovered = json.loads(named_tensors[0][0])["uncovered"]
    destinations = collect_destinations(model)
    covered = coverage(model, uncovered)
    for i, storage in enumerate(destinations.storages):
        if storage.name in covered:
            destinations.memory[i].fill_(0xFF)
    torch.cuda.synchronize()


def write_state(model: Any, named_tensors: NamedTensors) -> None:
    """Write hashes, host memory and the backup's state to the file `path`."""
    destinations = collect_destinations(model)
    hashes = {
        storage.name: hashlib.sha256(destinations.memory[i].cpu().numpy().tobytes()).hexdigest()
        for i, storage in enumerate(destinations.storages)
    }
    backup = backup_of(model)
    allocated = under_weights_tag(model).ranges
    state = {
        "hashes": hashes,
        "policy": None if backup is None else backup.policy,
        "stale": None if backup is None else backup.stale,
        "host_bytes": 0 if backup is None else backup.host_bytes,
        "rss": psutil.Process().memory_info().rss,
        "pinned": torch.cuda.host_memory_stats().get("allocated_bytes.current", 0),
        "weights_bytes": num_bytes(allocated),
        "unreachable_bytes": num_bytes(subtract(allocated, reachable(model).ranges)),
        "segment_bytes": nbytes_under(["weights"], torch.cuda.current_device()),
    }
    Path(json.loads(named_tensors[0][0])["path"]).write_text(json.dumps(state))


def coverage(model: Any, uncovered: list[str]) -> dict[str, list[Interval]]:
    """Whole storages of the parameters, by key; those that are shared with `uncovered` left out."""
    destinations = collect_destinations(model)
    parameters = {t.storage for t in destinations.tensors if t.kind == "parameter"}
    kept = {t.storage for t in destinations.tensors if t.name in uncovered}
    return {
        storage.name: [(0, storage.nbytes)]
        for i, storage in enumerate(destinations.storages)
        if i in parameters - kept
    }
