"""Host copies of weights whose memory is released, except for weights that syncs rewrite.

A `WeightsBackup` promises this: after `restore` a byte is either back bit for bit, or counts as
undefined until a sync that is proven to write the byte has completed. With policy "auto" the bytes
of a coverage that is left out are not saved.

All ranges are address ranges. A coverage that is left out keeps its storages alive, so that no
address in the coverage can be given to another tensor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

from torch import nn

from sglang_loader.common.copies.strided import synchronize_device
from sglang_loader.common.engine_settings import HostBackup
from sglang_loader.common.regions.intervals import Interval, contains, merge, num_bytes, subtract
from sglang_loader.host_backup.allocations import Allocations
from sglang_loader.host_backup.completeness import Completeness
from sglang_loader.host_backup.saved_bytes import SavedBytes
from sglang_loader.load_plan.plan import LoadPlan

logger = logging.getLogger(__name__)

BRIDGED_BYTES = 4096
"""The largest gap between two ranges of one allocation that are saved as one."""


class WeightsBackup:
    """The state of one model's weights across releases.

    Args:
        policy: "auto" saves all but the coverage that is left out. "on" leaves saving to SGLang,
            and only records syncs.
        allocations: returns the memory that a release frees. Called at each release.

    Attributes:
        sync: the sync in progress, and whether the last one was complete.
    """

    def __init__(self, policy: HostBackup, allocations: Callable[[nn.Module], Allocations]) -> None:
        self.policy = policy
        self._allocations = allocations
        self._plan: LoadPlan | None = None
        self._covered: list[Interval] = []
        self._saved: SavedBytes | None = None
        self._lost: list[Interval] | None = None  # by the release in progress
        self._undefined: list[Interval] = []
        self._written: list[Interval] = []  # by the sync in progress, besides the coverage
        self.sync = Completeness()

    @property
    def stale(self) -> str | None:
        """The reason why the engine must not compute with its weights, or None."""
        half_written = "the last sync was not complete" if self.sync.is_half_written else None
        return _undefined_text(self._undefined) or half_written

    @property
    def stale_once_synced(self) -> str | None:
        """The value of `stale` after `sync_completed`."""
        return _undefined_text(self._undefined_once_synced())

    @property
    def host_bytes(self) -> int:
        """The number of bytes that are held on the host."""
        return self._saved.nbytes if self._saved is not None else 0

    def save(self, model: nn.Module) -> None:
        """Save the bytes that the next release would lose for good.

        Raises:
            RuntimeError: the host has too little memory, or the memory cannot be enumerated.
        """
        if self.policy == "on":
            return
        started = time.perf_counter()
        current = self._allocations(model)
        freed = subtract(self._undefined, current.ranges)
        self._undefined = subtract(self._undefined, freed)
        ranges = self._worth_saving(current.ranges)
        # While the weights are stale, the bytes that were saved earlier are kept: a failed sync may
        # have overwritten the weights.
        kept = self._saved
        if kept is None or not all(contains(kept.ranges, interval) for interval in ranges):
            self._saved = kept = None  # frees the host memory first
            synchronize_device(current.device)
            self._saved = kept = SavedBytes(current.device, ranges)
        self._lost = subtract(current.ranges, kept.ranges)
        logger.info(
            "weights backup: saved %.1f MB in %.3f s (syncs do not rewrite %.1f MB of %.1f MB)",
            kept.nbytes / 1e6,
            time.perf_counter() - started,
            num_bytes(subtract(current.ranges, self._covered)) / 1e6,
            num_bytes(current.ranges) / 1e6,
        )

    def release_refused(self) -> None:
        """Record that the release for which `save` was called does not happen."""
        self._lost = None
        self._free_if_defined()

    def restore(self) -> None:
        """Write back the saved bytes. All other bytes are undefined from here on."""
        if self._saved is None:
            return
        started = time.perf_counter()
        # Until the copies are done, the saved bytes count as undefined, too.
        undefined = merge([*self._undefined, *(self._lost or ())])
        self._undefined = merge([*undefined, *self._saved.ranges])
        self._lost = None
        self._saved.restore()  # if this raises, no byte is defined
        self._undefined = undefined
        logger.info(
            "weights backup: restored %.1f MB in %.3f s, undefined until the next sync: %.1f MB",
            self._saved.nbytes / 1e6,
            time.perf_counter() - started,
            num_bytes(self._undefined) / 1e6,
        )
        self._free_if_defined()

    def leave_out(self, plan: LoadPlan) -> None:
        """Save only bytes outside of the plan's coverage, from the next release on.

        Call this on every TP rank when a sync has written all of the coverage. Each later sync must
        be proven to write the coverage, as long as the plan's guard holds.
        """
        if self._plan is plan:  # left out already
            return
        self._plan = plan
        self._covered = _addresses(plan)
        self._undefined = subtract(self._undefined, self._covered)
        self._free_if_defined()

    def define(self, plan: LoadPlan) -> None:
        """Count the coverage of a plan as defined once this sync has succeeded. Leave nothing out.

        Call this on every TP rank if the replay of this plan failed, and `load_weights` has written
        all of the coverage in this sync.
        """
        self._written = _addresses(plan)

    def withdraw(self, reason: str) -> None:
        """Save everything again, because the plan does not hold any more.

        Undefined bytes stay undefined. `reason` goes to the log.
        """
        if self._plan is not None:
            text = "weights backup: all weights are saved in each release, which costs time: %s"
            logger.warning(text, reason)
        self._plan, self._covered = None, []

    def sync_in_part(self, reason: str) -> None:
        """Record that a sync has written only a part of the coverage.

        Undefined bytes stay undefined.
        """
        self.withdraw(reason)

    def sync_failed(self) -> None:
        """Record that a sync has failed: weights are half written. Withdraw the plan."""
        self.sync.fail()
        self._written = []
        self.withdraw("a weight update failed")

    def sync_completed(self) -> None:
        """Record that a sync has succeeded: the bytes of the coverage are defined."""
        self.sync.complete()
        self._undefined = self._undefined_once_synced()
        self._written = []
        self._free_if_defined()

    def _undefined_once_synced(self) -> list[Interval]:
        return subtract(self._undefined, [*self._covered, *self._written])

    def _worth_saving(self, allocated: tuple[Interval, ...]) -> list[Interval]:
        left = subtract(allocated, [*self._covered, *self._undefined])
        return bridged(left, allocated)

    def _free_if_defined(self) -> None:
        if not self._undefined and self._lost is None:
            self._saved = None


def _addresses(plan: LoadPlan) -> list[Interval]:
    """Return the address ranges of a plan's coverage."""
    bases = {entry.name: entry.data_ptr for entry in plan.destinations.storages}
    return merge(
        (bases[name] + start, bases[name] + stop)
        for name, ranges in plan.coverage.items()
        for start, stop in ranges
    )


def _undefined_text(ranges: list[Interval]) -> str | None:
    if not ranges:
        return None
    return f"{num_bytes(ranges)} bytes of the weights are undefined since the last resume"


def bridged(ranges: list[Interval], allocated: tuple[Interval, ...]) -> list[Interval]:
    """Join neighbours of one allocation across gaps of up to `BRIDGED_BYTES`."""
    joined: list[Interval] = []
    for start, stop in ranges:
        if joined:
            bridge = joined[-1][0], stop
            if start - joined[-1][1] <= BRIDGED_BYTES and contains(allocated, bridge):
                joined[-1] = bridge
                continue
        joined.append((start, stop))
    return joined


_backups: WeakKeyDictionary[nn.Module, WeightsBackup] = WeakKeyDictionary()


def create_backup(
    model: nn.Module, policy: HostBackup, allocations: Callable[[nn.Module], Allocations]
) -> WeightsBackup:
    """Make this model's backup. `backup_of` returns the backup from here on."""
    _backups[model] = WeightsBackup(policy, allocations)
    return _backups[model]


def backup_of(model: nn.Module) -> WeightsBackup | None:
    """Return this model's backup, or None if the server was not launched with our loaders."""
    return _backups.get(model)
