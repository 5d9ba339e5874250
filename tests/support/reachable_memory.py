"""What a model holds, where no memory saver knows it."""

from __future__ import annotations

from torch import nn

from sglang_loader.common.regions.intervals import merge
from sglang_loader.host_backup.allocations import Allocations
from sglang_loader.load_plan.destinations import collect_destinations


def reachable(model: nn.Module) -> Allocations:
    """Every storage that the model's modules reach, on the device of its parameters."""
    device = next(model.parameters()).device
    storages = collect_destinations(model).storages
    spans = [(s.data_ptr, s.data_ptr + s.nbytes) for s in storages if s.device == device]
    return Allocations(device, tuple(merge(spans)))
