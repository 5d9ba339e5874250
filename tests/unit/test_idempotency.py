"""Updates with a key run at most once and in order, whatever the order in which requests arrive."""

import asyncio
import contextlib
import json
import socket
from dataclasses import dataclass

import aiohttp
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_loader.common.update_keys import (
    KEY_HEADER,
    KEYED_PATHS,
    REPLAYED_HEADER,
    SUPPORTED_HEADER,
    UpdateKey,
    UpdateKeys,
)
from sglang_loader.hooks.idempotency import IdempotencyMiddleware, install
from sglang_loader.hooks.update_record import MAX_PAST_SYNCS, KeyConflict, Reply, UpdateRecord

PATH = KEYED_PATHS[0]
OK, FAILED = Reply(200, (), b""), Reply(400, (), b"")


@dataclass(frozen=True)
class Attempt:
    """One request: its key, its body and how long its parts take, in turns of the event loop.

    Attributes:
        is_cut: the client leaves before the body's end.
        fails: the update would fail.
    """

    sync: str
    sequence: int
    body: int = 0
    starts: int = 0
    sends: int = 0
    runs: int = 0
    is_cut: bool = False
    fails: bool = False

    @property
    def key(self):
        return UpdateKey(self.sync * 8, self.sequence)


async def turns(number):
    for _ in range(number):
        await asyncio.sleep(0)


class Engine:
    """The application: takes the body, then applies the update; logs both ends."""

    def __init__(self):
        self.log = []  # ("begin" | "end", sync, sequence, body, fails)
        self.attempts = {}

    async def __call__(self, scope, receive, send):
        attempt = scope["attempt"]
        content = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            content += message["body"]
            if not message["more_body"]:
                break
        event = (attempt.sync, attempt.sequence, int(content), attempt.fails)
        self.log.append(("begin", *event))
        await turns(attempt.runs)
        self.log.append(("end", *event))
        status = 400 if attempt.fails else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": content})


async def post(app, attempt):
    """Status and content of the reply, None if there was none."""
    parts = [
        {"type": "http.request", "body": b"1", "more_body": True},
        {"type": "http.request", "body": b"%d" % attempt.body, "more_body": False},
    ]
    if attempt.is_cut:
        parts[1] = {"type": "http.disconnect"}
    sent = []

    async def receive():
        if len(parts) == 1:
            await turns(attempt.sends)
        return parts.pop(0) if parts else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    headers = [(KEY_HEADER.lower().encode(), attempt.key.header.encode())]
    scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers}
    await turns(attempt.starts)
    await app({**scope, "attempt": attempt}, receive, send)
    return (sent[0]["status"], sent[1]["body"]) if sent else None


def run(app, attempts):
    async def main():
        return await asyncio.gather(*(post(app, attempt) for attempt in attempts))

    return asyncio.run(main())


def violations(log):
    """What is wrong with the order in which an engine applied updates."""
    found, done, failed, running, current, past = [], {}, set(), {}, None, set()
    for event, sync, sequence, _, fails in log:
        if event == "end":
            running.pop(sync)
            failed |= {sync} if fails else set()
            continue
        if sync in running:
            found.append(f"{sync}{sequence} while {sync}{running[sync]} runs")
        if sequence != done.get(sync, -1) + 1:
            found.append(f"{sync}{sequence} after {sync}{done.get(sync)}")
        if sync in failed:
            found.append(f"{sync}{sequence} after a failure")
        if sync in past:
            found.append(f"{sync}{sequence} of a sync that is over")
        if current not in (None, sync):
            past.add(current)
        current, done[sync], running[sync] = sync, sequence, sequence
    return found


small = st.integers(0, 6)
attempts = st.builds(
    Attempt,
    sync=st.sampled_from("ab"),
    sequence=st.integers(0, 3),
    body=st.sampled_from((0, 0, 0, 1)),
    starts=st.integers(0, 30),
    sends=small,
    runs=small,
    is_cut=st.sampled_from((False, False, False, True)),
    fails=st.sampled_from((False, False, False, False, True)),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(attempts, max_size=16))
@example([Attempt("a", 0), Attempt("a", 0, starts=1, runs=3), Attempt("a", 1, starts=9)])
@example([Attempt("a", 0, sends=5), Attempt("a", 0, sends=1, runs=9)])  # the second is faster
@example([Attempt("a", 0, is_cut=True), Attempt("a", 0, starts=3)])
def test_each_update_is_applied_at_most_once_and_in_order(requests):
    engine = Engine()
    replies = run(IdempotencyMiddleware(engine), requests)
    assert violations(engine.log) == []
    applied = {
        (sync, sequence): (400 if fails else 200, body)
        for event, sync, sequence, body, fails in engine.log
        if event == "end"
    }
    for request, reply in zip(requests, replies, strict=True):
        if request.is_cut and reply is None:
            continue
        status, content = reply
        if status not in (409, 422):  # then it is the reply of the one that ran, with this body
            assert applied[request.sync, request.sequence] == (status, int(content))
            assert request.is_cut or int(content) == 10 + request.body


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=4, max_size=4), st.integers(0, 5))
def test_a_sync_whose_requests_are_all_repeated_is_applied_whole(repeats, runs):
    """The client's own order: the next update only after the reply to the one before."""
    engine = Engine()

    async def main():
        app = IdempotencyMiddleware(engine)
        for sequence, number in enumerate(repeats):
            same = [Attempt("a", sequence, starts=i, runs=runs) for i in range(number + 1)]
            assert set(await asyncio.gather(*(post(app, a) for a in same))) == {(200, b"10")}

    asyncio.run(main())
    assert [entry[2] for entry in engine.log if entry[0] == "begin"] == [0, 1, 2, 3]


def test_the_check_of_the_order_sees_an_application_without_the_middleware():
    engine = Engine()
    run(engine, [Attempt("a", 0), Attempt("a", 0, starts=5), Attempt("a", 2, starts=9)])
    assert violations(engine.log) == ["a0 after a0", "a2 after a0"]


# The record.


def test_what_is_refused_and_why():
    record = UpdateRecord()
    with pytest.raises(KeyConflict, match="of which this server has seen none"):
        record.find(UpdateKey("a", 1))
    entry = record.begin(UpdateKey("a", 0), b"")
    with pytest.raises(KeyConflict, match="update 0 of sync a is still running"):
        record.find(UpdateKey("a", 1))
    with pytest.raises(KeyConflict, match="expected 1, or a repetition of 0"):
        record.find(UpdateKey("a", 2))
    assert record.find(UpdateKey("a", 0)) is entry
    entry.finish(FAILED)
    with pytest.raises(KeyConflict, match="update 0 of sync a failed: start a new sync"):
        record.find(UpdateKey("a", 1))
    assert record.find(UpdateKey("b", 0)) is None
    record.begin(UpdateKey("b", 0), b"").finish(OK)
    with pytest.raises(KeyConflict, match="sync a is over"):
        record.find(UpdateKey("a", 0))
    assert record.find(UpdateKey("b", 1)) is None


def test_the_record_is_bounded():
    record = UpdateRecord()
    for i in range(MAX_PAST_SYNCS + 10):
        record.begin(UpdateKey(f"sync{i}", 0), b"").finish(OK)
    assert len(record._past) == MAX_PAST_SYNCS
    with pytest.raises(KeyConflict):
        record.find(UpdateKey("sync100", 0))


def test_keys_name_a_sync_and_count():
    keys, others = UpdateKeys(), UpdateKeys()
    drawn = [next(keys) for _ in range(3)]
    assert [key.sequence for key in drawn] == [0, 1, 2]
    assert len({key.sync_id for key in drawn}) == 1
    assert drawn[0].sync_id != next(others).sync_id
    assert [UpdateKey.parse(key.header) for key in drawn] == drawn


@pytest.mark.parametrize(
    "header", ("", "abcdefgh/1", '"abcdefgh"', '"abcdefgh/-1"', '"abcdefgh/01"', '"a b c d e/1"')
)
def test_a_malformed_key_is_refused(header):
    with pytest.raises(ValueError, match="expected "):
        UpdateKey.parse(header)


# A FastAPI application, as SGLang's, on a real server.


class Counter:
    """Counts what it applied; an update takes `seconds`."""

    def __init__(self):
        self.applied, self.seconds = [], 0.0
        self.app = FastAPI()
        self.app.add_api_route(PATH, self.update, methods=["POST"])
        self.app.add_api_route("/other", self.update, methods=["POST"])

    async def update(self, request: Request) -> JSONResponse:
        body = await request.json()
        await asyncio.sleep(self.seconds)
        self.applied.append(body["n"])
        if body["n"] == "raise":
            raise RuntimeError("broken")
        return JSONResponse({"success": True, "message": f"number {len(self.applied)}"})


@contextlib.asynccontextmanager
async def served(counter):
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(counter.app, log_level="critical", lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    connector = aiohttp.TCPConnector(force_close=True)  # uvicorn closes them after an exception
    async with aiohttp.ClientSession(url, connector=connector) as session:
        while not server.started:
            await asyncio.sleep(0.01)
        yield session
    server.should_exit = True
    await task


async def send(session, key, n, *, path=PATH, timeout_s=10.0):
    headers = {} if key is None else {KEY_HEADER: key if isinstance(key, str) else key.header}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with session.post(path, json={"n": n}, headers=headers, timeout=timeout) as reply:
        return reply.status, await reply.text(), reply.headers


def test_a_repetition_gets_the_same_reply():
    counter, keys = Counter(), UpdateKeys()
    install(counter.app)
    install(counter.app)
    assert len(counter.app.user_middleware) == 1

    async def main():
        key = next(keys)
        async with served(counter) as session:
            first, second = [await send(session, key, "x" * 300_000) for _ in range(2)]
            assert first[:2] == second[:2] == (200, '{"success":true,"message":"number 1"}')
            assert (first[2][REPLAYED_HEADER], second[2][REPLAYED_HEADER]) == ("false", "true")
            assert first[2][SUPPORTED_HEADER] == "true"
            status, text, _ = await send(session, key, "y")
            assert (status, "with another body" in text) == (422, True)
            assert (await send(session, "no-key", "z"))[0] == 400
            assert (await send(session, next(keys), "last"))[0] == 200
            assert (await send(session, key, "x" * 300_000))[0] == 409

    asyncio.run(main())
    assert [len(n) for n in counter.applied] == [300_000, 4]


def test_an_update_runs_on_when_its_client_is_gone_and_the_repetition_waits_for_it():
    counter, key = Counter(), next(UpdateKeys())
    install(counter.app)
    counter.seconds = 0.6

    async def main():
        async with served(counter) as session:
            with pytest.raises(TimeoutError):
                await send(session, key, "once", timeout_s=0.2)
            assert counter.applied == []
            status, text, headers = await send(session, key, "once")
            assert (status, json.loads(text)["message"]) == (200, "number 1")
            assert headers[REPLAYED_HEADER] == "true"

    asyncio.run(main())
    assert counter.applied == ["once"]


def test_an_update_that_raises_is_not_run_again():
    counter, key = Counter(), next(UpdateKeys())
    install(counter.app)

    async def main():
        async with served(counter) as session:
            first, second = [await send(session, key, "raise") for _ in range(2)]
            assert (first[0], second[0]) == (500, 500)
            assert "the update raised an exception" in second[1]

    asyncio.run(main())
    assert counter.applied == ["raise"]


def test_without_a_key_nothing_changes():
    """Also the negative control: a repetition without a key is applied twice."""
    counter = Counter()
    install(counter.app)

    async def main():
        async with served(counter) as session:
            first, second = [await send(session, None, "again") for _ in range(2)]
            assert SUPPORTED_HEADER not in first[2]
            assert second[1].endswith('"number 2"}')
            for _ in range(2):  # elsewhere a key means nothing
                assert (
                    SUPPORTED_HEADER
                    not in (await send(session, UpdateKey("abcdefgh", 7), "other", path="/other"))[
                        2
                    ]
                )

    asyncio.run(main())
    assert counter.applied == ["again"] * 2 + ["other"] * 2


@pytest.mark.parametrize("is_installed", (True, False))
def test_a_client_can_ask(is_installed):
    counter = Counter()
    if is_installed:
        install(counter.app)

    async def main():
        async with served(counter) as session:
            headers = {KEY_HEADER: next(UpdateKeys()).header}
            async with session.options(PATH, headers=headers) as reply:
                return reply.status, SUPPORTED_HEADER in reply.headers

    assert asyncio.run(main()) == ((204, True) if is_installed else (405, False))
