"""A whole session in one process: what it takes until an engine serves what was sent."""

import threading
import time
from unittest import mock
from unittest.mock import Mock

import pytest
import torch

from sglang_loader.common.bucket_source import BucketPiece
from sglang_loader.common.rounds import decode_rounds
from sglang_loader.common.session.messages import decode_descriptor
from sglang_loader.common.shared_memory import (
    CpuHandle,
    host_id,
    map_buffer,
    share_on_host,
    share_storage,
)
from sglang_loader.common.weight_map import encode_bases, encode_weight_map
from sglang_loader.session import mapped_memory
from sglang_loader.session import serve as session
from support.settings import settings_of
from unit.serving_engine import ByName
from verl_sglang_sync.engine.engine_ranks import (
    EngineRank,
    KnownEngineRank,
    OpeningRequest,
    wait_for,
)
from verl_sglang_sync.engine.session import (
    BlockNotMapped,
    EngineCannotMap,
    EngineFailed,
    SessionSockets,
    StoredBytes,
    TrainerSession,
)
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.export import ExportedBuckets
from verl_sglang_sync.routes.mapped_delivery import MappedDelivery
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.sources.bucket_cutter import BucketCutter
from verl_sglang_sync.sources.export import Export
from verl_sglang_sync.sources.memory_blocks import BlockNames

CPU = torch.device("cpu")
SETTINGS = settings_of("compiled", bucket_bytes=256, request_timeout_s=10)
WEIGHTS = {name: torch.arange(60.0) + i for i, name in enumerate(("first", "second"))}


def refusing(text):
    return Mock(side_effect=RuntimeError(text))


def model_of(names):
    return ByName([(name, torch.zeros(60)) for name in names])


class Event:
    """Of a device that has done what was launched once it is waited for."""

    waited = False

    def query(self):
        return self.waited


@pytest.fixture
def event(monkeypatch):
    """An engine that launches without waiting, as on a GPU."""
    event = Event()

    def synchronize(device):
        event.waited = True

    monkeypatch.setattr(session, "_when_done", lambda *_, **__: event)
    monkeypatch.setattr(session, "synchronize", synchronize)
    monkeypatch.setattr(session, "engine_context", lambda model: {})
    monkeypatch.setattr(session, "tp_rank", lambda: 0)
    return event


class Engine(threading.Thread):
    """Serves the one session; keeps what it raised.

    Args:
        encoded: the trainer's descriptor.
        model: to be loaded.
        before_join: as in `SessionSteps`.
        after_load: judges what was loaded, before the trainer hears of it.

    Attributes:
        error: what it raised.
        has_begun: the first bucket has come.
        has_served: the session ended well on this rank.
    """

    def __init__(self, encoded, model, before_join=lambda: None, after_load=lambda: None):
        super().__init__()
        self._descriptor, self.model = decode_descriptor(encoded), model
        self._steps = session.SessionSteps(
            before_join=before_join, before_writing=lambda: None, before_loading=self.begin
        )
        self._after_load = after_load
        self.error = None
        self.has_begun = self.has_served = False

    def begin(self, layout):
        self.has_begun = True

    def run(self):
        try:
            self.opened = opened = session.Session(self._descriptor, [self.model], self._steps)
            opened.load()
            try:
                self._after_load()
            except Exception as error:
                opened.conclude([str(error)])
                raise
            opened.await_commit()
        except Exception as error:
            self.error = error
            return
        self.has_served = True
        opened.conclude([])


@pytest.fixture
def trainer():
    with TrainerSession(SessionSockets(), SETTINGS, BlockNames()) as opened:
        yield opened


def joined(trainer, model=None, **options):
    """An engine that serves the model, or one of all weights, and has met the trainer."""
    engine = Engine(trainer.descriptor, model or model_of(WEIGHTS), **options)
    engine.start()
    meet(trainer)
    return engine


def meet(trainer):
    while not trainer.accept(lambda: None, wait_s=0.1):
        pass


@pytest.fixture
def ring():
    """The trainer's buffers, which live until the engine has let go of them."""
    return StagingRing(CPU, num_buffers=2, bucket_bytes=SETTINGS.bucket_bytes)


def wait_until_done(trainer, index):
    """Wait until the engine has read bucket `index`."""
    wait_for([alone(trainer)], lambda session: session.num_done > index, 10)


def wait_until_loaded(trainer):
    """Wait until the engine rank has read all of both buckets."""
    wait_until_done(trainer, 1)
    wait_for([alone(trainer)], lambda session: session.loaded is not None, 10)
    assert trainer.loaded is not None
    return trainer.loaded


def alone(trainer):
    """The engine rank of a session that no request has opened."""
    return EngineRank("", trainer, OpeningRequest(None, None), KnownEngineRank())


def send_all(trainer, ring):
    """Both buckets, and that they are all, without a look at what the engine says."""
    report = SyncReport(mode="compiled", replica=0)
    export, cutter = Export(list(WEIGHTS.items())), BucketCutter(SETTINGS.bucket_bytes)
    delivery = MappedDelivery((), SETTINGS, report)
    buckets = ExportedBuckets(export, cutter, ring, report, delivery=delivery, frees_ring=True)
    for ready in buckets._buckets:
        assert ready.storage is not None
        slot = trainer.map_buffer(ready.storage, keep=True)
        trainer.load(ready.index, ready.bucket, slot)
    assert ready.index == 1
    trainer.finish(num_tensors=2)


def check_not_served(engine, *texts):
    engine.join(20)
    assert not engine.is_alive()
    assert not engine.has_served
    for text in texts:
        assert text in str(engine.error)


def test_what_was_committed_is_published(event, trainer, ring):
    engine = joined(trainer)
    send_all(trainer, ring)
    wait_until_done(trainer, 1)
    assert event.waited, "told to be done while the device was at it"
    outcome = wait_until_loaded(trainer)
    trainer.commit(lambda: None, is_last=True)
    trainer.wait_until_published()
    engine.join()
    assert engine.error is None
    assert engine.has_begun
    assert engine.has_served
    assert outcome.num_replayed + outcome.num_eager == 2
    assert not trainer._channel.has_message(), "the next session would read it"
    for name, tensor in WEIGHTS.items():
        assert torch.equal(engine.model.get_parameter(name).detach(), tensor)


@pytest.mark.parametrize("fails", [False, True])
def test_tp_ranks_agree_while_the_device_copies(event, trainer, ring, fails):
    """After a failure of another rank the device is waited for before memory is unmapped."""
    waited, unmap = [], mapped_memory.MappedMemory.release

    def after_load():
        waited.append(event.waited)
        assert not fails, "another TP rank has failed"

    def note_and_unmap(mapped):
        waited.append(event.waited)
        unmap(mapped)

    engine = joined(trainer, after_load=after_load)
    with mock.patch.object(mapped_memory.MappedMemory, "release", note_and_unmap):
        send_all(trainer, ring)
        if not fails:
            wait_until_loaded(trainer)
            trainer.commit(lambda: None, is_last=True)
        engine.join(20)
    assert waited[:2] == [False, True]
    assert engine.has_served != fails


@pytest.mark.parametrize("has_committed", [False, True])
@pytest.mark.parametrize("then", ["aborts", "dies", "nothing"])
def test_only_committed_sessions_are_served(event, trainer, ring, has_committed, then):
    """Also by an engine that was held up: all that its commit takes lies in its socket."""
    held_up = threading.Event()
    model = model_of(WEIGHTS)
    load_weights = model.load_weights

    def load_late(weights):
        assert held_up.wait(20)
        load_weights(weights)

    model.load_weights = load_late
    engine = joined(trainer, model)
    send_all(trainer, ring)
    if has_committed:
        trainer.commit(lambda: None, is_last=True)
    else:
        held_up.set()
        wait_until_loaded(trainer)
        engine.join(0.3)
        assert engine.is_alive() and not engine.has_served
    if then == "aborts":
        trainer.abort("given up", None)
    elif then == "dies":
        trainer._channel.close()
    elif not has_committed:
        trainer.commit(lambda: None, is_last=True)
    time.sleep(0.3)
    held_up.set()
    if then == "nothing":
        engine.join(20)
        assert engine.has_served
    else:
        check_not_served(
            engine, "given up" if then == "aborts" else "the trainer's process is gone"
        )


def test_a_session_failed_at_commit_may_conclude(event, trainer, ring):
    """As for the other TP ranks, which loaded and learn of it."""
    engine = joined(trainer)
    send_all(trainer, ring)
    wait_until_loaded(trainer)
    trainer._channel.close()
    check_not_served(engine, "the trainer's process is gone")
    engine.opened.conclude(["TP rank 0: the trainer's process is gone"])


@pytest.mark.parametrize(
    ("known", "after_load", "reason"),
    [
        (("first",), None, "second"),
        (("third",), None, "first"),
        (WEIGHTS, refusing("1 missing: third"), "1 missing: third"),
    ],
    ids=["the last bucket", "the first", "what was loaded"],
)
def test_a_late_refusal_of_an_engine_counts(event, trainer, ring, known, after_load, reason):
    engine = joined(trainer, model_of(known), after_load=after_load or (lambda: None))
    with pytest.raises(EngineFailed, match=reason):
        send_all(trainer, ring)
        wait_until_loaded(trainer)
    check_not_served(engine)
    assert event.waited, "unmapped while the device may read what it was launched for"


def test_a_failed_preparation_ends_the_session_first(event, trainer, ring):
    refuse = refusing("requests are running")
    engine = Engine(trainer.descriptor, model_of(WEIGHTS), before_join=refuse)
    engine.start()
    engine.join()  # the trainer greets too late: what was said is heard all the same
    with pytest.raises(EngineFailed, match="requests are running"):
        meet(trainer)
        send_all(trainer, ring)
        wait_until_done(trainer, 1)
    check_not_served(engine, "requests are running")
    assert not engine.has_begun
    assert not any(parameter.any() for parameter in engine.model.parameters())


@pytest.mark.parametrize("ended", ["well", "badly"])
def test_a_repeated_request_is_refused_at_once(event, ring, ended):
    """The trainer's next session hears nothing of it."""
    sockets, model = SessionSockets(), model_of(WEIGHTS)
    with TrainerSession(sockets, SETTINGS, BlockNames()) as trainer:
        engine = joined(trainer, model)
        if ended == "well":
            serve_whole(trainer, ring, engine)
        else:
            with pytest.raises(BlockNotMapped, match="block used"):
                trainer.map_blocks(["used"], {}, keep=True)
            trainer.abort("not mapped", None)
            check_not_served(engine, "not mapped")
            assert not engine.has_begun
    started = time.monotonic()
    again = Engine(trainer.descriptor, model)
    again.start()
    check_not_served(again, "the same request has come before: it is not executed again")
    assert time.monotonic() - started < 4
    assert not again.has_begun
    with TrainerSession(sockets, SETTINGS, BlockNames()) as following:
        engine = joined(following, model)
        serve_whole(following, ring, engine)


def serve_whole(trainer, ring, engine):
    """A session that ends well."""
    send_all(trainer, ring)
    wait_until_loaded(trainer)
    trainer.commit(lambda: None, is_last=True)
    trainer.wait_until_published()
    engine.join(20)
    assert engine.has_served


NBYTES = 4096
BY_TABLE = {"host": host_id(), "num_ranks": 1, "round_bytes": 1024, "rounds": ""}


def in_one_block():
    """The map and the bases of a sync whose bytes all lie in one block."""
    report = SyncReport(mode="compiled", replica=0)
    [batch] = BucketCutter(1 << 20).batches(list(WEIGHTS.items()), report)
    piece = BucketPiece(0, 0, 0, batch.bucket.layout.nbytes)
    assert piece.nbytes <= NBYTES
    weight_map = encode_weight_map([NBYTES], [(batch.bucket.encoded, [piece])])
    return StoredBytes.of(weight_map), StoredBytes.of(encode_bases([(0, 0)]))


def test_unmappable_memory_is_an_error_of_its_own(event, trainer):
    engine = joined(trainer)
    gone = CpuHandle(nbytes=64, name="/torch_nobody_has_this")
    trainer.map_blocks(["gone"], {"gone": gone}, keep=True)
    trainer.load_shards(*in_one_block(), **BY_TABLE)
    with pytest.raises(EngineCannotMap, match="64 bytes of the CPU cannot be mapped"):
        wait_until_done(trainer, 0)
    check_not_served(engine, "cannot be mapped")
    assert not engine.has_begun


def test_every_handle_of_mapped_memory_is_used(event, monkeypatch):
    """torch frees memory of a GPU only when the receiver of each handle has had it and let go."""
    sockets, model, used = SessionSockets(), model_of(WEIGHTS), []

    def map_used(handle, device):
        used.append(handle)
        return map_buffer(handle, device)

    monkeypatch.setattr(mapped_memory, "map_buffer", map_used)
    memory = share_on_host(torch.zeros(NBYTES, dtype=torch.uint8)).untyped_storage()
    handle = share_storage(memory)
    for number in (1, 2, 3):
        with TrainerSession(sockets, SETTINGS, BlockNames()) as trainer:
            engine = joined(trainer, model)
            trainer.map_blocks(["here"], {"here": handle} if number < 3 else {}, keep=number < 3)
            # An engine rank that maps all shards reports that it lists no round, if asked.
            is_asked = number == 2
            by_table = {**BY_TABLE, "rounds": "" if is_asked else None}
            trainer.load_shards(*in_one_block(), **by_table)
            trainer.finish(num_tensors=2)
            wait_for([alone(trainer)], lambda session: session.loaded is not None, 10)
            listed = None if trainer.rounds is None else decode_rounds(trainer.rounds.data, 1)
            assert listed == ([] if is_asked else None)
            trainer.commit(lambda: None, is_last=True)
            trainer.wait_until_published()
            engine.join(20)
        assert engine.has_served
        assert used == [handle] * min(number, 2)


WRONG_ORDERS = {  # what is announced as which of the two buckets, how many of what, what is said
    "starts late": ([(1, 1)], (1, 1), "got LoadBucket 1, expected load 0"),
    "gap": ([(0, 0), (2, 1)], (2, 2), "got LoadBucket 2, expected load 1"),
    "repeat": ([(0, 0), (0, 0)], (2, 2), "got LoadBucket 0, expected load 1"),
    "tensors lost": ([(0, 0), (1, 1)], (2, 3), "2 tensors in 2 loads came, the trainer sent 3"),
    "buckets lost": ([(0, 0)], (2, 2), "1 tensors in 1 loads came, the trainer sent 2 in 2"),
    "nothing": ([], (0, 0), "the trainer sent no tensor"),
    "a tensor twice": ([(0, 0), (1, 0)], (2, 2), "tensors came more than once: first"),
}


@pytest.mark.parametrize(("sent", "counts", "reason"), WRONG_ORDERS.values(), ids=WRONG_ORDERS)
def test_buckets_and_tensors_come_once_in_order(event, trainer, ring, sent, counts, reason):
    engine = joined(trainer)
    report = SyncReport(mode="compiled", replica=0)
    batches = BucketCutter(SETTINGS.bucket_bytes).batches(Export(list(WEIGHTS.items())), report)
    packed = [(batch.bucket, ring.pack(batch)) for batch in batches]
    with pytest.raises(EngineFailed, match=reason):
        for index, which in sent:
            bucket, storage = packed[which]
            slot = trainer.map_buffer(storage, keep=True)
            trainer.load(index, bucket, slot)
        trainer.num_loads = counts[0]
        trainer.finish(num_tensors=counts[1])
        wait_until_done(trainer, len(sent))
    check_not_served(engine, reason)
