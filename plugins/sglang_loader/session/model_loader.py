"""The loader of one model's syncs: `load_weights` at first, then a load plan that was checked.

    loader = loader_of(model)
    loader.start(context)
    for index, (layout, source) in enumerate(sync):
        loader.load(index, layout, source)
    outcome = loader.finish()

The first sync loads eagerly, while its load plan is recorded and checked bucket by bucket. Later
syncs replay the plan. The plan may cease to hold: another layout, another expert map, a parameter
at another address, a failed check. Then the model's own `load_weights` loads the rest of that sync,
and the reason is logged once. The weights are right in either case. An arranged bucket holds only
this rank's part, so that `load_weights` cannot load it. If the plan does not hold for an arranged
bucket, the sync fails.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.naming import listed
from sglang_loader.common.session.messages import MAKING_PLAN, SessionError
from sglang_loader.host_backup.backup import backup_of
from sglang_loader.load_plan.arrange import ALL_WHOLE, ArrangedBuckets
from sglang_loader.load_plan.executor import PlanExecutor
from sglang_loader.load_plan.guard import DestinationProbe, context_change
from sglang_loader.load_plan.plan import BucketPlan, LoadPlan, PlanRefused
from sglang_loader.load_plan.uses import BucketUses
from sglang_loader.load_plan.verify import arrangement_difference
from sglang_loader.session.recording import PlanRecorder, contents_of

logger = logging.getLogger(__name__)

MAX_RECORDINGS = 3
"""Most plans made in a row without one sync replayed in full. Then eager syncs lie between."""

MAX_SYNCS_APART = 64
"""Eager syncs between two recordings: 1, then 2, 4, 8 and so on, up to this many."""

WHOLE_BUCKETS = "partial buckets disabled on this TP rank, whole buckets will be sent"

_ATTRIBUTE = "_verl_sglang_sync_loader"


@dataclass(frozen=True)
class SyncOutcome:
    """The outcome of loading one sync. See `messages.Loaded`."""

    num_replayed: int
    num_eager: int
    reason: str | None
    may_read_in_place: bool


class _LoadMode(Enum):
    RECORD = "record"
    REPLAY = "replay"
    EAGER = "eager"


@dataclass
class _CheckedPlan:
    """A load plan that was checked, with its executor and its probe.

    Attributes:
        arranged: the arrangements, or None before a trainer has asked for them.
    """

    plan: LoadPlan
    executor: PlanExecutor
    probe: DestinationProbe
    arranged: ArrangedBuckets | None = None


class ModelLoader:
    """The loader of one model, one per model and process.

    Attributes:
        model: the model.
        uses: the uses of the tensors of each bucket of this sync, in order.
    """

    def __init__(self, model: Any) -> None:
        self.uses: list[BucketUses] = []
        self.model = model
        self._recorder = PlanRecorder(model)
        self._checked: _CheckedPlan | None = None
        self._load_mode = _LoadMode.EAGER
        self._context: Mapping[str, object] = {}
        self._reason: str | None = None
        self._logged: set[str] = set()
        self._unplannable: tuple[BucketLayout, str] | None = None  # first bucket, reason
        self._num_recordings = 0
        self._failed_replay: LoadPlan | None = None  # of this sync, which goes on eagerly
        self._num_to_wait = 0  # eager syncs until the next recording
        self._num_replayed = 0
        self._uses_of_bucket: dict[int, BucketUses] = {}  # by index; complete if there is a plan
        self._addresses_checked = False
        self._distrust: str | None = None  # the reason for which no plan is used any more
        self._doubt: str | None = None  # the reason for which a plan loads nothing but proofs

    def start(
        self,
        context: Mapping[str, object],
        *,
        uses_plan: bool = True,
        is_eager: bool = False,
        proves_route: bool = False,
    ) -> None:
        """Begin a sync.

        Args:
            context: all that a load plan depends on, by name. A change drops the plan.
            uses_plan: if False, every bucket goes through `load_weights`, and no plan is kept.
            is_eager: if True, every bucket of this sync goes through `load_weights`, and the plan
                is kept.
            proves_route: True if this sync is the proof of a route, which may use a doubted plan.
        """
        changed = context_change(self._context, context)
        uses_plan = uses_plan and self._distrust is None
        self._context, self._reason = context, self._distrust
        self._num_replayed, self.uses, self._failed_replay = 0, [], None
        self._recorder.restart()
        self._addresses_checked = False
        if changed is not None:
            self._uses_of_bucket, self._unplannable = {}, None
        if self._checked is not None and (changed is not None or not uses_plan):
            self._drop_plan(changed or "the trainer asked for a sync without a load plan")
        if not uses_plan:
            self._load_mode = _LoadMode.EAGER
        elif self._checked is None:
            self._load_mode = _LoadMode.RECORD
        else:
            is_doubted = self._doubt is not None and not proves_route
            self._load_mode = _LoadMode.EAGER if is_eager or is_doubted else _LoadMode.REPLAY
            self._reason = self._doubt if is_doubted else None
        # The engine must not offer arrangements of a plan that does not hold.
        if self.arranged.digest:
            self.check_addresses()

    def check_addresses(self) -> None:
        """Drop the load plan if a tensor of the model is not where the plan writes it.

        Only the first call in a sync does something.
        """
        # Called before the engine reports its arrangements. Without arrangements, called while the
        # engine waits for the trainer, and at the latest before the first bucket is loaded.
        if self._addresses_checked:
            return
        self._addresses_checked = True
        if self._checked is not None and (mismatch := self._checked.probe.mismatch()):
            self._uses_of_bucket = {}
            self._drop_plan(mismatch)

    @property
    def plan(self) -> LoadPlan | None:
        """The plan by which later syncs will be loaded, or None."""
        return self._checked.plan if self._checked is not None else None

    @property
    def arranged(self) -> ArrangedBuckets:
        """The buckets that may come arranged in this sync, once the sync has started."""
        if self._checked is None or self._load_mode is not _LoadMode.REPLAY:
            return ALL_WHOLE
        return self._checked.arranged or ALL_WHOLE

    def doubt_plan(self, reason: str) -> None:
        """Load later syncs by `load_weights`, until the proof of another route is good.

        Call this after the proof of a route has failed. The route may be at fault, or the plan.
        """
        self._doubt = reason
        if self._checked is not None:
            self._drop_plan(reason)

    def trust_plan(self) -> None:
        """End a doubt, after the good proof of a route."""
        self._doubt = None

    def distrust_plan(self, reason: str) -> None:
        """Load all later syncs by `load_weights`. Call this after a sync by `load_weights`."""
        self._distrust = reason
        plan, backup = self.plan, backup_of(self.model)
        if plan is not None:
            self._drop_plan(reason)
            if backup is not None:  # `load_weights` has just written what the plan writes
                backup.define(plan)

    def arrange(self) -> ArrangedBuckets:
        """Return the buckets that may come arranged in later syncs.

        The first call makes and checks the arrangements.
        """
        if self._checked is None:
            return ALL_WHOLE
        if self._checked.arranged is None:
            try:
                self._checked.arranged = _proved_arrangements(self._checked.plan)
            except Exception as error:  # such as out of memory: another sync may have more
                logger.error("%s: the check failed: %r", WHOLE_BUCKETS, error)
                return ALL_WHOLE
        return self._checked.arranged

    def load(
        self, index: int, layout: BucketLayout, source: BucketSource, *, arranged: bool = False
    ) -> bool:
        """Load the `index`-th bucket of the sync, asynchronously on a GPU.

        The source stays unchanged.

        Args:
            arranged: if True, only the bytes that this rank reads have come, as in `self.arranged`.

        Returns:
            True if all work is on the current stream: the plan was replayed without `load_weights`.

        Raises:
            SessionError: the bucket is arranged, and no plan holds for it.
            Exception: what `load_weights` raises, or the replay of an arranged bucket.
        """
        self.check_addresses()
        is_planned = self._checked is not None and self._load_mode is not _LoadMode.RECORD
        if is_planned and (reason := self._replay_problem(index, layout)):
            self._drop_plan(reason)
        arranged_plan = self._arranged_plan(index) if arranged else None
        if self._load_mode is _LoadMode.REPLAY and self._replay(index, source, arranged_plan):
            return self.plan is not None and not self.plan.buckets[index].rest.tensors
        # Here the plan does not hold, or there is none yet: load eagerly, and record if possible.
        is_first = index == 0 and self._load_mode is _LoadMode.RECORD
        if is_first and (reason := self._recording_problem(layout)):
            self._note_reason(reason)
            self._load_mode = _LoadMode.EAGER
        buffer = source.packed(layout)
        if self._load_mode is _LoadMode.RECORD:
            self._record(index, layout, buffer)
        else:
            self._load_eagerly(index, layout, buffer)
        return False

    def _arranged_plan(self, index: int) -> BucketPlan:
        """Return the plan that loads an arranged bucket."""
        arranged = self.arranged.bucket(index)
        if arranged is None:
            reason = self._reason or "it has no arrangement of this bucket"
            raise SessionError(f"bucket {index} came in part, only for the load plan: {reason}")
        return arranged.plan

    def finish(self) -> SyncOutcome:
        """End a sync that has brought all of its buckets."""
        if self._load_mode is _LoadMode.RECORD:
            self._compile()
            self._reason = self._reason or MAKING_PLAN
        elif self._load_mode is _LoadMode.REPLAY:  # the plan has lasted for a whole sync
            self._num_recordings = self._num_to_wait = 0
        plan, backup = self.plan, backup_of(self.model)
        if backup is not None and self._failed_replay is not None:
            # `load_weights` writes what the plan writes: its check has shown that.
            if self._has_loaded_all_of(self._failed_replay):
                backup.define(self._failed_replay)
        elif plan is not None and backup is not None:
            if self._has_loaded_all_of(plan):
                # The sync has written all of the plan's coverage. Published again after a failed
                # sync, which withdrew it.
                backup.publish(plan)
            else:
                num_loaded, num_buckets = len(self.uses), len(plan.buckets)
                backup.sync_in_part(f"a sync had {num_loaded} of the plan's {num_buckets} buckets")
        return SyncOutcome(
            num_replayed=self._num_replayed,
            num_eager=len(self.uses) - self._num_replayed,
            reason=self._reason,
            may_read_in_place=plan is not None,
        )

    def _has_loaded_all_of(self, plan: LoadPlan) -> bool:
        """Return True if this sync has loaded all buckets of a plan, by the plan or eagerly."""
        return [uses.layout for uses in self.uses] == [bucket.layout for bucket in plan.buckets]

    def _recording_problem(self, first: BucketLayout) -> str | None:
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

    def _replay_problem(self, index: int, layout: BucketLayout) -> str | None:
        """Return the reason why the plan cannot load this bucket, or None."""
        assert self._checked is not None
        buckets = self._checked.plan.buckets
        if index >= len(buckets):
            return f"the plan has {len(buckets)} buckets, the sync more"
        if buckets[index].layout is not layout and buckets[index].layout != layout:
            return f"bucket {index} has another layout than the plan's"
        return None

    def _replay(self, index: int, source: BucketSource, arranged_plan: BucketPlan | None) -> bool:
        """Replay a bucket. Return False if that failed and the rest of the sync must be eager."""
        assert self._checked is not None
        try:
            self._checked.executor.replay(index, source, arranged_plan)
        except Exception as error:
            failed = self._checked.plan
            if arranged_plan is not None:
                raise  # `load_weights` needs the whole bucket
            if failed.buckets[index].live_in:
                raise  # `load_weights` adds to bytes that may be half changed
            self._drop_plan(f"the replay of bucket {index} failed: {error!r}")
            self._failed_replay = failed
            self._load_mode = _LoadMode.EAGER  # a recording needs more memory, and may fail, too
            return False
        self._num_replayed += 1
        uses = self._uses_of_bucket[index]
        # These contents are of the recording. A replayed bucket gets no digests.
        self.uses.append(replace(uses, contents={}) if uses.contents else uses)
        return True

    def _record(self, index: int, layout: BucketLayout, buffer: torch.Tensor) -> None:
        uses, reason = self._recorder.record(layout, buffer)
        self._uses_of_bucket[index] = uses
        self.uses.append(uses)
        if reason is not None:
            self._give_up_plan(reason)

    def _compile(self) -> None:
        try:
            plan = self._recorder.finish()
        except PlanRefused as refused:
            self._give_up_plan(str(refused))
            return
        executor = PlanExecutor(plan, self._recorder.load_weights)
        self._checked = _CheckedPlan(
            plan, executor, DestinationProbe(self.model, plan.destinations)
        )
        # A plan that never lasts for a sync costs more than it saves: make them at a distance.
        self._num_recordings += 1
        if self._num_recordings >= MAX_RECORDINGS:
            doublings = min(self._num_recordings - MAX_RECORDINGS, MAX_SYNCS_APART.bit_length())
            self._num_to_wait = min(1 << doublings, MAX_SYNCS_APART)
        self._unplannable = None
        unused = [name for uses in self.uses for name in uses.unused]
        logger.info(
            "load plan of %s: %d copies in %d buckets, %d tensors left to load_weights, "
            "ignored tensors: %s",
            type(self.model).__name__,
            plan.num_copies,
            len(plan.buckets),
            plan.num_rest,
            listed(unused) or "none",
        )

    def _load_eagerly(self, index: int, layout: BucketLayout, buffer: torch.Tensor) -> None:
        earlier = self._uses_of_bucket.get(index)
        if earlier is None or earlier.layout != layout:
            _, self._uses_of_bucket[index] = self._recorder.trace(layout, buffer)
        else:
            # A loader may change its tensors, or keep them, and the trainer writes into a buffer
            # again once it was read.
            if earlier.contents:  # of the same tensors as now, with other bytes
                contents = contents_of(self.model, layout, buffer)
                self._uses_of_bucket[index] = replace(earlier, contents=contents)
            self._recorder.load_weights(layout.views(buffer[: layout.nbytes].clone()))
        self.uses.append(self._uses_of_bucket[index])

    def _give_up_plan(self, reason: str) -> None:
        """Load the rest of this sync, and later syncs that begin with the same bucket, eagerly."""
        self._note_reason(reason)
        self._unplannable = self.uses[0].layout, reason
        self._load_mode = _LoadMode.EAGER

    def _drop_plan(self, reason: str) -> None:
        """Drop the load plan. Load the rest of the sync eagerly, or record a new plan."""
        self._note_reason(reason)
        self._checked = None
        # A plan needs the whole sync, so only a sync that has loaded nothing yet can record one.
        self._load_mode = _LoadMode.EAGER if self.uses else _LoadMode.RECORD
        if (backup := backup_of(self.model)) is not None:
            backup.withdraw(reason)

    def _note_reason(self, reason: str) -> None:
        self._reason = self._reason or reason
        if reason not in self._logged:
            self._logged.add(reason)
            name = type(self.model).__name__
            logger.warning("%s: load_weights loads buckets, not the load plan: %s", name, reason)


def _proved_arrangements(plan: LoadPlan) -> ArrangedBuckets:
    """Make the arrangements of a plan, or return `ALL_WHOLE` if one would load other bytes."""
    arrangements = ArrangedBuckets.of(plan.buckets)
    for index, arranged in enumerate(arrangements.buckets):
        if arranged is not None:
            reason = arrangement_difference(plan.buckets[index], arranged, plan.destinations)
            if reason is not None:
                logger.error("%s: bucket %d: %s", WHOLE_BUCKETS, index, reason)
                return ALL_WHOLE
    return arrangements


def loader_of(model: Any) -> ModelLoader:
    """Return the loader of a model, the same for as long as the model lives."""
    # Speculative decoding has two models in one process: the draft and the target. The loader is
    # the model's attribute: a loader holds its model, so a global table would keep both for ever.
    loader = vars(model).get(_ATTRIBUTE)
    if loader is None:
        loader = vars(model)[_ATTRIBUTE] = ModelLoader(model)
    assert isinstance(loader, ModelLoader)
    return loader
