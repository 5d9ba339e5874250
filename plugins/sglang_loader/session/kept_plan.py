"""The load plan of one model from sync to sync: its origin, how far it is trusted, and its end.

    kept = KeptPlan(model, load_weights)
    kept.begin_sync(context, ...)          # drops a plan that does not hold for this sync
    kept.take(plan)                        # `load_weights` was recorded, and the plan checked
    kept.find_saved(layout)                # or: the plan of an earlier process is tried
    kept.trust() / kept.doubt(reason)      # a proof of a route was good, or has failed

`model_loader.ModelLoader` loads a sync by this plan, or by `load_weights`. The plan may cease to
hold: another layout, another expert map, a parameter at another address, a failed check. Then
`drop` logs the reason once, and withdraws the plan from the host backup.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from sglang_loader.common.digest import digests_on_host
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.naming import listed
from sglang_loader.common.regions.intervals import Interval, subtract
from sglang_loader.host_backup.backup import backup_of
from sglang_loader.load_plan.destinations import (
    Destinations,
    collect_destinations,
    first_difference,
)
from sglang_loader.load_plan.executor import PlanExecutor
from sglang_loader.load_plan.guard import DestinationProbe, context_change
from sglang_loader.load_plan.plan import LoadPlan, LoadWeights, PlanRefused
from sglang_loader.load_plan.saved_plan import SavedPlan
from sglang_loader.load_plan.uses import BucketUses
from sglang_loader.session.plan_store import PlanStore

logger = logging.getLogger(__name__)

MAX_RECORDINGS = 3
"""Most plans made in a row without one sync replayed in full. Then eager syncs lie between."""

MAX_SYNCS_APART = 64
"""Eager syncs between two recordings: 1, then 2, 4, 8 and so on, up to this many."""


class _Trust(Enum):
    """The syncs that a model's load plan may load.

    CHECKED --> SAVED: the plan of an earlier process was found, in place of a trace
    CHECKED, SAVED --> DOUBTED: the proof of a route has failed
    SAVED, DOUBTED --> CHECKED: a proof of a route was good, or the saved plan was dropped
    CHECKED, SAVED, DOUBTED --> DISTRUSTED: a proof found wrong bytes that the engine has served
    """

    CHECKED = "all syncs"
    SAVED = "the proof of a route, by a saved plan"
    DOUBTED = "the proof of a route"
    DISTRUSTED = "none"


@dataclass(frozen=True)
class CheckedPlan:
    """A load plan that was checked, with its executor and its probe."""

    plan: LoadPlan
    executor: PlanExecutor
    probe: DestinationProbe


@dataclass(frozen=True)
class HeldBytes:
    """The digests of what a model held at one time.

    Attributes:
        destinations: every storage that the model reaches.
        digests: of these storages: int64 `[num_storages, 2]` on the host.
    """

    destinations: Destinations
    digests: torch.Tensor

    @classmethod
    def of(cls, model: Any) -> HeldBytes:
        """Take the digests of the model's present bytes."""
        destinations = collect_destinations(model)
        return cls(destinations, digests_on_host(destinations.memory))

    def differing(self, model: Any) -> list[str]:
        """Return the names of tensors whose storages hold other bytes now, or moved."""
        before = self.destinations
        # A storage at another address has no digest from before.
        moved = first_difference(before, collect_destinations(model))
        changed = (digests_on_host(before.memory) != self.digests).any(dim=1)
        storages = changed.nonzero().flatten().tolist()
        names = [name for storage in storages for name in before.names_of(storage)]
        return names if moved is None else [moved, *names]


@dataclass(frozen=True)
class BegunProof:
    """The begun proof of a saved plan, in which the engine overwrites what the plan writes.

    Attributes:
        held: what the model held before.
        sync: see `SessionDescriptor`.
        coverage: of the plan.
    """

    held: HeldBytes
    sync: str
    coverage: Mapping[str, Sequence[Interval]]

    def not_written(self, plan: LoadPlan | None) -> list[str]:
        """Return the names of storages with overwritten bytes that the plan does not write."""
        written = plan.coverage if plan is not None else {}
        pairs = self.coverage.items()
        return [name for name, ranges in pairs if subtract(ranges, written.get(name, ()))]


class KeptPlan:
    """The load plan of one model, or its lack. See the module.

    Args:
        load_weights: the model's method. Loads what a plan leaves to `load_weights`.

    Attributes:
        checked: the plan by which later syncs are loaded, or None.
        uses: the uses of the tensors of each bucket, by index. Complete if there is a plan.
        proven_with: digests of the weights with which a saved plan was proven, until a proof by
            `load_weights` with other weights. Until then the plan loads no export.
        begun_proof: the last one of a saved plan, until all its bytes are known to be loaded again.
        lost: tensors with bytes that such a proof has overwritten and no sync has loaded again.
    """

    def __init__(self, model: Any, load_weights: LoadWeights) -> None:
        self.checked: CheckedPlan | None = None
        self.uses: dict[int, BucketUses] = {}
        self.proven_with: torch.Tensor | None = None
        self.begun_proof: BegunProof | None = None
        self.lost: Sequence[str] = ()
        self._model = model
        self._load_weights = load_weights
        self._context: Mapping[str, object] = {}
        self._trust = _Trust.CHECKED
        self._trust_reason: str | None = None  # if the plan is doubted or distrusted
        self._store: PlanStore | None = None
        self._may_use_saved = True  # until one was tried
        self._stored: LoadPlan | None = None  # the plan that is in the store
        self._unplannable: tuple[BucketLayout, str] | None = None  # first bucket, reason
        self._num_recordings = 0
        self._num_to_wait = 0  # eager syncs until the next recording
        self._logged: set[str] = set()

    @property
    def plan(self) -> LoadPlan | None:
        """The plan by which later syncs are loaded, or None."""
        return self.checked.plan if self.checked is not None else None

    @property
    def is_unproven(self) -> bool:
        """True if the load plan is a saved one, and no proof has shown that it holds."""
        return self._trust is _Trust.SAVED

    @property
    def distrust_reason(self) -> str | None:
        """The reason why no load plan may load any sync, or None."""
        return self._trust_reason if self._trust is _Trust.DISTRUSTED else None

    @property
    def doubt_reason(self) -> str | None:
        """The reason why a load plan may load only the proof of a route, or None."""
        return self._trust_reason if self._trust is _Trust.DOUBTED else None

    def begin_sync(
        self,
        context: Mapping[str, object],
        *,
        uses_plan: bool,
        proves_route: bool,
        keeps_plans: bool,
    ) -> str | None:
        """Drop the plan if it does not hold for this sync. See `ModelLoader.start`.

        Returns:
            The reason for which the plan was dropped, or None.
        """
        changed = context_change(self._context, context)
        self._context = context
        if not keeps_plans:
            self._store = None
        # A store is kept until the context changes: it has the path of this model's file.
        elif self._store is None or changed is not None:
            self._store = PlanStore(self._model, context)
        reason = changed
        if changed is not None:
            self.uses, self._unplannable = {}, None
        if not uses_plan:
            reason = reason or "the trainer asked for a sync without a load plan"
        if self.is_unproven and not proves_route:
            self.uses = {}
            reason = reason or "no proof has shown that the saved load plan holds"
        if self.checked is None or reason is None:
            return None
        self.drop(reason)
        return reason

    def mismatch(self) -> str | None:
        """Return the reason why the model is not where the plan writes it, or None."""
        return self.checked.probe.mismatch() if self.checked is not None else None

    def drop(self, reason: str, *, with_uses: bool = False) -> None:
        """Drop the load plan, if there is one.

        Args:
            with_uses: the uses of the tensors may have changed, too.
        """
        self.log(reason)
        self.checked = self.proven_with = None
        if with_uses:
            self.uses = {}
        if self.is_unproven:
            self._set_trust(_Trust.CHECKED)
        if (backup := backup_of(self._model)) is not None:
            backup.withdraw(reason)

    def take(self, plan: LoadPlan) -> None:
        """Load later syncs by a plan that was recorded in this sync."""
        self._take(plan)
        # A plan that never lasts for a sync costs more than it saves: make them at a distance.
        self._num_recordings += 1
        if self._num_recordings >= MAX_RECORDINGS:
            doublings = min(self._num_recordings - MAX_RECORDINGS, MAX_SYNCS_APART.bit_length())
            self._num_to_wait = min(1 << doublings, MAX_SYNCS_APART)
        self._unplannable = None

    def note_lasted(self) -> None:
        """Record that the plan has loaded a whole sync."""
        self._num_recordings = self._num_to_wait = 0

    def note_unplannable(self, first: BucketLayout, reason: str) -> None:
        """Make no plan of later syncs that begin with the same bucket."""
        self._unplannable = first, reason

    def recording_problem(self, first: BucketLayout) -> str | None:
        """Return the reason why no plan is made of a sync that begins with this bucket, or None."""
        if self._num_to_wait > 0:
            self._num_to_wait -= 1
            return (
                f"{MAX_RECORDINGS} load plans in a row did not last for one sync. Another is made "
                f"after some syncs, at most {MAX_SYNCS_APART}"
            )
        if self._unplannable is None or self._unplannable[0] != first:
            return None
        return self._unplannable[1]

    # Saved plans.

    @property
    def may_use_saved(self) -> bool:
        """True if the saved plan of an earlier process may be tried in place of a trace."""
        return self._may_use_saved and self._trust is _Trust.CHECKED

    def prepare_saved(self) -> None:
        """Prepare `find_saved` by what needs no bucket."""
        if self._store is not None:
            self._store.prepare()

    def find_saved(self, first: BucketLayout) -> SavedPlan | None:
        """Return the saved plan for a sync that begins with this bucket, or None. Asks once."""
        self._may_use_saved = False
        saved = self._store.find(first) if self._store is not None else None
        if saved is not None:
            self.uses = saved.uses()
        return saved

    def take_saved(self, saved: SavedPlan, layouts: Sequence[BucketLayout]) -> str | None:
        """Take the saved plan of a sync that `load_weights` has loaded, until it is proven.

        Args:
            layouts: the buckets of that sync.

        Returns:
            The reason why the plan does not fit the sync or the model, or None. Then the next sync
            is traced.
        """
        try:
            if list(layouts) != saved.layouts:
                raise PlanRefused("the sync has other tensors than the saved load plan")
            self._take(saved.on(collect_destinations(self._model)))
        except Exception as error:  # the weights are right, and the next sync is traced
            self.checked, self.uses = None, {}
            if self._store is not None:
                self._store.discard()  # a restart would try it again
            return f"the saved load plan does not fit, and the next sync is traced: {error}"
        self._set_trust(_Trust.SAVED)
        return None

    def take_remarks(self) -> list[str]:
        """Return the messages for the user, of saved load plans that were refused, once."""
        if self._store is None:
            return []
        remarks, self._store.remarks = self._store.remarks, []
        return remarks

    # The consequences of proofs.

    def begin_proof(self, held: HeldBytes, sync: str) -> None:
        """Record that the proof of a saved plan overwrites what the plan writes.

        Args:
            held: what the model holds.
            sync: see `SessionDescriptor`.
        """
        assert self.plan is not None, "a saved plan is there until it is proven or dropped"
        self.begun_proof = BegunProof(held, sync, self.plan.coverage)

    def trust(self) -> None:
        """End a doubt, after the good proof of a route. Save the plan, unless it is a saved one."""
        was_unproven = self.is_unproven
        self.begun_proof = None
        self._set_trust(_Trust.CHECKED)
        plan, backup = self.plan, backup_of(self._model)
        if plan is None:
            return
        if was_unproven:
            self._stored = plan
            if backup is not None:
                backup.leave_out(plan)
        elif self._store is not None and self._stored is not plan:
            self._stored = plan
            self._store.save(plan, [self.uses[i] for i in range(len(plan.buckets))])

    def doubt(self, reason: str) -> None:
        """Drop the load plan. Load by `load_weights` until the proof of a route is good.

        The next export makes another plan, which loads the proof of a route alone.

        Call this after the proof of a route has failed. The route may be at fault, or the plan.
        """
        was_unproven = self.is_unproven
        self._set_trust(_Trust.DOUBTED, reason)
        if was_unproven:
            self.forget(reason)
        elif self.checked is not None:
            self.drop(reason)

    def forget(self, reason: str) -> None:
        """Drop the load plan here and in the store. The next sync is traced."""
        self.uses = {}
        if self._store is not None:
            self._store.discard()
        if self.checked is not None:
            self.drop(reason)

    def distrust(self, reason: str) -> None:
        """Load all later syncs by `load_weights`. Call this after a sync by `load_weights`."""
        self._set_trust(_Trust.DISTRUSTED, reason)
        if self._store is not None:
            self._store.discard()
        plan, backup = self.plan, backup_of(self._model)
        if plan is not None:
            self.drop(reason)
            if backup is not None:  # `load_weights` has just written what the plan writes
                backup.define(plan)

    def check_restored(self, sync: str) -> None:
        """Check that a sync has brought back what the proof of a saved plan had overwritten.

        The plan may write bytes that `load_weights` never writes. Call this when a session has
        loaded. Another sync than that of the proof, which was then interrupted, has other weights:
        it must have a traced plan that writes all these bytes.

        Args:
            sync: see `SessionDescriptor`.

        Raises:
            RuntimeError: such bytes are lost.
        """
        begun = self.begun_proof
        if begun is not None and begun.sync == sync:
            self.lost = begun.held.differing(self._model)
            self.begun_proof = None
        elif begun is not None:
            # Every plan that is made after an interrupted proof is a traced one.
            self.lost = begun.not_written(self.plan)
            self.begun_proof = begun if self.lost else None
        if self.lost:
            if self._store is not None:
                self._store.discard()
            raise RuntimeError(
                "the proof of a load plan of an earlier run has overwritten bytes that "
                f"load_weights is not known to load, in {listed(self.lost)}. The plan was removed. "
                "Restart the engine"
            )

    # The host backup.

    def note_loaded(self, layouts: Sequence[BucketLayout], failed: LoadPlan | None) -> None:
        """Report to the host backup which bytes a whole sync has written.

        Args:
            layouts: the buckets that were loaded, by the plan or by `load_weights`.
            failed: the plan whose replay has failed in this sync, or None.
        """
        if (backup := backup_of(self._model)) is None:
            return
        plan = self.plan
        if failed is not None:
            # `load_weights` writes what the plan writes: its check has shown that.
            if layouts == [bucket.layout for bucket in failed.buckets]:
                backup.define(failed)
        elif plan is not None and not self.is_unproven:
            if layouts == [bucket.layout for bucket in plan.buckets]:
                # The sync has written all of the plan's coverage. Left out again after a failed
                # sync, which withdrew the plan.
                backup.leave_out(plan)
            else:
                num_buckets = len(plan.buckets)
                backup.sync_in_part(
                    f"a sync had {len(layouts)} of the plan's {num_buckets} buckets"
                )

    def log(self, reason: str) -> None:
        """Log once that `load_weights` loads instead of the plan."""
        if reason not in self._logged:
            self._logged.add(reason)
            name = type(self._model).__name__
            logger.warning("%s: load_weights loads buckets, not the load plan: %s", name, reason)

    def _take(self, plan: LoadPlan) -> None:
        executor = PlanExecutor(plan, self._load_weights)
        self.checked = CheckedPlan(plan, executor, DestinationProbe(self._model, plan.destinations))

    def _set_trust(self, trust: _Trust, reason: str | None = None) -> None:
        if self._trust is not _Trust.DISTRUSTED:
            self._trust, self._trust_reason = trust, reason
