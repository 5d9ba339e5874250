"""Load the syncs of one model: by `load_weights` at first, then by a load plan that was checked.

    loader = loader_of(model)
    loader.start(context, recheck_every_n_syncs=0, uses_plan=True)
    for index, (layout, source) in enumerate(sync):
        loader.load(index, layout, source)
    outcome = loader.finish()

The first sync loads eagerly while its plan is recorded and checked, bucket by bucket; later syncs
replay. Where the plan does not hold (another layout, another expert map, a parameter at another
address, a failed check), the model's own `load_weights` loads the rest of that sync, and the reason
is logged once. Weights are right in either case. A bucket of which only what this rank reads has
come cannot be loaded so: then the sync fails.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.session.messages import MAKING_PLAN, SessionError
from sglang_loader.host_backup import backup_of
from sglang_loader.load_plan import (
    BucketPlan,
    BucketUses,
    DestinationProbe,
    LoadPlan,
    PlanExecutor,
    PlanRefused,
)
from sglang_loader.load_plan.arrange import ALL_WHOLE, ArrangedBuckets
from sglang_loader.load_plan.guard import what_changed
from sglang_loader.load_plan.verify import why_misarranged
from sglang_loader.session.recording import PlanRecorder

logger = logging.getLogger(__name__)

MAX_RECORDINGS = 3
"""Plans made in a row without one sync replayed in full; then the model stays eager."""

_ATTRIBUTE = "_verl_sglang_sync_loader"


@dataclass(frozen=True)
class SyncOutcome:
    """How one sync was loaded.

    Attributes:
        num_replayed: buckets loaded by the plan.
        num_eager: buckets loaded by `load_weights`.
        reason: why some were eager; None where all were replayed.
        may_read_in_place: a plan holds.
    """

    num_replayed: int
    num_eager: int
    reason: str | None
    may_read_in_place: bool


class _LoadMode(Enum):
    RECORD = "record"
    REPLAY = "replay"
    CHECK = "check"
    EAGER = "eager"


@dataclass
class _Compiled:
    """A plan that was checked, with what runs and guards it; `arranged`: once a trainer has asked
    for it.
    """

    plan: LoadPlan
    executor: PlanExecutor
    probe: DestinationProbe
    arranged: ArrangedBuckets | None = None


class ModelLoader:
    """Loads the syncs of one model; one per model and process. `uses`: what became of each bucket
    of this sync, in order.
    """

    def __init__(self, model: Any) -> None:
        self.uses: list[BucketUses] = []
        self._model = model
        self._recorder = PlanRecorder(model)
        self._compiled: _Compiled | None = None
        self._load_mode = _LoadMode.EAGER
        self._context: Mapping[str, object] = {}
        self._reason: str | None = None
        self._logged: set[str] = set()
        self._unfit: tuple[BucketLayout, str] | None = None
        self._num_recordings = 0
        self._syncs_since_check = 0
        self._num_replayed = 0
        self._known_uses: dict[int, BucketUses] = {}  # by bucket; of all buckets of a plan
        self._addresses_checked = False

    def start(
        self, context: Mapping[str, object], *, recheck_every_n_syncs: int, uses_plan: bool = True
    ) -> None:
        """Begin a sync; one that broke off before is forgotten.

        Args:
            recheck_every_n_syncs: check the plan against `load_weights` in every n-th sync that it
                serves; 0: never again after it was made.
            uses_plan: False: every bucket goes through `load_weights`, and no plan is kept.
        """
        changed = what_changed(self._context, context)
        self._context, self._reason = context, None
        self._num_replayed, self.uses = 0, []
        self._recorder.restart()
        self._addresses_checked = False
        if changed is not None:
            self._known_uses, self._unfit = {}, None
        if self._compiled is not None and (changed is not None or not uses_plan):
            self._drop_plan(changed or "this sync is to be loaded without a plan")
        if not uses_plan:
            self._load_mode = _LoadMode.EAGER
        elif self._compiled is None:
            self._load_mode = _LoadMode.RECORD
        else:
            self._syncs_since_check += 1
            due = recheck_every_n_syncs and self._syncs_since_check >= recheck_every_n_syncs
            self._load_mode = _LoadMode.CHECK if due else _LoadMode.REPLAY
        if self.arranged.digest:
            self.check_addresses()

    def check_addresses(self) -> None:
        """Drop the plan if a tensor of the model is not where the plan writes it. Done once a sync:
        before the engine says which arrangements it holds, else while it waits for the trainer,
        and at the latest before the first bucket is loaded.
        """
        if self._addresses_checked:
            return
        self._addresses_checked = True
        if self._compiled is not None and (mismatch := self._compiled.probe.mismatch()):
            self._known_uses = {}
            self._drop_plan(mismatch)

    @property
    def plan(self) -> LoadPlan | None:
        """By which later syncs are loaded, as far as it is known."""
        return self._compiled.plan if self._compiled is not None else None

    @property
    def arranged(self) -> ArrangedBuckets:
        """How buckets may come in this sync, once it has started."""
        if self._compiled is None or self._load_mode is not _LoadMode.REPLAY:
            return ALL_WHOLE
        return self._compiled.arranged or ALL_WHOLE

    def arrange(self) -> ArrangedBuckets:
        """How buckets may come in later syncs, now that a trainer asks for it; all whole where the
        plan of one that is arranged does not do what its own does.
        """
        if self._compiled is None:
            return ALL_WHOLE
        if self._compiled.arranged is None:
            try:
                self._compiled.arranged = _proved_arrangements(self._compiled.plan)
            except Exception as error:  # out of memory, say: another sync may have more
                logger.error("whole buckets are wanted: others cannot be proved: %r", error)
                return ALL_WHOLE
        return self._compiled.arranged

    def load(
        self,
        index: int,
        layout: BucketLayout,
        source: BucketSource,
        *,
        arranged: bool = False,
    ) -> bool:
        """Load the `index`-th bucket of the sync; asynchronous on a GPU. The source stays as it is.

        Args:
            arranged: only what this rank reads has come, see the property: it cannot be loaded
                eagerly.

        Returns:
            True if all work is on the current stream: the plan was replayed, and leaves nothing to
            `load_weights`.

        Raises:
            SessionError: the bucket is arranged, and no plan holds for it.
            Exception: what `load_weights` raises, or the replay of an arranged bucket.
        """
        self.check_addresses()
        is_planned = self._load_mode in (_LoadMode.REPLAY, _LoadMode.CHECK)
        if is_planned and (reason := self._why_not_planned(index, layout)):
            self._drop_plan(reason)
        rebased = self._rebased(index) if arranged else None
        if self._load_mode is _LoadMode.REPLAY and self._replay(index, source, rebased):
            return self.plan is not None and not self.plan.buckets[index].rest
        is_first = index == 0 and self._load_mode is _LoadMode.RECORD
        if is_first and (reason := self._why_not_recorded(layout)):
            self._note(reason)
            self._load_mode = _LoadMode.EAGER
        buffer = source.packed(layout)
        if self._load_mode is _LoadMode.CHECK:
            self._check(index, buffer)
        elif self._load_mode is _LoadMode.RECORD:
            self._record(index, layout, buffer)
        else:
            self._load_eagerly(index, layout, buffer)
        return False

    def _rebased(self, index: int) -> BucketPlan:
        """The plan of a bucket of which only what this rank reads has come."""
        arranged = self.arranged.bucket(index)
        if arranged is None:
            reason = self._reason or "this sync needs whole buckets"
            raise SessionError(f"bucket {index} came arranged and cannot be loaded so: {reason}")
        return arranged.plan

    def finish(self) -> SyncOutcome:
        """End a sync whose buckets all came."""
        if self._load_mode is _LoadMode.RECORD:
            self._compile()
            self._reason = self._reason or MAKING_PLAN
        elif self._load_mode is _LoadMode.CHECK:
            self._syncs_since_check = 0
            self._note("the plan was due for a check")
        elif self._load_mode is _LoadMode.REPLAY:
            self._num_recordings = 0
        plan, backup = self.plan, backup_of(self._model)
        if plan is not None and backup is not None:
            if (num_loaded := len(self.uses)) == (num_buckets := len(plan.buckets)):
                # It has written all of it, or what was loaded is proven to be that. Also after a
                # failed sync, which withdrew it.
                backup.publish(plan)
            else:
                backup.sync_in_part(f"a sync had {num_loaded} of the plan's {num_buckets} buckets")
        return SyncOutcome(
            num_replayed=self._num_replayed,
            num_eager=len(self.uses) - self._num_replayed,
            reason=self._reason,
            may_read_in_place=plan is not None,
        )

    def _why_not_recorded(self, first: BucketLayout) -> str | None:
        """Why no plan is made of a sync that begins with this bucket."""
        if self._num_recordings >= MAX_RECORDINGS:
            return f"{MAX_RECORDINGS} plans in a row did not last for one sync"
        if self._unfit is None or self._unfit[0] != first:
            return None
        return self._unfit[1]

    def _why_not_planned(self, index: int, layout: BucketLayout) -> str | None:
        """Why a bucket is not the plan's."""
        assert self._compiled is not None
        buckets = self._compiled.plan.buckets
        if index >= len(buckets):
            return f"the plan has {len(buckets)} buckets, the sync more"
        if buckets[index].layout is not layout and buckets[index].layout != layout:
            return f"bucket {index} has another layout than the plan's"
        return None

    def _replay(self, index: int, source: BucketSource, rebased: BucketPlan | None) -> bool:
        """False if it failed: load the bucket, and the rest of the sync, eagerly."""
        assert self._compiled is not None
        try:
            self._compiled.executor.replay(index, source, rebased)
        except Exception as error:
            if rebased is not None:
                raise  # the other bytes are not there
            self._drop_plan(f"the replay of bucket {index} failed: {error!r}")
            self._load_mode = _LoadMode.EAGER  # a recording needs more memory, and may fail, too
            return False
        self._num_replayed += 1
        self.uses.append(self._known_uses[index])
        return True

    def _check(self, index: int, buffer: torch.Tensor) -> None:
        assert self._compiled is not None
        plan = self._compiled.plan
        reason = self._recorder.why_unproven(plan.buckets[index], plan.destinations, buffer)
        if reason is not None:
            self.uses.append(BucketUses(plan.buckets[index].layout, problem=reason))
            self._known_uses = {}
            self._drop_plan(f"bucket {index}: {reason}")
            return
        self.uses.append(self._known_uses[index])

    def _record(self, index: int, layout: BucketLayout, buffer: torch.Tensor) -> None:
        uses, reason = self._recorder.record(layout, buffer)
        self._known_uses[index] = uses
        self.uses.append(uses)
        if reason is not None:
            self._refuse(reason)

    def _compile(self) -> None:
        try:
            plan = self._recorder.finish()
        except PlanRefused as refused:
            self._refuse(str(refused))
            return
        executor = PlanExecutor(plan, self._recorder.load_weights)
        self._compiled = _Compiled(plan, executor, DestinationProbe(self._model, plan.destinations))
        self._num_recordings += 1
        self._syncs_since_check = 0
        self._unfit = None
        unused = [name for uses in self.uses for name in uses.unused]
        logger.info(
            "load plan of %s: %d copies in %d buckets, %d tensors left to its loader; "
            "ignored tensors: %s",
            type(self._model).__name__,
            plan.num_copies,
            len(plan.buckets),
            plan.num_rest,
            ", ".join(unused[:5]) or "none",
        )

    def _load_eagerly(self, index: int, layout: BucketLayout, buffer: torch.Tensor) -> None:
        seen = self._known_uses.get(index)
        if seen is None or seen.layout != layout:
            _, self._known_uses[index] = self._recorder.trace(layout, buffer)
        else:
            # A loader may change its tensors, or keep them, and the trainer writes into a buffer
            # again once it was read.
            self._recorder.load_weights(layout.views(buffer[: layout.nbytes].clone()))
        self.uses.append(self._known_uses[index])

    def _refuse(self, reason: str) -> None:
        """No plan for syncs like this one: the rest of it, and the next ones, are eager."""
        self._note(reason)
        self._unfit = self.uses[0].layout, reason
        self._load_mode = _LoadMode.EAGER

    def _drop_plan(self, reason: str) -> None:
        """Another plan is made of this sync, if nothing of it is loaded yet; else the rest of it is
        eager.
        """
        self._note(reason)
        self._compiled = None
        self._load_mode = _LoadMode.EAGER if self.uses else _LoadMode.RECORD
        if (backup := backup_of(self._model)) is not None:
            backup.withdraw(reason)

    def _note(self, reason: str) -> None:
        self._reason = self._reason or reason
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning(
                "%s: eager load_weights instead of the plan: %s", type(self._model).__name__, reason
            )


def _proved_arrangements(plan: LoadPlan) -> ArrangedBuckets:
    found = ArrangedBuckets.of(plan.buckets)
    for index, arranged in enumerate(found.buckets):
        if arranged is not None:
            reason = why_misarranged(plan.buckets[index], arranged, plan.destinations)
            if reason is not None:
                logger.error("whole buckets are wanted: number %d arranged: %s", index, reason)
                return ALL_WHOLE
    return found


def loader_of(model: Any) -> ModelLoader:
    """The loader of a model, the same for as long as the model lives.

    Speculative decoding has two models in one process: the draft and the target.
    """
    # An attribute, because a loader holds its model: a global table would keep both for ever.
    loader = vars(model).get(_ATTRIBUTE)
    if loader is None:
        loader = vars(model)[_ATTRIBUTE] = ModelLoader(model)
    assert isinstance(loader, ModelLoader)
    return loader
