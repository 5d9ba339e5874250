"""Hook on SGLang's weight update: it serves a session on every TP rank and agrees on its outcome.

In SGLang an exception while loading ends the scheduler process, and a failure on any TP rank but 0
is only logged. For servers that were launched with our loaders every rank reports, and the reply
fails with rank and traceback.

    update = WeightUpdate(updater, request)
    failures = update.run(load, await_commit)   # on every TP rank; the same list on all of them

`load` receives the whole sync, and launches the loads. When all ranks have done that and judged the
sync, `await_commit` waits for the device and for the trainer's Commit. An exception in either ends
neither the process nor the other ranks.
Requests are served again when all ranks agree on three facts: the sync is complete, fits the model,
and was committed. With `manifest_check` off, the ranks judge a sync only if a failed sync may have
left a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sglang_loader.common.copies.triton_kernels import fallbacks
from sglang_loader.common.garbage_collection import no_full_collections
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.naming import listed
from sglang_loader.common.replies import with_remarks
from sglang_loader.common.session.messages import (
    SESSION_FORMAT,
    FailureKind,
    ManifestCheck,
    Proof,
    SessionDescriptor,
    SessionError,
    decode_descriptor,
)
from sglang_loader.hooks.proof_requests import proof_fact
from sglang_loader.hooks.request_gate import (
    closing_reason,
    gate_reason,
    note_other_update,
    note_published,
    set_gate,
)
from sglang_loader.hooks.tp_ranks import TPRanks, run_step
from sglang_loader.hooks.update_groups import groups_of
from sglang_loader.host_backup.allocations import WEIGHTS_TAG, under_weights_tag
from sglang_loader.host_backup.backup import backup_of, create_backup
from sglang_loader.host_backup.completeness import Completeness
from sglang_loader.session.findings import Verdict
from sglang_loader.session.model_loader import loader_of
from sglang_loader.session.serve import (
    Session,
    SessionSteps,
    kind_of,
    report_unopened,
    was_served,
)
from sglang_loader.session.weight_check import (
    SyncView,
    cached_verdict,
    judge_together,
    view_of_sync,
)
from sglang_loader.upstream import (
    UpdateFrame,
    entry_bytes,
    facts_of,
    in_an_update,
    io_struct,
    is_idle,
    is_ours,
    record_version,
    runners_of,
    with_facts,
)

OUR_FORMATS = "sglang_loader."
BUSY = "refused: requests are running. The weights are as they were"
RELEASED = (
    "refused: the memory of the engine's weights is released. Nothing was loaded, and the weights "
    "are as they were. Resume the tag 'weights' before a sync"
)

Original = Callable[..., Any]


def update_on_all_ranks(original: Original, updater: Any, request: Any) -> Any:
    """Wrap `update_weights_from_tensor`: load on every TP rank, then agree on the outcome."""
    if request.load_format != SESSION_FORMAT:
        # An update that is not ours: SGLang's own code loads it, within our gate.
        if not str(request.load_format).startswith(OUR_FORMATS):
            if not is_ours(updater.tp_worker.server_args):
                return original(updater, request)
            if WEIGHTS_TAG in updater.offload_tags:
                return _reply([RELEASED])
            with in_an_update(updater, request):
                return note_other_update(original, updater, request)
        return io_struct().UpdateWeightsFromTensorReqOutput(
            success=False,
            message=f"unknown load_format {request.load_format!r}: the trainer and the engine have "
            "different releases of verl-sglang-sync installed",
        )
    if WEIGHTS_TAG in updater.offload_tags:  # on all ranks alike
        return _reply([RELEASED])
    if not _is_idle(updater):
        return _reply([BUSY], is_busy=True)
    update = WeightUpdate(updater, request)
    # SGLang's own method does not run, so its metric of weight loads is recorded here.
    with no_full_collections(), updater._observe_weight_load("tensor"):
        failures = _serve_session(update, updater, request)
    return _reply(failures, update.remarks, proof=update.proof_fact)


def _is_idle(updater: Any) -> bool:
    """Return True if no TP rank has requests."""
    if updater.tp_worker.server_args.dp_size > 1:  # with DP attention, the ranks' queues differ
        return TPRanks(updater).all(is_idle(updater))
    return is_idle(updater)


def _reply(
    failures: list[str],
    remarks: Sequence[str] = (),
    *,
    is_busy: bool = False,
    proof: dict[str, Any] | None = None,
) -> Any:
    """Return SGLang's reply, with the facts that `hooks.http` reads."""
    message = "\n".join(failures) or with_remarks(remarks)
    reply = io_struct().UpdateWeightsFromTensorReqOutput(success=not failures, message=message)
    return with_facts(reply, closed=gate_reason(), is_busy=is_busy, proof=proof)


def _serve_session(update: WeightUpdate, updater: Any, request: Any) -> list[str]:
    """Serve one session, and return the failures of all ranks."""
    # At most one session, added when its load was good.
    sessions: list[Session] = []

    def descriptor_of_rank() -> SessionDescriptor:
        return decode_descriptor(
            entry_bytes(request.serialized_named_tensors[TPRanks(updater).rank])
        )

    # A request without a descriptor fails in `load`, in step with the other TP ranks.
    descriptor, reason = run_step(descriptor_of_rank)
    if descriptor is not None:
        update.manifest_check = descriptor.manifest_check
        update.syncs_draft = descriptor.syncs_draft
        update.proof = descriptor.proof

    def load() -> None:
        num_asked, num_ranks = len(request.serialized_named_tensors), TPRanks(updater).size
        if num_asked != num_ranks:
            raise SessionError(
                f"the trainer's replica has {num_asked} ranks, this engine has {num_ranks} TP "
                "ranks: the numbers must be equal"
            )
        if descriptor is None:
            raise SessionError(f"the request has no session descriptor for this rank\n{reason}")
        groups = groups_of(updater.tp_worker.model_runner, descriptor)
        steps = SessionSteps(
            before_join=update.flush,
            before_writing=update.begin_writing,
            before_loading=update.begin_bucket,
        )
        wants_proof = bool(facts_of(request).get("wants_proof"))
        session = Session(descriptor, update.models, steps, *groups, wants_proof=wants_proof)
        try:
            session.load()
        except Exception as error:
            update.failure_kind = kind_of(error)
            raise
        finally:
            update.differing = session.differing  # a failed proof reports them, too
        sessions.append(session)  # a session that failed has reported its failure

    def await_commit() -> bool:
        (session,) = sessions
        return session.await_commit()

    def report(failure: str) -> None:
        # An open session has reported its failure. The trainer of a repeated request is at work.
        if descriptor is not None and not was_served(descriptor):
            groups_of(updater.tp_worker.model_runner, descriptor)  # the address may be forged
            report_unopened(descriptor, failure)

    failures = update.run(load, await_commit, report)
    if failures:
        # Another TP rank has failed, and the device of this one may still copy. No rank answers
        # before: the trainer would write to memory that is being read.
        for session in sessions:
            run_step(session.stop_reading)
        TPRanks(updater).gather(None)
    for session in sessions:
        session.conclude(failures, update.failure_kind)
    return failures


class PrefixCacheInUse(RuntimeError):
    """A prefix cache that cannot be dropped. Its entries would be of the old weights."""


class WeightUpdate:
    """One update of the weights on this TP rank, in step with the others. See the module.

    Attributes:
        manifest_check: see `SessionDescriptor`.
        syncs_draft: see `SessionDescriptor`.
        proof: see `SessionDescriptor`.
        models: the models that load the sync. The target is the last.
        failure_kind: see `Failed`.
        differing: tensors that differed in a proof on this TP rank.
        proof_fact: the outcome of a proof, on all TP ranks. None if nothing was compared.
    """

    def __init__(self, updater: Any, request: Any) -> None:
        self.manifest_check: ManifestCheck = "off"
        self.syncs_draft = False
        self.proof: Proof = "none"
        self.differing: Sequence[str] = ()
        self.proof_fact: dict[str, Any] | None = None
        self.failure_kind: FailureKind = "other"
        self._updater = updater
        self._ranks = TPRanks(updater)
        self._request = request
        model = updater.tp_worker.model_runner.model
        self.models: list[Any] = [model]
        # A model that our hook has not loaded has no backup yet. Its syncs are recorded, too.
        self._backup = backup_of(model) or create_backup(model, "on", under_weights_tag)
        self._has_begun = self._has_flushed = False
        self._verdict: Verdict | None = None
        self._view: SyncView | None = None

    def begin_writing(self) -> None:
        """Record that weights may be overwritten. Call this before they are."""
        self._has_begun = True

    def begin_bucket(self, layout: BucketLayout) -> None:
        """Record that a bucket will be loaded. Call this before the bucket is loaded."""
        self.begin_writing()
        self._backup.sync.begin_bucket(layout)

    def view_sync(self) -> None:
        """Find the verdict on these tensors, or make this rank's view of them.

        Call this when all buckets are loaded.
        """
        if not self._needs_verdict:
            return
        model = self._updater.tp_worker.model_runner.model
        self._verdict = cached_verdict(self._layouts, model)
        # A refusal is judged again. Another rank's tensors may have been at fault, and the key of
        # the verdict names this rank's alone.
        if self._verdict is None or self._refusal(self._verdict) is not None:
            self._view = view_of_sync(self._layouts, self.models)

    def flush(self) -> None:
        """Drop the prefix cache, once.

        Raises:
            PrefixCacheInUse: requests are running, on all TP ranks: their queues are in step.
        """
        if self._has_flushed:
            return
        self._has_flushed = self._updater.flush_cache(empty_cache=self._request.torch_empty_cache)
        if not self._has_flushed:
            raise PrefixCacheInUse("the prefix cache cannot be dropped: requests are running")

    def run(
        self,
        load: Callable[[], None],
        await_commit: Callable[[], bool],
        report: Callable[[str], None],
    ) -> list[str]:
        """Load a whole sync on every TP rank, and publish the sync.

        Args:
            load: loads all buckets, and calls `begin_bucket` before each.
            await_commit: waits for the trainer's Commit. Returns False if another session of the
                sync follows.
            report: tells the trainer of a failure before the other TP ranks hear of it.

        Returns:
            The failures of all ranks.
        """
        failure = self._load_in_frame(load)
        if failure is not None:
            run_step(partial(report, failure))
        # After a failure, too: the prefix caches of all TP ranks must stay equal.
        _, unflushed = run_step(self.flush)
        failure = failure or unflushed
        if failure is None:
            _, failure = run_step(self.view_sync)
        # The bytes that are undefined after this sync. A refusal must come before Commit.
        stale = self._ranks.named(self._backup.stale_once_synced)
        named = self._ranks.named(failure)
        has_view, kind = self._view is not None, self.failure_kind
        state = named, self._has_begun, has_view, stale, list(self.differing), kind
        # One exchange for all facts: each exchange takes time in which the engine stands still.
        gathered = self._ranks.gather(state)
        failed, touched, new, undefined, differing, kinds = zip(*gathered, strict=True)
        # The trainer may hear first of a rank that is not at fault.
        # A wrong saved plan counts only if no TP rank reports a failure of another kind.
        others = [kind for kind in kinds if kind not in ("other", "saved_plan_differs")]
        self.failure_kind = next(iter(others), "other")
        if not others and "saved_plan_differs" in kinds:
            self.failure_kind = "saved_plan_differs"
        failures = [text for text in failed if text]
        # One rank without a verdict is enough: all ranks must judge together.
        if not failures and any(new):
            failures = self._judge()
        # Bytes that this sync leaves undefined on one rank must not be served on any.
        failures = failures or [text for text in undefined if text]
        is_last: bool | None = True
        # The trainer gets Loaded only when all ranks are sure. Its Commit is the last word.
        if not failures:
            is_last, failure = run_step(await_commit)
            # Commits come one by one. No TP rank publishes if another one has got no Commit.
            failures = self._ranks.failures(failure)
        if not failures:
            self._backup.sync_completed()
            note_published(is_last=bool(is_last))
            record_version(self._updater, self._request)
        elif any(touched):
            self._backup.sync_failed()
        # Not earlier: this method blocks the scheduler's loop, so no request runs before it ends.
        if any(touched):  # otherwise nothing has changed
            set_gate(closing_reason(self._updater) or next(iter(failures), None))
        names = list(dict.fromkeys(name for names in differing for name in names))
        self.proof_fact = proof_fact(self.proof, names, is_good=not failures)
        return failures

    def _load_in_frame(self, load: Callable[[], None]) -> str | None:
        """Load within SGLang's `UpdateFrame`. Return this rank's failure, or None."""
        find_runners = partial(runners_of, self._updater, syncs_draft=self.syncs_draft)
        runners, failure = run_step(find_runners)
        if runners is None:
            return failure
        self.models = [runner.model for runner in runners]
        frame = UpdateFrame(self._updater, runners)
        _, failure = run_step(frame.begin)
        if failure is None:
            _, failure = run_step(load)
            _, unfinished = run_step(frame.end)
            failure = failure or unfinished
        # A frame that is still open may have left weights unpacked.
        self._has_begun = self._has_begun or frame.is_open
        return failure

    @property
    def _needs_verdict(self) -> bool:
        """True if the tensors of this sync must be judged."""
        # Judged if the trainer asks for that, or if this sync may not make up for a failed one.
        return self.manifest_check != "off" or _may_be_incomplete(self._backup.sync)

    @property
    def _layouts(self) -> Sequence[BucketLayout]:
        return self._backup.sync.layouts

    @property
    def remarks(self) -> list[str]:
        """Remarks for the reply to a good sync, each on one topic: checks, kernels, saved plans."""
        check = self._verdict.remark() if self.manifest_check != "off" and self._verdict else ""
        replaced = [f"in the engine {fallback}" for fallback in fallbacks]
        kept_plans = [loader_of(model).kept for model in self.models]
        refused = [f"in the engine {text}" for kept in kept_plans for text in kept.take_remarks()]
        return [*([f"manifest check: {check}"] if check else []), *replaced, *refused]

    def _judge(self) -> list[str]:
        """Judge the tensors together. Return the reasons against publication, on all ranks."""
        reason: str | None = None
        if self._view is None:
            self._view, reason = run_step(partial(view_of_sync, self._layouts, self.models))
        if failures := self._ranks.failures(reason):
            return failures
        assert self._view is not None, "a rank without a view has failed"
        self._verdict = judge_together(self._view, self._ranks.gather)
        refusals = self._ranks.failures(self._refusal(self._verdict))
        self.failure_kind = "misfit" if refusals else "other"
        return refusals

    def _refusal(self, verdict: Verdict) -> str | None:
        """Return the reason why this sync must not be published, or None."""
        sync = self._backup.sync
        nothing = f"{'after a failed sync ' if sync.is_broken else ''}nothing is published"
        is_gap = bool(verdict.missing) and _may_be_incomplete(sync)
        if is_gap or (self.manifest_check == "error" and not verdict.fits):
            return f"{nothing}: the weights do not fit the engine's model: {verdict.text()}"
        missing = sync.missing()
        if missing and (verdict.not_checked or verdict.doubtful):
            return f"{nothing}: earlier syncs also brought {listed(missing)}"
        return None


def _may_be_incomplete(sync: Completeness) -> bool:
    return sync.is_broken and (not sync.has_completed or bool(sync.missing()))
