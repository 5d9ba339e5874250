"""Both ends of a session's socket in one process: what comes first of two things at once."""

import gc
import socket
import threading
import time

import pytest

from sglang_loader.common.session import channel as session_channel
from sglang_loader.common.session import messages
from sglang_loader.common.session.channel import (
    GRACE_MS,
    engine_end,
    trainer_end,
)
from sglang_loader.common.session.messages import SessionError
from support.settings import settings_of
from verl_sglang_sync.engine.session import SessionSockets, TrainerSession
from verl_sglang_sync.sources.memory_blocks import BlockNames

TOKEN = "t" * 32


class ReplyCame(RuntimeError):
    """Raised by `watch`: the engine has answered the request."""


@pytest.fixture
def ends(new_endpoint):
    """The trainer's and the engine's; one message has passed."""
    endpoint = new_endpoint()
    trainer = trainer_end(endpoint)
    engine = engine_end(endpoint)
    for end in (trainer, engine):
        end.begin(TOKEN, timeout_s=20)
    with trainer, engine:
        engine.send(messages.LoadDone, index=0)
        assert trainer.receive().index == 0
        yield trainer, engine


def test_a_message_after_the_reply_is_received(ends):
    trainer, engine = ends
    late = threading.Timer(0.4, lambda: engine.send(messages.LoadDone, index=1))

    def watch():
        if not late.is_alive():
            late.start()
        raise ReplyCame

    assert trainer.receive(watch=watch).index == 1
    late.join()


def test_a_peer_that_says_nothing_ends_the_wait(ends):
    trainer, _ = ends

    def watch():
        raise ReplyCame

    started = time.monotonic()
    with pytest.raises(ReplyCame):
        trainer.receive(watch=watch)
    assert time.monotonic() - started < GRACE_MS / 1000 + 5


def all_came(end, num_messages):
    """Wait until as many messages lie at this end."""
    deadline = time.monotonic() + 10
    while not end.has_message() or len(end._received) < num_messages:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_abort_overtakes_what_was_sent_before_it(ends):
    trainer, engine = ends
    trainer.send(messages.Welcome)
    trainer.send(messages.Commit, is_last=True)
    trainer.send(messages.Abort, reason="another rank failed")
    all_came(engine, 3)
    kinds = [type(engine.receive()) for _ in range(3)]
    assert kinds == [messages.Abort, messages.Welcome, messages.Commit], "else in order"


def test_of_a_dead_trainer_only_aborts_count(ends):
    trainer, engine = ends
    trainer.send(messages.Commit, is_last=True)
    trainer.send(messages.Abort, reason="another rank failed")
    all_came(engine, 2)
    trainer.close()
    while not engine._is_peer_gone:
        engine._look_at_peer()
    assert engine.receive().reason == "another rank failed"
    with pytest.raises(SessionError, match="is gone"):
        engine.receive()


def test_a_dead_engines_last_message_is_received(ends):
    trainer, engine = ends
    engine.send(messages.Failed, traceback="last words")
    engine.close()
    assert trainer.receive() == messages.Failed(token=TOKEN, traceback="last words")
    with pytest.raises(SessionError, match="the engine's process is gone"):
        trainer.receive()
    with pytest.raises(SessionError, match="Welcome was not sent"):
        trainer.send(messages.Welcome)


def test_silence_ends_after_the_timeout(ends):
    trainer, _ = ends
    trainer.begin(TOKEN, timeout_s=0.3)
    with pytest.raises(SessionError, match=r"no message .* within 0.3 s"):
        trainer.receive()


def test_an_engine_does_not_wait_where_nobody_listens(new_endpoint):
    assert session_channel.CONNECT_TIMEOUT_S <= 5
    endpoint = new_endpoint()
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(endpoint.removeprefix("ipc://"))
        started = time.monotonic()
        with pytest.raises(SessionError, match="nobody listens"):
            engine_end(endpoint)
    assert time.monotonic() - started < 4


def test_an_engine_works_while_it_connects(new_endpoint):
    def fail():
        raise ValueError("it failed")

    calls, endpoint = [], new_endpoint()
    with trainer_end(endpoint) as trainer:
        with pytest.raises(ValueError, match="it failed"):
            engine_end(endpoint, meanwhile=fail)
        while not trainer.is_peer_gone:
            pass
    with trainer_end(endpoint), engine_end(endpoint, meanwhile=lambda: calls.append(1)):
        assert calls == [1]
    endpoint = new_endpoint()
    with pytest.raises(SessionError, match="expected ipc://"):
        engine_end(endpoint, meanwhile=fail)


def test_an_engine_waits_for_no_absent_listener():
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        started = time.monotonic()
        with engine_end(f"tcp://127.0.0.1:{deaf.getsockname()[1]}", is_signed=True) as engine:
            engine.begin(TOKEN, timeout_s=20)
            with pytest.raises(SessionError, match="nobody listens"):
                engine.receive()
    assert time.monotonic() - started < 4


def test_unclosed_channels_do_not_block_others(new_endpoint):
    """zmq's one thread blocks in an event for a monitor that was closed before its socket."""
    gc.freeze()  # only what is made from here on has to be looked at
    for _ in range(20):
        endpoint = new_endpoint()
        trainer = trainer_end(endpoint)
        engine = engine_end(endpoint)
        for end in (trainer, engine):
            end.begin(TOKEN, timeout_s=10)
        engine.send(messages.LoadDone, index=0)
        assert trainer.receive().index == 0
        loop = [trainer, engine]
        loop.append(loop)
        del trainer, engine, end, loop
        gc.collect()
    gc.unfreeze()


def test_an_abandoned_engine_takes_no_others_place(ends):
    """Where a later trainer gets the same port."""
    trainer, left = ends
    trainer.close()
    with pytest.raises(SessionError, match="is gone"):
        left.wait(10)
    with trainer_end(trainer.endpoint) as later:
        later.begin(TOKEN, timeout_s=5)
        time.sleep(0.5)  # a connection that is lost is made anew after 0.1 s
        with engine_end(trainer.endpoint) as engine:
            engine.begin(TOKEN, timeout_s=5)
            engine.send(messages.LoadDone, index=7)
            assert later.receive().index == 7


SETTINGS = settings_of("compiled", request_timeout_s=20.0, manifest_check="off")


HELLO = {"buffers": [], "stored": [], "plan": "", "wants_proof": False}


@pytest.fixture
def invited():
    """A trainer's session, the engine's end of its socket, and the token to begin with."""
    with TrainerSession(SessionSockets(), SETTINGS, BlockNames()) as session:
        descriptor = messages.decode_descriptor(session.descriptor)
        with engine_end(descriptor.endpoint) as engine:
            yield session, engine, descriptor.token


def test_an_engine_joining_after_failure_is_informed(invited):
    session, engine, token = invited
    engine.begin(token, timeout_s=20)
    joins = threading.Timer(0.3, lambda: engine.send(messages.Hello, **HELLO))
    joins.start()
    session.abort("the export failed", lambda: None)
    joins.join()
    assert engine.receive().reason == "the export failed"


def test_an_engine_with_refused_hello_is_informed(invited):
    session, engine, token = invited
    engine.begin("0" * 32, timeout_s=20)
    engine.send(messages.Hello, **HELLO)
    with pytest.raises(SessionError, match="wrong token"):
        session.accept(lambda: None, wait_s=5)
    started = time.monotonic()
    session.abort("the Hello was refused", lambda: None)
    assert time.monotonic() - started < 4
    engine.begin(token, timeout_s=20)
    assert engine.receive().reason == "the Hello was refused"


def test_nobody_is_waited_for_who_was_not_asked(invited):
    session, _, _ = invited
    started = time.monotonic()
    session.abort("the request was never sent", None)
    assert time.monotonic() - started < 4
