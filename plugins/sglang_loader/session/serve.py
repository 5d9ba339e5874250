"""The engine's end of one session: it loads the weights of one sync as the trainer announces them.

`hooks.weights` has each TP worker serve a `Session` for the request that opens the session:

    session.load()               # until all loads are launched
    session.await_commit()       # once all TP ranks have launched theirs: wait for the device,
                                 # report that this rank has loaded, and wait for the Commit
    session.conclude(failures)   # report the outcome of all TP ranks

A *load* is one bucket, or what the copy table reads of mapped shards, or one round of sent shards.
The engine sends `LoadDone` after the stream has finished with a load. From then on the trainer may
write into the staging buffer of that load again. Mapped shards stay as they are until the sync is
over.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import torch

from sglang_loader.common.broadcast.update_group import GROUP_GRACE_S
from sglang_loader.common.copies.strided import synchronize
from sglang_loader.common.layout import BucketLayout, decode_layout, digest_of
from sglang_loader.common.naming import listed
from sglang_loader.common.rounds import SentRound, encode_rounds
from sglang_loader.common.session import messages
from sglang_loader.common.session.channel import engine_end
from sglang_loader.common.session.messages import FromTrainer, SessionDescriptor, SessionError
from sglang_loader.common.shared_memory import CannotMap, host_id
from sglang_loader.load_plan.plan import LoadPlan
from sglang_loader.session.group_receiver import GroupReceiver
from sglang_loader.session.mapped_memory import MappedMemory
from sglang_loader.session.model_loader import ModelLoader, SyncOutcome, loader_of
from sglang_loader.session.proof import Differs, SavedPlanDiffers, SessionProof
from sglang_loader.upstream import device_of, engine_context, tp_rank

logger = logging.getLogger(__name__)

Message = TypeVar("Message", bound=FromTrainer)
Load: TypeAlias = messages.LoadBucket | messages.LoadShards | messages.LoadRound

POLL_S = 0.0001
NUM_DESCRIPTORS = 1024
"""Number of descriptors that are kept. A request with one of these descriptors is refused."""


@dataclass(frozen=True, kw_only=True)
class SessionSteps:
    """Callbacks of a session. A callback that raises ends the session.

    Attributes:
        before_join: called once before any byte is overwritten, while this end connects.
        before_writing: called before a proof overwrites weights.
        before_loading: called with the layout of each bucket before the bucket is loaded.
    """

    before_join: Callable[[], None]
    before_writing: Callable[[], None]
    before_loading: Callable[[BucketLayout], None]


_served_descriptors: deque[SessionDescriptor] = deque(maxlen=NUM_DESCRIPTORS)
_last_distinct: tuple[BucketLayout, ...] = ()
mapped = MappedMemory()
"""The mapped memory of all sessions of this process."""
receiver = GroupReceiver()
"""The receiver of all sessions of this process. `hooks.update_groups` removes groups from it."""


def _when_done(device: torch.device, *, on_current_stream: bool) -> torch.cuda.Event | None:
    """Return the event of a load that was launched, or None if the load is done."""
    if device.type != "cuda" or not on_current_stream:
        # A loader that may use other streams is waited for at once.
        synchronize(device)
        return None
    event = torch.cuda.Event()
    event.record()
    return event


class Session:
    """The engine's part of one session.

    Args:
        descriptor: the trainer's. The caller has checked the signature of a descriptor with a
            group.
        models: the models to load. With speculative decoding these are two, the target last.
        steps: called in the course of the session.
        group: the process group in which buckets are broadcast, or None if all are mapped.
        senders: the process group in which all trainer ranks send, or None.
        wants_proof: a user has requested a proof of this sync.

    Raises:
        SessionError: a proxy has repeated the request, which is not executed again, or as
            `engine_end`.
    """

    def __init__(
        self,
        descriptor: SessionDescriptor,
        models: Sequence[Any],
        steps: SessionSteps,
        group: Any = None,
        senders: Any = None,
        *,
        wants_proof: bool = False,
    ) -> None:
        if was_served(descriptor):
            raise SessionError("the same request has come before: it is not executed again")
        self._descriptor = descriptor
        self._wants_proof = wants_proof
        self._steps = steps
        self._loaders: list[ModelLoader] = [loader_of(model) for model in models]
        self._models = models
        self._device = device = device_of(models[0])
        self._mapped = mapped.begin_session(device)
        self._received: GroupReceiver | None = None
        self._limit_s = descriptor.timeout_s
        if group is not None:
            self._limit_s += GROUP_GRACE_S
            self._received = receiver.begin_session(group, senders, device, self._limit_s)
        self._loaded: list[BucketLayout] = []
        self._num_loads = 0  # announced
        self._by_table = False
        self._announced: deque[Load] = deque()  # not yet begun
        self._begun: deque[Load] = deque()  # not yet launched
        self._in_flight: deque[tuple[int, torch.cuda.Event | None]] = deque()  # launched, in order
        self._rounds: deque[ModelLoader] = deque()  # by which model each round is to be loaded
        self._outcome: SyncOutcome | None = None  # of a session that has loaded everything
        self._proof: SessionProof | None = None
        if descriptor.proof != "none":
            self._proof = SessionProof(descriptor.proof, self._loaders, descriptor.sync)
        self._seconds = dict.fromkeys(("waiting", "launching", "copying"), 0.0)
        self._has_released = self._has_failed = False
        self._unprepared: Exception | None = None
        self._channel = engine_end(
            descriptor.endpoint, is_signed=bool(descriptor.group), meanwhile=self._prepare_to_join
        )
        _served_descriptors.append(descriptor)

    @property
    def differing(self) -> Sequence[str]:
        """The tensors that differed in a proof on this rank. See `Loaded`."""
        return self._proof.differing if self._proof is not None else ()

    def load(self) -> None:
        """Launch all loads of the session.

        On return the device may still copy, but for a proof. What the TP ranks do next takes no
        time of a sync.

        Raises:
            Differs: the session proves a route, and has left other bytes than the engine held.
            SessionError: the trainer is gone, is silent, has aborted, or broke the protocol.
            Exception: what a step or a model's `load_weights` raised. The trainer gets the
                traceback, too.
        """
        self._channel.begin(self._descriptor.token, timeout_s=self._limit_s)
        with self._reporting_failure():
            self._load_all()

    def await_commit(self) -> bool:
        """Wait for the device, unmap, report that this rank has loaded, and wait for the Commit.

        Call this when all TP ranks have launched their loads.

        Returns:
            True if this is the last session of the sync: requests may run after it.

        Raises:
            SessionError: as `load`.
        """
        assert self._outcome is not None, "nothing was loaded"
        with self._reporting_failure():
            self._wait_for_device()
            # Before Loaded, after which other engines may publish: nothing of this may fail then.
            self.stop_reading()
            self._channel.send(
                messages.Loaded,
                **asdict(self._outcome),
                differing=list(self.differing),
                later_proof=self._proof.later_proof if self._proof is not None else "none",
                host=host_id(),
                seconds=dict(self._seconds),
            )
            commit = _expected(messages.Commit, self._channel.receive())
        return commit.is_last

    @contextmanager
    def _reporting_failure(self) -> Iterator[None]:
        """Run the body. If the body raises, send the trainer the traceback and end the session."""
        try:
            yield
        except Exception as error:
            text = f"TP rank {tp_rank()}: {traceback.format_exc()}"
            # After a failed sync the trainer sends every handle anew. If the trainer is dead, its
            # memory is freed only when no process maps it.
            try:
                self.stop_reading()
                self._mapped.release_all()
            finally:  # the device itself may be what failed
                self._has_failed = True
                # A trainer that sees a failed session closed counts its handles as dropped.
                with suppress(SessionError), self._channel:  # the trainer may be what is gone
                    self._channel.send(messages.Failed, traceback=text, failure=kind_of(error))
            raise

    def stop_reading(self) -> None:
        """Wait for the device, and unmap the trainer's memory but what the trainer asked to keep.

        Only the first call does something.
        """
        if self._has_released:
            return
        self._has_released = True
        # After a failure the device may still read them.
        synchronize(self._device)
        with ExitStack() as stack:  # an error of one keeps no other from letting go
            if self._received is not None:
                stack.callback(self._received.release)
            stack.callback(self._mapped.release)
            for loader in reversed(self._loaders):
                stack.callback(loader.let_go)

    def conclude(self, failures: Sequence[str], kind: messages.FailureKind = "other") -> None:
        """Report the outcome on all TP ranks to the trainer: the failures, or success.

        A session that has failed on this rank is closed. Its failure was reported.
        """
        if self._has_failed:
            return
        if failures:
            if self._proof is not None:
                self._proof.undo()
            self.stop_reading()
            self._mapped.release_all()
        with suppress(SessionError), self._channel:  # the reply to the request reports it, too
            if failures:
                self._channel.send(messages.Failed, traceback="\n".join(failures), failure=kind)
            else:
                self._channel.send(messages.Published)

    def _prepare_to_join(self) -> None:
        try:
            self._steps.before_join()
        except Exception as error:  # raised by `load`, which reports it by the channel
            self._unprepared = error

    def _load_all(self) -> None:
        if self._unprepared is not None:
            raise self._unprepared
        for model, loader in zip(self._models, self._loaders, strict=True):
            loader.start(
                engine_context(model),
                uses_plan=self._descriptor.uses_plan,
                is_eager=self._descriptor.proof == "served",
                proves_route=self._descriptor.proof == "route",
                keeps_plans=True,
            )
        self._channel.send(
            messages.Hello,
            buffers=mapped.names,
            stored=mapped.stored,
            plan=name_of([loader.plan for loader in self._loaders]),
            wants_proof=self._wants_proof
            or any(loader.kept.proven_with is not None for loader in self._loaders),
        )
        # Work that needs no bytes of the trainer, while the trainer waits for all engines.
        for loader in self._loaders:
            loader.check_addresses()
            loader.prepare()
        _expected(messages.Welcome, self._channel.receive())
        if self._proof is not None:
            with self._spending("proving"):
                self._proof.begin(self._steps.before_writing)
        while True:
            message = self._next_message()
            if isinstance(message, Load):
                self._announce(message)  # loaded while the next messages come
            elif isinstance(message, messages.Store):
                self._mapped.store(message.data)
            elif isinstance(message, messages.Finish):
                self._launch_remaining()
                self._outcome = self._finish(message)
                if self._proof is not None:
                    self._wait_for_device()
                    with self._spending("proving"):
                        self._proof.end()
                for loader in self._loaders:
                    loader.kept.check_restored(self._descriptor.sync)
                return
            else:
                _expected(messages.LoadBucket, message)

    def _next_message(self) -> FromTrainer:
        """Return the trainer's next message. Until it comes, launch and report loads."""
        while self._advance() and not self._channel.has_message():
            pass
        with self._spending("waiting"):
            return self._channel.receive()

    def _advance(self) -> bool:
        """Report finished loads, begin others, launch the next. Return False if none is left."""
        self._report_finished()
        self._begin_loads()
        if self._begun and self._memory_of(self._begun[0]).has_arrived():
            with self._spending("launching"):
                self._launch(self._begun.popleft())
        elif self._begun or self._in_flight:
            with self._spending("copying" if self._in_flight else "waiting"):
                time.sleep(POLL_S)
        else:
            return False
        return True

    def _report_finished(self) -> None:
        """Report the oldest loads with which the device has finished."""
        while self._in_flight:
            index, event = self._in_flight[0]
            if event is not None and not event.query():
                return
            self._in_flight.popleft()
            self._channel.send(messages.LoadDone, index=index)

    def _begin_loads(self) -> None:
        while self._announced:
            message = self._announced[0]
            memory = self._memory_of(message)
            if len(self._begun) + len(self._in_flight) >= memory.max_unread:
                return
            if memory is self._mapped:
                self._mapped.map_buffers(message.buffers)
            elif isinstance(message, messages.LoadRound):
                receiver.begin_round(message)
            elif isinstance(message, messages.LoadBucket):
                receiver.begin_bucket(message, decode_layout(message.layout))
            self._begun.append(self._announced.popleft())
            if memory is self._received:
                self._channel.send(messages.Receiving, index=message.index)

    def _memory_of(self, message: Load) -> MappedMemory | GroupReceiver:
        """Return the memory that a load comes to: the group's receiver, or mapped memory."""
        if self._received is None:
            return self._mapped
        if not isinstance(message, messages.LoadShards):
            return self._received
        if message.buffers and message.host != host_id():
            raise SessionError("the trainer's parameters lie in memory of another host")
        return self._mapped

    def _launch_remaining(self) -> None:
        """Launch all that was announced."""
        while self._announced or self._begun:
            self._advance()
            if self._channel.has_message():
                _expected(messages.Abort, self._channel.receive())

    def _wait_for_device(self) -> None:
        """Wait until the device has loaded all that was launched, and report that."""
        with self._spending("copying"):
            synchronize(self._device)
        self._report_finished()

    @contextmanager
    def _spending(self, stage: str) -> Iterator[None]:
        """Add the body's time to `Loaded.seconds`."""
        started = time.perf_counter()
        yield
        self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - started

    def _announce(self, message: Load) -> None:
        # Loads are announced in order, and none twice. Buckets and the copy table do not mix.
        is_first = not self._num_loads
        by_table = isinstance(message, messages.LoadShards) if is_first else self._by_table
        fits = isinstance(message, messages.LoadBucket) != by_table
        fits = fits and isinstance(message, messages.LoadShards) == (is_first and by_table)
        if message.index != self._num_loads or not fits:
            raise SessionError(
                f"got {type(message).__name__} {message.index}, expected load {self._num_loads}"
            )
        self._by_table = by_table
        self._num_loads += 1
        self._announced.append(message)

    def _launch(self, message: Load) -> None:
        # All models of the session load the same bytes: a draft model and its target.
        if isinstance(message, messages.LoadShards):
            on_stream = self._launch_shards(message)
        elif isinstance(message, messages.LoadRound):
            on_stream = self._launch_round(message)
        else:
            layout = decode_layout(message.layout)
            self._steps.before_loading(layout)
            source = self._memory_of(message).source(message, layout.nbytes)
            replayed = [loader.load(message.index, layout, source) for loader in self._loaders]
            self._loaded.append(layout)
            on_stream = all(replayed)
        event = _when_done(self._device, on_current_stream=on_stream)
        self._in_flight.append((message.index, event))

    def _launch_shards(self, message: messages.LoadShards) -> bool:
        """Load what the copy table reads of mapped shards, and report what must be sent.

        Returns:
            True if all work is on the current stream.
        """
        shards = self._mapped.shards(message)
        sent: list[SentRound] = []
        for loader in self._loaders:
            rounds = loader.plan_table(shards, message.num_ranks, message.round_bytes)
            self._rounds += [loader] * len(rounds)
            sent += [each.sent for each in rounds]
        if message.rounds is not None:
            data = encode_rounds(sent)
            digest = digest_of(data)
            is_known = digest == message.rounds
            self._channel.send(messages.Rounds, digest=digest, data=None if is_known else data)
        for layout in shards.weight_map.layouts:
            self._steps.before_loading(layout)
        self._loaded += shards.weight_map.layouts
        replayed = [loader.load_shards(shards) for loader in self._loaders]
        return all(replayed)

    def _launch_round(self, message: messages.LoadRound) -> bool:
        """Load a round. Return True if all work is on the current stream."""
        memory = self._memory_of(message)
        buffer = memory.buffer(message)
        if not self._rounds:
            # Other engine ranks of the group still have rounds.
            if sum(message.receives) or memory is self._mapped:
                raise SessionError(f"load {message.index} came after all rounds of this rank")
            return True
        return self._rounds.popleft().load_round(buffer)

    def _finish(self, finish: messages.Finish) -> SyncOutcome:
        """Check that every tensor came exactly once, and end the sync of all loaders."""
        # A lost or repeated message must not publish a part of the weights.
        num_tensors = sum(len(layout.tensors) for layout in self._loaded)
        if (finish.num_loads, finish.num_tensors) != (self._num_loads, num_tensors):
            raise SessionError(
                f"{num_tensors} tensors in {self._num_loads} loads came, the trainer sent "
                f"{finish.num_tensors} in {finish.num_loads}"
            )
        if not self._loaded:
            raise SessionError("the trainer sent no tensor")
        _check_distinct(tuple(self._loaded))
        outcomes = [loader.finish() for loader in self._loaders]
        # The trainer plans by the model that can do the least.
        least = min(outcomes, key=attrgetter("has_plan", "num_replayed"))
        logger.info(
            "sync: %d buckets replayed, %d loaded eagerly%s",
            least.num_replayed,
            least.num_eager,
            f": {least.reason}" if least.reason else "",
        )
        return least


def _expected(kind: type[Message], message: FromTrainer) -> Message:
    """Return the trainer's message, or raise SessionError if it is of another kind."""
    if isinstance(message, messages.Abort):
        raise SessionError(f"the trainer aborted the sync: {message.reason}")
    if not isinstance(message, kind):
        raise SessionError(f"expected {kind.__name__}, got {type(message).__name__}")
    return message


def was_served(descriptor: SessionDescriptor) -> bool:
    """Return True if a session was made of this descriptor, or its failure was reported."""
    return descriptor in _served_descriptors


def report_unopened(descriptor: SessionDescriptor, failure: str) -> None:
    """Report to the trainer that this rank has failed before it had made its session.

    Without the report, the trainer and the other TP ranks would wait for this rank to join.

    Args:
        descriptor: the trainer's, as for a `Session`.
    """
    _served_descriptors.append(descriptor)
    is_signed = bool(descriptor.group)
    with suppress(SessionError), engine_end(descriptor.endpoint, is_signed=is_signed) as end:
        mapped.release_all()  # the trainer counts its handles as dropped
        end.begin(descriptor.token, timeout_s=descriptor.timeout_s)
        end.send(messages.Failed, traceback=f"TP rank {tp_rank()}: {failure}", failure="other")


def kind_of(error: Exception) -> messages.FailureKind:
    """Return the kind of a failure, by which the trainer decides what to try next."""
    if isinstance(error, CannotMap):
        return "cannot_map"
    if isinstance(error, SavedPlanDiffers):
        return "saved_plan_differs"
    return "differs" if isinstance(error, Differs) else "other"


def name_of(plans: Sequence[LoadPlan | None]) -> str:
    """Return one name for the load plans of all models of a session, or "" if one has none."""
    return "+".join(plan.name for plan in plans if plan is not None) if all(plans) else ""


def _check_distinct(layouts: tuple[BucketLayout, ...]) -> None:
    """Raise SessionError if a tensor came twice."""
    global _last_distinct
    # The last sync's layouts need no second check. The comparison is quick: `decode_layout` returns
    # the same objects again.
    if layouts == _last_distinct:
        return
    counts = Counter(tensor.name for layout in layouts for tensor in layout.tensors)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise SessionError(f"tensors came more than once: {listed(repeated)}")
    _last_distinct = layouts
