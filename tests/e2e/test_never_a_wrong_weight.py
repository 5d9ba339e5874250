"""Whatever breaks off, stalls or lies: the engine serves exactly one published version, or nothing.

The trainer has one rank, in this process. Each test first brings the engine to a state of its own
by good syncs, so that they can run in any order, or alone.
"""

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil
import pytest

from sglang_loader.common.engine_settings import STALE_REQUESTS_VARIABLE
from sglang_loader.common.session.messages import SESSION_FORMAT
from support.engine_loaders import STOP_LOADER
from support.exports import KeptExport, calling_at, doubled
from support.http_requests import paused_generation, post, status_of_request
from support.served import served
from support.storm_checks import Stream, num_equal
from support.trainer import sync_error

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MARGIN_S = 6.0
"""For a machine that is busy, beyond each limit."""


@pytest.fixture(scope="module")
def engine(request, tmp_path_factory):
    """A real server; its parameter is what it does with stale requests."""
    options = {"loaders": (STOP_LOADER,), "variables": {STALE_REQUESTS_VARIABLE: request.param}}
    with served(tmp_path_factory.mktemp("hostile"), **options) as engine:
        yield engine


@pytest.fixture
def trainer(engine):
    """A new one for each test."""
    return engine.trainer()


refusing = pytest.mark.parametrize("engine", ["0"], indirect=True)
waiting = pytest.mark.parametrize("engine", ["120"], indirect=True)

# The trainer gives up while the engine is stopped.

GIVEN_UP_AFTER_S = 5.0
"""Limit of a request, and of a session's silence, where the engine is stopped."""
JOINS_WITHIN_S = 2.0
"""In which an engine joins a session on a busy machine; less than `GIVEN_UP_AFTER_S`."""
SETTLES_WITHIN_S = 5.0
"""In which a continued engine works off what had been sent to it."""
GARBAGE = 7.0


@refusing
@pytest.mark.parametrize(
    ("mode", "settings", "stops_in_load"),
    [
        ("compiled", {}, False),
        ("compiled", {"prove_every_n_syncs": 1, "routes": ["exchange"]}, True),
        ("flattened", {}, True),
    ],
    ids=("in place, without export", "staged, and loaded eagerly too", "flattened"),
)
def test_a_sync_abandoned_by_trainer_is_never_published(
    engine, trainer, mode, settings, stops_in_load
):
    """The scheduler stops when it has joined, or in the model's `load_weights`, and goes on when
    the trainer has raised, and its tensors are garbage."""
    trainer.use_client(engine.url, timeout_s=GIVEN_UP_AFTER_S)
    manager = trainer.manager(mode, timeout_s=GIVEN_UP_AFTER_S, bucket_bytes=1 << 20, **settings)
    export, (pid,) = KeptExport(trainer.weights()), engine.schedulers
    weights, hashes = export.reexport(), {}
    sources = weights.sources

    def stop():
        """When the trainer looks where its tensors are."""
        weights.sources = sources
        time.sleep(JOINS_WITHIN_S)
        os.kill(pid, signal.SIGSTOP)
        return sources()

    for scale in (0.5, 2.0, 1.0):
        export.write(trainer.weights(scale))
        assert sync_error(manager, weights, "good") is None
        hashes[scale] = engine.hashes()
    export.write(trainer.weights(0.25))
    if stops_in_load:
        engine.ask(STOP_LOADER)
    else:
        weights.sources = stop
    try:
        assert sync_error(manager, weights, "given up") is not None
        assert psutil.Process(pid).status() == "stopped"
        for tensor in export.state.values():
            tensor.fill_(GARBAGE)
    finally:
        os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + SETTLES_WITHIN_S
    while time.monotonic() < deadline:
        assert engine.version == "good", "what was given up was published"
        time.sleep(0.1)
    if (status := status_of_request(engine.url)) == 200:
        assert engine.hashes() == hashes[1.0], "what is served was never published"
    else:
        assert status == 503
    export.write(trainer.weights(0.5))
    assert sync_error(manager, weights, "next") is None
    assert (engine.version, status_of_request(engine.url)) == ("next", 200)
    assert engine.hashes() == hashes[0.5]


# Updates that are refused, and syncs while requests are streamed.

NUM_SYNCS = 10
STREAMED_TOKENS = 120
STREAMS_START_WITHIN_S = 0.5
PROMPTS = ("One", "It was a night of two moons", "def main():", "7 8 9 10 11 12 13 14 15 16 17 18")


@waiting
@pytest.mark.parametrize(("mode", "refusal"), [("flattened", "rubbish"), ("compiled", "running")])
def test_a_refused_update_mixes_no_versions(engine, trainer, mode, refusal):
    """Streams without a break while ten syncs come; what was refused has touched nothing."""
    manager = trainer.manager(mode)
    weights = [trainer.weights(scale) for scale in (0.5, 1.0)]
    versions = []
    for named in weights:
        assert sync_error(manager, named) is None
        versions.append({prompt: ask(engine.url, prompt).tokens for prompt in PROMPTS})
    half, whole = versions
    assert all(num_equal(half[prompt], whole[prompt]) < STREAMED_TOKENS for prompt in PROMPTS)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        for stream in pool.map(partial(ask, engine.url), PROMPTS):
            stream.check([whole])  # whatever else runs
    if refusal == "running":
        with paused_generation(engine.url, 300):  # for which no session can wait
            error = sync_error(trainer.manager("compiled"), weights[1], "refused")
        assert error is not None and "requests" in error, error
    with streams(engine.url) as answers:
        for i in range(NUM_SYNCS):
            if refusal == "rubbish":  # refused before it touches anything
                rubbish = {"serialized_named_tensors": ["AAAA"], "load_format": SESSION_FORMAT}
                assert post(engine.url, "update_weights_from_tensor", rubbish).status == 400
            time.sleep(STREAMS_START_WITHIN_S)
            assert sync_error(manager, weights[i % 2], f"{i}") is None
    for stream in answers:
        stream.check(versions)
        assert stream.is_whole, stream
    for version in versions:
        is_seen = (num_equal(each.tokens, version[each.prompt]) for each in answers)
        assert STREAMED_TOKENS in is_seen


@contextlib.contextmanager
def streams(url):
    """One stream after the other for each prompt."""
    answers = []
    is_over = threading.Event()

    def run(prompt):
        while not is_over.is_set():
            answers.append(ask(url, prompt))

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        for prompt in PROMPTS:
            pool.submit(run, prompt)
        try:
            yield answers
        finally:
            is_over.set()


def ask(url, prompt):
    """A stream that has ended."""
    stream = Stream(url, prompt, STREAMED_TOKENS)
    stream.start()
    stream.join()
    return stream


# Exports that break off, grow, or say something twice.

BREAKS_AT = 10


@refusing
@pytest.mark.parametrize("num_tensors", [0, 2])
@pytest.mark.parametrize(("mode", "how"), [("flattened", "raises"), ("compiled", "doubles")])
def test_a_broken_sync_is_never_served(engine, trainer, mode, how, num_tensors):
    """Not one of a part of the tensors alone."""
    manager = trainer.manager(mode, manifest_check="off", bucket_bytes=1 << 12)
    whole, others = trainer.weights(), trainer.weights(0.5)

    def fail():
        raise RuntimeError("the export broke off")

    broken = calling_at(others, BREAKS_AT, fail)
    if how == "doubles":
        broken = iter(doubled(others, others[BREAKS_AT][0]))
    assert sync_error(manager, iter(whole), "before") is None
    before = engine.hashes()
    assert sync_error(manager, broken, "broken") is not None
    assert engine.hashes() != before, "it broke off too early"
    assert (status_of_request(engine.url), engine.version) == (503, "before")
    sync_error(manager, iter(others[:num_tensors]), "part")
    assert (status_of_request(engine.url), engine.version) == (503, "before")
    assert sync_error(manager, iter(whole), "whole") is None
    assert (status_of_request(engine.url), engine.version) == (200, "whole")
    assert engine.hashes() == before
