"""Keeps weights on the host while their memory is released, without those that syncs rewrite.

What a `WeightsBackup` promises: a byte is either back bit for bit after `restore`, or it counts as
undefined until a sync that is proven to write it has completed. The bytes that are not saved are
those of a published coverage (policy "auto").

All ranges are address ranges. A published coverage keeps its storages alive, so that no address in
it can be given to another tensor.
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
"""Ranges of one allocation that are no further apart than this are saved as one."""


class WeightsBackup:
    """State of one model's weights across releases.

    Args:
        policy: "auto" saves all but the published coverage; "on" leaves saving to SGLang and only
            keeps track of syncs.
        allocations: returns the memory that a release frees; called at each release.

    Attributes:
        sync: the sync in progress, and whether the last one was complete.
    """

    def __init__(self, policy: HostBackup, allocations: Callable[[nn.Module], Allocations]) -> None:
        self.policy = policy
        self._allocations = allocations
        self._plan: LoadPlan | None = None
        self._covered: list[Interval] = []
        self._saved: SavedBytes | None = None
        self._lost: list[Interval] | None = None  # by the release under way
        self._undefined: list[Interval] = []
        self._written: list[Interval] = []  # by the sync in progress, besides the coverage
        self.sync = Completeness()

    @property
    def stale(self) -> str | None:
        """Why the engine must not compute with its weights, or None."""
        half_written = "the last sync was not complete" if self.sync.is_half_written else None
        return _undefined_text(self._undefined) or half_written

    @property
    def stale_once_synced(self) -> str | None:
        """The value of `stale` after `sync_completed`."""
        return _undefined_text(subtract(self._undefined, [*self._covered, *self._written]))

    @property
    def host_bytes(self) -> int:
        """Bytes held on the host now."""
        return self._saved.nbytes if self._saved is not None else 0

    def save(self, model: nn.Module) -> None:
        """Save the bytes that the next release would lose for good.

        While the weights are stale, the bytes that were saved before are kept instead: the weights
        may have been overwritten by a sync that failed.

        Raises:
            RuntimeError: the host has too little memory, or the memory cannot be enumerated.
        """
        if self.policy == "on":
            return
        started = time.perf_counter()
        now = self._allocations(model)
        freed = subtract(self._undefined, now.ranges)
        self._undefined = subtract(self._undefined, freed)
        wanted = self._worth_saving(now.ranges)
        kept = self._saved
        if kept is None or not all(contains(kept.ranges, piece) for piece in wanted):
            self._saved = kept = None  # before the next one is made
            synchronize_device(now.device)
            self._saved = kept = SavedBytes(now.device, wanted)
        self._lost = subtract(now.ranges, kept.ranges)
        logger.info(
            "weights backup: saved %.1f MB in %.3f s (syncs do not rewrite %.1f MB of %.1f MB)",
            kept.nbytes / 1e6,
            time.perf_counter() - started,
            num_bytes(subtract(now.ranges, self._covered)) / 1e6,
            num_bytes(now.ranges) / 1e6,
        )

    def release_refused(self) -> None:
        """To be called if the release for which `save` was called does not happen."""
        self._lost = None
        self._free_if_defined()

    def restore(self) -> None:
        """Write back the saved bytes; the others are undefined from now on."""
        if self._saved is None:
            return
        started = time.perf_counter()
        undefined = merge([*self._undefined, *(self._lost or ())])
        self._undefined = merge([*undefined, *self._saved.ranges])
        self._lost = None
        self._saved.restore()  # where this raises, nothing is defined
        self._undefined = undefined
        logger.info(
            "weights backup: restored %.1f MB in %.3f s; undefined until the next sync: %.1f MB",
            self._saved.nbytes / 1e6,
            time.perf_counter() - started,
            num_bytes(self._undefined) / 1e6,
        )
        self._free_if_defined()

    def publish(self, plan: LoadPlan) -> None:
        """From the next release on, save only bytes outside of the plan's coverage.

        To be called on every TP rank when a sync has written all of the coverage, and each later
        one is proven to, as long as the plan's guard holds.
        """
        if self._plan is plan:
            return
        self._plan = plan
        self._covered = _addresses(plan)
        self._undefined = subtract(self._undefined, self._covered)
        self._free_if_defined()

    def define(self, plan: LoadPlan) -> None:
        """Count the coverage of a plan as defined once this sync has succeeded; publish nothing.

        To be called on every TP rank if a sync has written all of the coverage by `load_weights`,
        because the replay of this plan failed.
        """
        self._written = _addresses(plan)

    def withdraw(self, reason: str) -> None:
        """Save everything again, as the plan does not hold any more; undefined bytes stay
        undefined. `reason` goes to the log.
        """
        if self._plan is not None:
            logger.warning("weights backup: all weights are saved, as no plan holds: %s", reason)
        self._plan, self._covered = None, []

    def sync_in_part(self, reason: str) -> None:
        """To be called if a sync has written only a part of the coverage: undefined bytes stay
        undefined.
        """
        self.withdraw(reason)

    def sync_failed(self) -> None:
        """To be called if a sync has failed: weights are half written, the plan is withdrawn."""
        self.sync.fail()
        self._written = []
        self.withdraw("a weight update failed")

    def sync_completed(self) -> None:
        """To be called if a sync has succeeded: the bytes of the coverage are defined.

        Without a published plan these are no bytes.
        """
        self.sync.complete()
        self._undefined = subtract(self._undefined, [*self._covered, *self._written])
        self._written = []
        self._free_if_defined()

    def _worth_saving(self, allocated: tuple[Interval, ...]) -> list[Interval]:
        left = subtract(allocated, [*self._covered, *self._undefined])
        return bridged(left, allocated)

    def _free_if_defined(self) -> None:
        if not self._undefined and self._lost is None:
            self._saved = None


def _addresses(plan: LoadPlan) -> list[Interval]:
    """The address ranges of a plan's coverage."""
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


def bridged(pieces: list[Interval], allocated: tuple[Interval, ...]) -> list[Interval]:
    """Join neighbours of one allocation across gaps of up to `BRIDGED_BYTES`."""
    joined: list[Interval] = []
    for piece in pieces:
        if joined:
            both = joined[-1][0], piece[1]
            if piece[0] - joined[-1][1] <= BRIDGED_BYTES and contains(allocated, both):
                joined[-1] = both
                continue
        joined.append(piece)
    return joined


_backups: WeakKeyDictionary[nn.Module, WeightsBackup] = WeakKeyDictionary()


def create_backup(
    model: nn.Module, policy: HostBackup, allocations: Callable[[nn.Module], Allocations]
) -> WeightsBackup:
    """Make this model's backup, which `backup_of` then returns."""
    _backups[model] = WeightsBackup(policy, allocations)
    return _backups[model]


def backup_of(model: nn.Module) -> WeightsBackup | None:
    """This model's backup; None where the server was not launched with our loaders."""
    return _backups.get(model)
