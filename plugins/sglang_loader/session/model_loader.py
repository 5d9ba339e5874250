"""The loader of one model's syncs: `load_weights` at first, then a load plan that was checked.

    loader = loader_of(model)
    loader.start(context)
    for index, (layout, source) in enumerate(sync):
        loader.load(index, layout, source)
    outcome = loader.finish()

The first sync loads eagerly, while its load plan is recorded and checked bucket by bucket. Later
syncs replay the plan. If the plan ceases to hold (`kept_plan`), the model's own `load_weights`
loads the rest of that sync. The weights are right in either case. `load_weights` cannot load
rounds, which hold nothing but this rank's part, nor shards that are to be quantised: without a
plan, such a sync fails.

If an earlier process has saved its plan (`plan_store`), the first sync is not traced. Until the
proof of a route has shown that the saved plan holds, it loads nothing but that proof. Until a proof
by `load_weights`, with other weights, has shown that it leaves nothing out, it loads no export: an
export is traced, and its plan replaces the saved one.

The mode of a sync, chosen by `start`:

    RECORD   without a plan. `load_weights` loads, and a plan is recorded. If no plan is possible,
             or a saved one is found: EAGER
    REPLAY   by the plan. If the plan ceases to hold before the first bucket: RECORD, else EAGER
    EAGER    by `load_weights`, and nothing is recorded

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
from sglang_loader.common.weight_map import ShardMemory, WeightMap, places_of
from sglang_loader.load_plan.executor import TableRun
from sglang_loader.load_plan.plan import LoadPlan, PlanRefused
from sglang_loader.load_plan.rounds import Round
from sglang_loader.load_plan.saved_plan import SavedPlan
from sglang_loader.load_plan.uses import BucketUses, merged_contents, tied_tensors
from sglang_loader.session.kept_plan import KeptPlan
from sglang_loader.session.recording import PlanRecorder

logger = logging.getLogger(__name__)

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
    """The way in which a sync is loaded. See the module."""

    RECORD = "record"
    REPLAY = "replay"
    EAGER = "eager"


class ModelLoader:
    """The loader of one model, one per model and process.

    Attributes:
        model: the model.
        kept: its load plan, from sync to sync.
        uses: the uses of the tensors of each bucket of this sync, in order.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._recorder = PlanRecorder(model)
        self.kept = KeptPlan(model, self._recorder.load_weights)
        self._tied_in: tuple[WeightMap, LoadPlan] | None = None  # the last pair without a problem
        # All that follows is of this sync alone.
        self.uses: list[BucketUses] = []
        self._load_mode = _LoadMode.EAGER
        self._reason: str | None = None
        self._saved: SavedPlan | None = None  # the plan to which this sync is compared
        self._has_recorded = False
        self._failed_replay: LoadPlan | None = None  # this sync goes on eagerly
        self._table_run: TableRun | None = None
        self._num_replayed = 0
        self._addresses_checked = False
        self._proves_route = False

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
        self.uses, self._saved, self._failed_replay, self._table_run = [], None, None, None
        if self._has_recorded:  # by a sync that has failed
            self._recorder.restart()
        self._has_recorded = self._addresses_checked = False
        self._num_replayed = 0
        self._proves_route = proves_route
        distrusted = self.kept.distrust_reason
        uses_plan = uses_plan and distrusted is None
        dropped = self.kept.begin_sync(
            context, uses_plan=uses_plan, proves_route=proves_route, keeps_plans=keeps_plans
        )
        self._reason = distrusted or dropped
        if not uses_plan:
            self._load_mode = _LoadMode.EAGER
        elif self.plan is None:
            self._load_mode = _LoadMode.RECORD
        else:
            self._reason = self.kept.doubt_reason if not proves_route else None
            is_eager = is_eager or self._reason is not None
            self._load_mode = _LoadMode.EAGER if is_eager else _LoadMode.REPLAY

    def check_addresses(self) -> None:
        """Drop the load plan if a tensor of the model is not where the plan writes it.

        Only the first call in a sync does something.
        """
        # Called while the engine waits for the trainer, and at the latest before the first load.
        if self._addresses_checked:
            return
        self._addresses_checked = True
        if (mismatch := self.kept.mismatch()) is not None:
            self._lose_plan(mismatch, with_uses=True)

    def prepare(self) -> None:
        """Prepare for the first bucket what needs no bucket. Call this while the engine waits."""
        if self._wants_saved:
            self.kept.prepare_saved()

    @property
    def plan(self) -> LoadPlan | None:
        """The plan by which later syncs will be loaded, or None."""
        return self.kept.plan

    def load(self, index: int, layout: BucketLayout, source: BucketSource) -> bool:
        """Load the `index`-th bucket of the sync, asynchronously on a GPU.

        The source stays unchanged.

        Returns:
            True if all work is on the current stream: the plan was replayed without `load_weights`.

        Raises:
            Exception: what `load_weights` raises.
        """
        self.check_addresses()
        # Also if this sync is eager: later syncs would be of this layout, too.
        if self.plan is not None and (reason := _replay_problem(self.plan, index, layout)):
            self._lose_plan(reason)
        is_replayed = self._load_mode is _LoadMode.REPLAY
        if is_replayed and self.kept.proven_with is not None and not self._proves_route:
            # The proof of a route may follow, and does not show what the plan leaves out.
            self._lose_plan("a saved load plan was proven with one sync's weights", with_uses=True)
        if self._load_mode is _LoadMode.REPLAY and self._replay(index, source):
            return self.plan is not None and not self.plan.buckets[index].rest.tensors
        # Here the plan does not hold, or there is none yet: load eagerly, and record if possible.
        is_first = index == 0 and self._load_mode is _LoadMode.RECORD
        if is_first and (reason := self.kept.recording_problem(layout)):
            self._note_reason(reason)
            self._load_mode = _LoadMode.EAGER
        if index == 0 and self._wants_saved:
            self._saved = self.kept.find_saved(layout)
            if self._saved is not None:
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
                not mapped, or must be quantised. Or a tensor that the model drops may have become
                different from the one that the model uses in its place.
        """
        self.check_addresses()
        if self._load_mode is _LoadMode.REPLAY:
            checked = self.kept.checked
            assert checked is not None
            reason = _table_problem(checked.plan, shards.weight_map.layouts)
            if reason is None:
                self._check_tied(shards.weight_map)
                try:
                    self._table_run = checked.executor.table_run(shards, num_ranks, round_bytes)
                    return self._table_run.rounds
                except Exception as error:
                    reason = f"no copy table: {error!r}"
                    if shards.weight_map.quantized is not None:
                        # The plan is good for the quantised export.
                        raise SessionError(reason) from error
            self._lose_plan(reason)
        if shards.weight_map.quantized is not None:
            reason = self._reason or "it has none"
            raise SessionError(f"weights are to be quantised by the engine's load plan: {reason}")
        if not shards.are_mapped:
            reason = self._reason or "it has none"
            raise SessionError(f"weights were to be sent for the load plan of the engine: {reason}")
        return ()

    def _check_tied(self, weight_map: WeightMap) -> None:
        """Raise a SessionError unless tensors that are tied come from the same bytes."""
        assert self.plan is not None, "there is a copy table only for a load plan"
        if self._tied_in == (weight_map, self.plan):
            return
        # The copy table reads no byte of a tensor that the model drops.
        uses = [bucket for bucket in self.kept.uses.values() if bucket.contents]
        unused = {name for bucket in uses for name in bucket.unused}
        tied = tied_tensors(merged_contents(uses), unused)
        places = places_of(weight_map, {*tied, *tied.values()}) if tied else {}
        for name, other in tied.items():
            if places[name] != places[other]:
                raise SessionError(
                    f"the model uses {other} in place of {name}, which the trainer has as a tensor "
                    "of its own: only the full export shows whether they are equal"
                )
        self._tied_in = weight_map, self.plan

    def load_shards(self, shards: ShardMemory) -> bool:
        """Load what comes before the first round, asynchronously on a GPU.

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
                assert self.plan is not None
                is_quantized = shards.weight_map.quantized is not None
                adds = any(bucket.live_in for bucket in self.plan.buckets)
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
        plan = self.plan
        assert plan is not None and self._table_run is not None
        if self._table_run.is_complete:
            for index in range(len(plan.buckets)):
                self._note_replayed(index)
        return not plan.num_rest

    def let_go(self) -> None:
        """Drop the references to the trainer's memory, and free the scratch memory of a table.

        Called after `finish` or a failure, when the device has finished.
        """
        self._table_run = None
        if self.kept.checked is not None:
            self.kept.checked.executor.free_scratch()

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
            self.kept.note_lasted()
        if self._has_recorded:
            self._recorder.restart()  # what was recorded takes memory
            self._has_recorded = False
        self.kept.note_loaded([uses.layout for uses in self.uses], self._failed_replay)
        return SyncOutcome(
            num_replayed=self._num_replayed,
            num_eager=len(self.uses) - self._num_replayed,
            reason=self._reason,
            has_plan=self.plan is not None,
            saved_plan_misfits=self.plan is None and self._saved is not None,
        )

    @property
    def _wants_saved(self) -> bool:
        """True if this sync may use a saved plan in place of a trace."""
        return self._load_mode is _LoadMode.RECORD and self.kept.may_use_saved

    def _use_saved(self, saved: SavedPlan) -> None:
        reason = self.kept.take_saved(saved, [uses.layout for uses in self.uses])
        if reason is None:
            self._reason = self._reason or PROVING_SAVED_PLAN
            return
        # The manifest check must not judge by uses that may be of another model.
        self.uses = [replace(uses, problem=reason) for uses in self.uses]
        self._note_reason(reason)

    def _replay(self, index: int, source: BucketSource) -> bool:
        """Replay a bucket. Return False if that failed and the rest of the sync must be eager."""
        checked = self.kept.checked
        assert checked is not None
        try:
            checked.executor.replay(index, source)
        except Exception as error:
            if checked.plan.buckets[index].live_in:
                raise  # `load_weights` adds to bytes that may be half changed
            self._go_on_eagerly(f"the replay of bucket {index} failed: {error!r}")
            return False
        contents = self.kept.uses[index].contents
        if contents and self._drops_a_vocabulary:
            layout = checked.plan.buckets[index].layout
            contents = self._recorder.contents_of(layout, source.packed(layout))
        self._note_replayed(index, contents)
        return True

    @property
    def _drops_a_vocabulary(self) -> bool:
        """True if the model does not use a tensor of an embedding's shape, as a tied head."""
        with_contents = (uses for uses in self.kept.uses.values() if uses.contents)
        return any(name in uses.contents for uses in with_contents for name in uses.unused)

    def _go_on_eagerly(self, reason: str) -> None:
        """Drop the plan after a failed replay, which `load_weights` repeats."""
        self._failed_replay = self.plan
        self._lose_plan(reason)
        self._load_mode = _LoadMode.EAGER  # a recording needs more memory, and may fail, too

    def _note_replayed(self, index: int, contents: Mapping[str, str] | None = None) -> None:
        """Record a replayed bucket.

        Args:
            contents: of this sync. None if tensors that were equal in the recording still are.
        """
        self._num_replayed += 1
        uses = self.kept.uses[index]
        self.uses.append(replace(uses, contents=contents) if contents else uses)

    def _recording(self) -> PlanRecorder:
        """Return the recorder. `start` and `finish` leave nothing of an earlier sync in it."""
        self._has_recorded = True
        return self._recorder

    def _record(self, index: int, layout: BucketLayout, buffer: torch.Tensor) -> None:
        uses, reason = self._recording().record(layout, buffer)
        self.kept.uses[index] = uses
        self.uses.append(uses)
        if reason is not None:
            self._give_up_plan(reason)

    def _compile(self) -> None:
        try:
            plan = self._recording().finish()
        except PlanRefused as refused:
            self._give_up_plan(str(refused))
            return
        self.kept.take(plan)
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
        earlier = self.kept.uses.get(index)
        if earlier is None or earlier.layout != layout:
            _, self.kept.uses[index] = self._recording().trace(layout, buffer)
        else:
            # A loader may change its tensors, or keep them, and the trainer writes into a buffer
            # again once it was read.
            if earlier.contents:  # of the same tensors as now, with other bytes
                contents = self._recorder.contents_of(layout, buffer)
                self.kept.uses[index] = replace(earlier, contents=contents)
            self._recorder.load_weights(layout.views(buffer[: layout.nbytes].clone()))
        self.uses.append(self.kept.uses[index])

    def _give_up_plan(self, reason: str) -> None:
        """Load the rest of this sync, and later syncs that begin with the same bucket, eagerly."""
        self._note_reason(reason)
        self.kept.note_unplannable(self.uses[0].layout, reason)
        self._load_mode = _LoadMode.EAGER

    def _lose_plan(self, reason: str, *, with_uses: bool = False) -> None:
        """Drop the load plan. Load the rest of the sync eagerly, or record a new plan."""
        self._reason = self._reason or reason
        self.kept.drop(reason, with_uses=with_uses)
        # A plan needs the whole sync, so only a sync that has loaded nothing yet can record one.
        self._load_mode = _LoadMode.EAGER if self.uses else _LoadMode.RECORD

    def _note_reason(self, reason: str) -> None:
        self._reason = self._reason or reason
        self.kept.log(reason)


def _replay_problem(plan: LoadPlan, index: int, layout: BucketLayout) -> str | None:
    """Return the reason why the plan cannot load this bucket, or None."""
    buckets = plan.buckets
    if index >= len(buckets):
        return f"the plan has {len(buckets)} buckets, the sync more"
    if buckets[index].layout is not layout and buckets[index].layout != layout:
        return f"bucket {index} has another layout than the plan's"
    return None


def _table_problem(plan: LoadPlan, layouts: Sequence[BucketLayout]) -> str | None:
    """Return the reason why the plan cannot load a sync of these buckets, or None."""
    if len(layouts) != len(plan.buckets):
        return f"the plan has {len(plan.buckets)} buckets, the sync {len(layouts)}"
    reasons = (_replay_problem(plan, index, layout) for index, layout in enumerate(layouts))
    return next(filter(None, reasons), None)


def loader_of(model: Any) -> ModelLoader:
    """Return the loader of a model, the same for as long as the model lives."""
    # Speculative decoding has two models in one process: the draft and the target. The loader is
    # the model's attribute: a loader holds its model, so a global table would keep both for ever.
    loader = vars(model).get(_ATTRIBUTE)
    if loader is None:
        loader = vars(model)[_ATTRIBUTE] = ModelLoader(model)
    assert isinstance(loader, ModelLoader)
    return loader
