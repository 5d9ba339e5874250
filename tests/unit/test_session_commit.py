"""A whole session in one process: commits while buckets are in flight, outcomes of all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from sglang_loader import session, session_state
from sglang_loader.session_messages import BucketPiece, decode_descriptor
from verl_sglang_sync.arranged_sending import ArrangedTurn
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.memory_blocks import BlockNames
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.session_buckets import BucketMaker
from verl_sglang_sync.trainer_session import EngineFailed, SessionSockets, TrainerSession
from verl_sglang_sync.weight_sync import Export

CPU = torch.device("cpu")
SETTINGS = WeightSyncConfig(
    mode="compiled",
    bucket_bytes=256,
    request_timeout_s=10,
    multi_stage_wake_up=True,
    free_cache_engine=True,
)
WEIGHTS = {name: torch.arange(60.0) + i for i, name in enumerate(("first", "second"))}


class Model(nn.Module):
    """Loads by name; refuses what it does not have."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(60)))

    def load_weights(self, weights: Any) -> None:
        with torch.no_grad():
            for name, tensor in weights:
                self.get_parameter(name).copy_(tensor)


class Event:
    """Of a device that has done what was launched once it is waited for."""

    waited = False

    def query(self) -> bool:
        return self.waited


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> Event:
    """An engine that launches without waiting, as on a GPU."""
    event = Event()

    class InFlight(session_state.InFlight):
        def add(self, index: int, *, on_current_stream: bool) -> None:
            self._launched.append((index, event))

    def synchronize(device: torch.device) -> None:
        event.waited = True

    monkeypatch.setattr(session, "InFlight", InFlight)
    monkeypatch.setattr(session, "synchronize", synchronize)
    monkeypatch.setattr(session, "engine_context", lambda model: {})
    monkeypatch.setattr(session, "tp_rank", lambda: 0)
    return event


class Engine(threading.Thread):
    """Serves the one session; keeps what it raised.

    Args:
        invitation: the trainer's.
        model: to be loaded.
        others: what went wrong on other TP ranks.
        once_joined: as for `serve_session`.

    Attributes:
        error: what it raised.
        has_begun: the first bucket has come.
    """

    def __init__(
        self,
        invitation: bytes,
        model: Model,
        others: Sequence[str] = (),
        once_joined: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._descriptor, self._model = decode_descriptor(invitation), model
        self._others, self._once_joined = others, once_joined
        self.error: Exception | None = None
        self.has_begun = False

    def begin(self) -> None:
        assert not self.has_begun
        self.has_begun = True

    def run(self) -> None:
        try:
            served = session.serve_session(
                self._descriptor,
                [self._model],
                once_joined=self._once_joined,
                before_loading=self.begin,
            )
        except Exception as error:
            self.error = error
            return
        served.conclude(self._others)


@pytest.fixture
def trainer() -> Iterator[TrainerSession]:
    # As on any trainer on a CPU: torch's default moves a storage when it is shared by name.
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    with TrainerSession(SessionSockets(), SETTINGS, BlockNames(), frozenset()) as opened:
        yield opened
    torch.multiprocessing.set_sharing_strategy(before)


def joined(trainer: TrainerSession, model: Model, **options: Any) -> Engine:
    """An engine that serves `model` and has met the trainer."""
    engine = Engine(trainer.invitation, model, **options)
    engine.start()
    meet(trainer)
    return engine


def meet(trainer: TrainerSession) -> None:
    while not trainer.greet(lambda: None, wait_s=0.1):
        pass


def send_all(trainer: TrainerSession, maker: BucketMaker) -> None:
    """Both buckets, and the commit, without a look at what the engine says."""
    report = SyncReport(mode="compiled", replica=0)
    export = Export(list(WEIGHTS.items()))
    for bucket in maker.exported(export, report, ArrangedTurn(None), announced=False):
        planned = bucket.batch.bucket
        assert bucket.storage is not None
        slot = trainer.map_buffer(bucket.storage, keep=True)
        piece = BucketPiece(slot, 0, 0, planned.layout.nbytes)
        trainer.load(bucket.batch.index, planned, [piece], read_only=False)
    assert report.num_buckets == 2
    trainer.commit(num_buckets=2, num_tensors=2, arrangements=None)


def test_buckets_in_flight_are_done_before_the_commit(
    event: Event, trainer: TrainerSession
) -> None:
    model, maker = Model(tuple(WEIGHTS)), BucketMaker(SETTINGS, CPU)
    engine = joined(trainer, model)
    send_all(trainer, maker)
    trainer.wait_until_done(1)
    assert event.waited, "told to be done while the device was at it"
    outcome = trainer.outcome()
    trainer.wait_until_published()
    engine.join()
    assert engine.error is None
    assert engine.has_begun
    assert outcome.num_replayed + outcome.num_eager == 2
    assert not trainer.has_arrived(), "the next session would read it"
    for name, tensor in WEIGHTS.items():
        assert torch.equal(model.get_parameter(name).detach(), tensor)


def test_an_engine_that_fails_after_the_commit_was_sent_is_heard(
    event: Event, trainer: TrainerSession
) -> None:
    engine, maker = joined(trainer, Model(("first",))), BucketMaker(SETTINGS, CPU)
    with pytest.raises(EngineFailed, match="second"):
        send_all(trainer, maker)
        trainer.wait_until_done(1)
    engine.join()
    assert engine.error is not None


def test_what_failed_on_another_tp_rank_is_heard_after_this_one_has_committed(
    event: Event, trainer: TrainerSession
) -> None:
    model, maker = Model(tuple(WEIGHTS)), BucketMaker(SETTINGS, CPU)
    engine = joined(trainer, model, others=["TP rank 1: no memory"])
    send_all(trainer, maker)
    trainer.wait_until_done(1)
    trainer.outcome()
    with pytest.raises(EngineFailed, match="TP rank 1: no memory"):
        trainer.wait_until_published()
    engine.join()
    assert session._kept.take(trainer._channel.endpoint) is None


def test_what_must_be_done_before_ends_the_session_before_the_first_byte(
    event: Event, trainer: TrainerSession
) -> None:
    def refuse() -> None:
        raise RuntimeError("requests are running")

    model, maker = Model(tuple(WEIGHTS)), BucketMaker(SETTINGS, CPU)
    engine = Engine(trainer.invitation, model, once_joined=refuse)
    engine.start()
    engine.join()  # the trainer greets too late: what was said is heard all the same
    with pytest.raises(EngineFailed, match="requests are running"):
        meet(trainer)
        send_all(trainer, maker)
        trainer.wait_until_done(1)
    assert str(engine.error) == "requests are running"
    assert not engine.has_begun
    assert not any(parameter.any() for parameter in model.parameters())


def test_a_session_that_is_aborted_before_its_first_bucket_has_not_begun(
    event: Event, trainer: TrainerSession
) -> None:
    engine = joined(trainer, Model(tuple(WEIGHTS)))
    trainer.abort("another replica failed", None)
    engine.join()
    assert "another replica failed" in str(engine.error)
    assert not engine.has_begun
