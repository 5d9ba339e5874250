"""What a model holds, where no memory saver knows it."""

from collections.abc import Mapping

from torch import nn

from sglang_loader.common.regions.intervals import Interval, merge
from sglang_loader.host_backup.allocations import Allocations
from sglang_loader.host_backup.backup import backup_of
from sglang_loader.load_plan.destinations import collect_destinations
from sglang_loader.load_plan.plan import LoadPlan


def reachable(model: nn.Module) -> Allocations:
    """Every storage that the model's modules reach, on the device of its parameters."""
    device = next(model.parameters()).device
    storages = collect_destinations(model).storages
    spans = [(s.data_ptr, s.data_ptr + s.nbytes) for s in storages if s.device == device]
    return Allocations(device, tuple(merge(spans)))


def publish_coverage(model: nn.Module, written: Mapping[str, tuple[Interval, ...]]) -> None:
    """As a plan that writes these bytes of the model would, once it is proven."""
    backup = backup_of(model)
    assert backup is not None
    backup.leave_out(LoadPlan((), written, collect_destinations(model)))
