"""The loader of one model's syncs: `load_weights` at first, then a load plan that was checked.

    loader = loader_of(model)
    loader.start(context)
    for index, (layout, source) in enumerate(sync):
        loader.load(index, layout, source)
    outcome = loader.finish()

The first sync loads eagerly, while its load plan is recorded and checked bucket by bucket. Later
syncs replay the plan. The plan may cease to hold: another layout, another expert map, a parameter
at another address, a failed check. Then the model's own `load_weights` loads the rest of that sync,
and the reason is logged once. The weights are right in either case. `load_weights` cannot load
rounds, which hold nothing but this rank's part, nor shards that are to be quantised: without a
plan, such a sync fails.

If an earlier process has saved its plan (`plan_store`), the first sync is not traced. Until the
proof of a route has shown that the saved plan holds, it loads nothing but that proof.

A sync from the trainer ranks' shards has no buckets:

    rounds = loader.plan_table(shards, num_ranks, round_bytes)
    loader.load_shards(shards)
    for buffer in ...: loader.load_round(buffer)
    outcome = loader.finish()
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.naming import listed
from sglang_loader.common.session.messages import MAKING_PLAN, PROVING_SAVED_PLAN, SessionError
from sglang_loader.common.weight_map import ShardMemory
from sglang_loader.host_backup.backup import backup_of
from sglang_loader.load_plan.destinations import collect_destinations
from sglang_loader.load_plan.executor import PlanExecutor, TableRun
from sglang_loader.load_plan.guard import DestinationProbe, context_change
from sglang_loader.load_plan.plan import LoadPlan, PlanRefused
from sglang_loader.load_plan.rounds import Round
from sglang_loader.load_plan.saved_plan import SavedPlan
from sglang_loader.load_plan.uses import BucketUses
from sglang_loader.session.plan_store import PlanStore
from sglang_loader.session.recording import PlanRecorder

logger = logging.getLogger(__name__)

MAX_RECORDINGS = 3
"""Most plans made in a row without one sync replayed in full. Then eager syncs lie between."""

MAX_SYNCS_APART = 64
"""Eager syncs between two recordings: 1, then 2, 4, 8 and so on, up to this many."""

_ATTRIBUTE = "_verl_sglang_sync_loader"


@dataclass(frozen=True)
class SyncOutcome:
    """The outcome of loading one sync. See `messages.Loaded`."""

    num_replayed: int
    num_eager: int
    reason: str | None
    has_plan: bool
    saved_plan_misfits: bool


class _LoadMode(Enum):
    RECORD = "record"
    REPLAY = "replay"
    EAGER = "eager"


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


@dataclass
class _CheckedPlan:
    """A load plan that was checked, with its executor and its probe."""

    plan: LoadPlan
    executor: PlanExecutor
    probe: DestinationProbe


class ModelLoader:
    """The loader of one model, one per model and process.

    Attributes:
        model: the model.
        uses: the uses of the tensors of each bucket of this sync, in order.
    """

    def __init__(self, model: Any) -> None:
        self.uses: list[BucketUses] = []
        self.model = model
        self._trust = _Trust.CHECKED
        self._trust_reason: str | None = None  # if the plan is doubted or distrusted
        self._store: PlanStore | None = None
        self._saved: SavedPlan | None = None  # the plan to which this sync is compared
        self._may_use_saved = True  # until one was tried
        self._stored: LoadPlan | None = None  # the plan that is in the store
        self._recorder = PlanRecorder(model)
        self._has_recorded = False  # in this sync
        self._checked: _CheckedPlan | None = None
        self._load_mode = _LoadMode.EAGER
        self._context: Mapping[str, object] = {}
        self._reason: str | None = None
        self._logged: set[str] = set()
        self._unplannable: tuple[BucketLayout, str] | None = None  # first bucket, reason
        self._num_recordings = 0
        self._failed_replay: LoadPlan | None = None  # of this sync, which goes on eagerly
        self._table_run: TableRun | None = None  # of this sync
        self._num_to_wait = 0  # eager syncs until the next recording
        self._num_replayed = 0
        self._uses_of_bucket: dict[int, BucketUses] = {}  # by index; complete if there is a plan
        self._addresses_checked = False

    def start(
        self,
        context: Mapping[str, object],
        *,
        uses_plan: bool = True,
        is_eager: bool = False,
        proves_route: bool = False,
        keeps_plans: bool = False,
    ) -> None:
        """Begin a sync.

        Args:
            context: all that a load plan depends on, by name. A change drops the plan.
            uses_plan: if False, every bucket goes through `load_weights`, and no plan is kept.
            is_eager: if True, every bucket of this sync goes through `load_weights`, and the plan
                is kept.
            proves_route: True if this sync is the proof of a route, which may use a doubted plan.
            keeps_plans: if True, load plans are saved for later processes, and theirs are used.
        """
        changed = context_change(self._context, context)
        self._context, self._reason = context, None
        if self._trust is _Trust.DISTRUSTED:
            uses_plan, self._reason = False, self._trust_reason
        self._num_replayed, self.uses, self._failed_replay = 0, [], None
        self._table_run = None
        self._saved = None
        if not keeps_plans:
            self._store = None
        elif self._store is None or changed is not None:
            self._store = PlanStore(self.model, context)
        self._has_recorded = False
        self._addresses_checked = False
        if changed is not None:
            self._uses_of_bucket, self._unplannable = {}, None
        if self._checked is not None and (changed is not None or not uses_plan):
            self._drop_plan(changed or "the trainer asked for a sync without a load plan")
        if self.has_unproven_plan and not proves_route:
            self._uses_of_bucket = {}
            self._drop_plan("no proof has shown that the saved load plan holds")
        if not uses_plan:
            self._load_mode = _LoadMode.EAGER
        elif self._checked is None:
            self._load_mode = _LoadMode.RECORD
        else:
            is_doubted = self._trust is _Trust.DOUBTED and not proves_route
            self._load_mode = _LoadMode.EAGER if is_eager or is_doubted else _LoadMode.REPLAY
            self._reason = self._trust_reason if is_doubted else None

    def check_addresses(self) -> None:
        """Drop the load plan if a tensor of the model is not where the plan writes it.

        Only the first call in a sync does something.
        """
        # Called while the engine waits for the trainer, and at the latest before the first load.
        if self._addresses_checked:
            return
        self._addresses_checked = True
        if self._checked is not None and (mismatch := self._checked.probe.mismatch()):
            self._uses_of_bucket = {}
            self._drop_plan(mismatch)

    def take_remarks(self) -> list[str]:
        """Return the messages for the user, of saved load plans that were refused, once."""
        if self._store is None:
            return []
        remarks, self._store.remarks = self._store.remarks, []
        return remarks

    def prepare(self) -> None:
        """Prepare for the first bucket what needs no bucket. Call this while the engine waits."""
        if self._store is not None and self._wants_saved:
            self._store.prepare()

    @property
    def plan(self) -> LoadPlan | None:
        """The plan by which later syncs will be loaded, or None."""
        return self._checked.plan if self._checked is not None else None

    @property
    def has_unproven_plan(self) -> bool:
        """True if the load plan is a saved one, and no proof has shown that it holds."""
        return self._trust is _Trust.SAVED

    def doubt_plan(self, reason: str) -> None:
        """Load later syncs by `load_weights`, until the proof of another route is good.

        Call this after the proof of a route has failed. The route may be at fault, or the plan.
        """
        was_unproven = self.has_unproven_plan
        self._set_trust(_Trust.DOUBTED, reason)
        if was_unproven:
            self.forget_plan(reason)
        elif self._checked is not None:
            self._drop_plan(reason)

    def trust_plan(self) -> None:
        """End a doubt, after the good proof of a route. Save the plan, unless it is a saved one."""
        was_unproven = self.has_unproven_plan
        self._set_trust(_Trust.CHECKED)
        plan, backup = self.plan, backup_of(self.model)
        if plan is None:
            return
        if was_unproven:
            self._stored = plan
            if backup is not None:
                backup.publish(plan)
        elif self._store is not None and self._stored is not plan:
            self._stored = plan
            self._store.save(plan, [self._uses_of_bucket[i] for i in range(len(plan.buckets))])

    def forget_plan(self, reason: str) -> None:
        """Drop the load plan here and in the store. The next sync is traced."""
        self._uses_of_bucket = {}
        if self._store is not None:
            self._store.discard()
        if self._checked is not None:
            self._drop_plan(reason)

    def distrust_plan(self, reason: str) -> None:
        """Load all later syncs by `load_weights`. Call this after a sync by `load_weights`."""
        self._set_trust(_Trust.DISTRUSTED, reason)
        if self._store is not None:
            self._store.discard()
        plan, backup = self.plan, backup_of(self.model)
        if plan is not None:
            self._drop_plan(reason)
            if backup is not None:  # `load_weights` has just written what the plan writes
                backup.define(plan)

    def load(self, index: int, layout: BucketLayout, source: BucketSource) -> bool:
        """Load the `index`-th bucket of the sync, asynchronously on a GPU.

        The source stays unchanged.

        Returns:
            True if all work is on the current stream: the plan was replayed without `load_weights`.

        Raises:
            Exception: what `load_weights` raises.
        """
        self.check_addresses()
        is_planned = self._checked is not None and self._load_mode is not _LoadMode.RECORD
        if is_planned and (reason := self._replay_problem(index, layout)):
            self._drop_plan(reason)
        if self._load_mode is _LoadMode.REPLAY and self._replay(index, source):
            return self.plan is not None and not self.plan.buckets[index].rest.tensors
        # Here the plan does not hold, or there is none yet: load eagerly, and record if possible.
        is_first = index == 0 and self._load_mode is _LoadMode.RECORD
        if is_first and (reason := self._recording_problem(layout)):
            self._note_reason(reason)
            self._load_mode = _LoadMode.EAGER
        if index == 0 and self._wants_saved and (saved := self._find_saved(layout)) is not None:
            self._saved, self._uses_of_bucket = saved, saved.uses()
            self._load_mode = _LoadMode.EAGER
        buffer = source.packed(layout)
        if self._load_mode is _LoadMode.RECORD:
            self._record(index, layout, buffer)
        else:
            self._load_eagerly(index, layout, buffer)
        return False

    def plan_table(self, shards: ShardMemory, num_ranks: int, round_bytes: int) -> Sequence[Round]:
        """Prepare a sync from the trainer ranks' shards, by the copy table if a load plan holds.

        Call `load_shards` next, and then `load_round` for each round.

        Returns:
            The rounds in which the shards must come that are not mapped.

        Raises:
            SessionError: no load plan holds, and `load_weights` cannot load the shards: some are
                not mapped, or must be quantised.
        """
        self.check_addresses()
        if self._load_mode is _LoadMode.REPLAY:
            assert self._checked is not None
            reason = self._table_problem(shards.weight_map.layouts)
            if reason is None:
                try:
                    self._table_run = self._checked.executor.table_run(
                        shards, num_ranks, round_bytes
                    )
                    return self._table_run.rounds
                except Exception as error:
                    reason = f"no copy table: {error!r}"
                    if shards.weight_map.quantized is not None:
                        # The plan is good for the quantised export.
                        raise SessionError(reason) from error
            self._drop_plan(reason)
        if shards.weight_map.quantized is not None:
            reason = self._reason or "it has none"
            raise SessionError(f"weights are to be quantised by the engine's load plan: {reason}")
        if not shards.are_mapped:
            reason = self._reason or "it has none"
            raise SessionError(f"weights were to be sent for the load plan of the engine: {reason}")
        return ()

    def load_shards(self, shards: ShardMemory) -> bool:
        """Load all that needs no round, asynchronously on a GPU.

        Without a load plan, `load_weights` loads one bucket after the other.

        Returns:
            True if all work is on the current stream.

        Raises:
            Exception: what `load_weights` raises, or the replay of a sync that has rounds.
        """
        if self._table_run is not None:
            try:
                self._table_run.begin()
                return self._note_table_progress()
            except Exception as error:
                assert self._checked is not None
                is_quantized = shards.weight_map.quantized is not None
                adds = any(bucket.live_in for bucket in self._checked.plan.buckets)
                if self._table_run.rounds or is_quantized or adds:
                    raise  # `load_weights` adds to bytes that may be half changed, or lacks bytes
                self._table_run = None
                self._go_on_eagerly(f"the replay by the copy table failed: {error!r}")
        for index, layout in enumerate(shards.weight_map.layouts):
            self.load(index, layout, shards.source(index))
        return False

    def load_round(self, buffer: torch.Tensor) -> bool:
        """Load the next round, asynchronously on a GPU. Return True as `load_shards` does."""
        assert self._table_run is not None, "rounds come only for a copy table"
        self._table_run.load_round(buffer)
        return self._note_table_progress()

    def _note_table_progress(self) -> bool:
        assert self._checked is not None and self._table_run is not None
        plan = self._checked.plan
        if self._table_run.is_complete:
            for index in range(len(plan.buckets)):
                self._note_replayed(index)
        return not plan.num_rest

    def let_go(self) -> None:
        """Drop the references to the trainer's memory, and free the scratch memory of a table.

        Called after `finish` or a failure, when the device has finished.
        """
        self._table_run = None
        if self._checked is not None:
            self._checked.executor.free_scratch()

    def finish(self) -> SyncOutcome:
        """End a sync that has brought everything.

        Raises:
            SessionError: rounds are missing.
        """
        if (run := self._table_run) is not None and not run.is_complete:
            raise SessionError(f"{run.num_loaded} of {len(run.rounds)} rounds came")
        if self._saved is not None:
            self._use_saved(self._saved)
        if self._load_mode is _LoadMode.RECORD:
            self._compile()
            self._reason = self._reason or MAKING_PLAN
        elif self._load_mode is _LoadMode.REPLAY:  # the plan has lasted for a whole sync
            self._num_recordings = self._num_to_wait = 0
        if self._has_recorded:
            self._recorder.restart()  # what was recorded takes memory
            self._has_recorded = False
        plan, backup = self.plan, backup_of(self.model)
        if backup is not None and self._failed_replay is not None:
            # `load_weights` writes what the plan writes: its check has shown that.
            if self._has_loaded_all_of(self._failed_replay):
                backup.define(self._failed_replay)
        elif plan is not None and backup is not None and not self.has_unproven_plan:
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
            has_plan=plan is not None,
            saved_plan_misfits=plan is None and self._saved is not None,
        )

    @property
    def _wants_saved(self) -> bool:
        """True if this sync may use a saved plan in place of a trace."""
        is_first = self._load_mode is _LoadMode.RECORD and self._trust is _Trust.CHECKED
        return is_first and self._may_use_saved

    def _find_saved(self, first: BucketLayout) -> SavedPlan | None:
        """Return the saved plan for a sync that begins with this bucket, or None. Asks once."""
        self._may_use_saved = False
        return self._store.find(first) if self._store is not None else None

    def _use_saved(self, saved: SavedPlan) -> None:
        """Take the saved plan of a sync that `load_weights` has loaded, until it is proven.

        If the sync or the model is not the plan's, the next sync is traced.
        """
        try:
            if [uses.layout for uses in self.uses] != saved.layouts:
                raise PlanRefused("the sync has other tensors than the saved load plan")
            self._take_plan(saved.on(collect_destinations(self.model)))
        except Exception as error:  # the weights are right, and the next sync is traced
            # The manifest check must not judge by uses that may be of another model.
            self._checked = None
            reason = f"the saved load plan does not fit, and the next sync is traced: {error}"
            self.uses = [replace(uses, problem=reason) for uses in self.uses]
            self._uses_of_bucket = {}
            self._note_reason(reason)
            if self._store is not None:
                self._store.discard()  # a restart would try it again
            return
        self._set_trust(_Trust.SAVED)
        self._reason = self._reason or PROVING_SAVED_PLAN

    def _take_plan(self, plan: LoadPlan) -> None:
        """Load later syncs by this plan."""
        executor = PlanExecutor(plan, self._recorder.load_weights)
        probe = DestinationProbe(self.model, plan.destinations)
        self._checked = _CheckedPlan(plan, executor, probe)

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

    def _table_problem(self, layouts: Sequence[BucketLayout]) -> str | None:
        """Return the reason why the plan cannot load a sync of these buckets, or None."""
        assert self._checked is not None
        num_planned = len(self._checked.plan.buckets)
        if len(layouts) != num_planned:
            return f"the plan has {num_planned} buckets, the sync {len(layouts)}"
        reasons = (self._replay_problem(index, layout) for index, layout in enumerate(layouts))
        return next(filter(None, reasons), None)

    def _replay(self, index: int, source: BucketSource) -> bool:
        """Replay a bucket. Return False if that failed and the rest of the sync must be eager."""
        assert self._checked is not None
        try:
            self._checked.executor.replay(index, source)
        except Exception as error:
            if self._checked.plan.buckets[index].live_in:
                raise  # `load_weights` adds to bytes that may be half changed
            self._go_on_eagerly(f"the replay of bucket {index} failed: {error!r}")
            return False
        self._note_replayed(index)
        return True

    def _go_on_eagerly(self, reason: str) -> None:
        """Drop the plan after a failed replay, which `load_weights` repeats."""
        self._failed_replay = self.plan
        self._drop_plan(reason)
        self._load_mode = _LoadMode.EAGER  # a recording needs more memory, and may fail, too

    def _note_replayed(self, index: int) -> None:
        self._num_replayed += 1
        uses = self._uses_of_bucket[index]
        # These contents are of the recording. A replayed bucket gets no digests.
        self.uses.append(replace(uses, contents={}) if uses.contents else uses)

    def _recording(self) -> PlanRecorder:
        """Return the recorder, with nothing of an earlier sync."""
        if not self._has_recorded:
            self._recorder.restart()
            self._has_recorded = True
        return self._recorder

    def _record(self, index: int, layout: BucketLayout, buffer: torch.Tensor) -> None:
        uses, reason = self._recording().record(layout, buffer)
        self._uses_of_bucket[index] = uses
        self.uses.append(uses)
        if reason is not None:
            self._give_up_plan(reason)

    def _compile(self) -> None:
        try:
            plan = self._recording().finish()
        except PlanRefused as refused:
            self._give_up_plan(str(refused))
            return
        self._take_plan(plan)
        # A plan that never lasts for a sync costs more than it saves: make them at a distance.
        self._num_recordings += 1
        if self._num_recordings >= MAX_RECORDINGS:
            doublings = min(self._num_recordings - MAX_RECORDINGS, MAX_SYNCS_APART.bit_length())
            self._num_to_wait = min(1 << doublings, MAX_SYNCS_APART)
        self._unplannable = None
        unused = [name for uses in self.uses for name in uses.unused]
        logger.info(
            "load plan of %s: %d copies in %d buckets, of which %d are inferred from like "
            "layers, %d tensors left to load_weights, ignored tensors: %s",
            type(self.model).__name__,
            plan.num_copies,
            len(plan.buckets),
            self._recorder.num_inferred,
            plan.num_rest,
            listed(unused) or "none",
        )

    def _load_eagerly(self, index: int, layout: BucketLayout, buffer: torch.Tensor) -> None:
        earlier = self._uses_of_bucket.get(index)
        if earlier is None or earlier.layout != layout:
            _, self._uses_of_bucket[index] = self._recording().trace(layout, buffer)
        else:
            # A loader may change its tensors, or keep them, and the trainer writes into a buffer
            # again once it was read.
            if earlier.contents:  # of the same tensors as now, with other bytes
                contents = self._recorder.contents_of(layout, buffer)
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
        if self.has_unproven_plan:
            self._set_trust(_Trust.CHECKED)
        # A plan needs the whole sync, so only a sync that has loaded nothing yet can record one.
        self._load_mode = _LoadMode.EAGER if self.uses else _LoadMode.RECORD
        if (backup := backup_of(self.model)) is not None:
            backup.withdraw(reason)

    def _set_trust(self, trust: _Trust, reason: str | None = None) -> None:
        if self._trust is not _Trust.DISTRUSTED:
            self._trust, self._trust_reason = trust, reason

    def _note_reason(self, reason: str) -> None:
        self._reason = self._reason or reason
        if reason not in self._logged:
            self._logged.add(reason)
            name = type(self.model).__name__
            logger.warning("%s: load_weights loads buckets, not the load plan: %s", name, reason)


def loader_of(model: Any) -> ModelLoader:
    """Return the loader of a model, the same for as long as the model lives."""
    # Speculative decoding has two models in one process: the draft and the target. The loader is
    # the model's attribute: a loader holds its model, so a global table would keep both for ever.
    loader = vars(model).get(_ATTRIBUTE)
    if loader is None:
        loader = vars(model)[_ATTRIBUTE] = ModelLoader(model)
    assert isinstance(loader, ModelLoader)
    return loader
