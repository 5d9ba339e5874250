"""The client against real servers on this host: what it sends, and how each failure is named."""

import asyncio
import contextlib
import pickle
import re
import socket

import pytest
from aiohttp import web
from ray.exceptions import RayTaskError

from support.hosts import loopback
from support.router import serving
from verl_sglang_sync.engine.server_client import client, operations
from verl_sglang_sync.engine.server_client.client import (
    ATTEMPTS,
    CONNECT_ATTEMPTS,
    SGLangServerClient,
)
from verl_sglang_sync.engine.server_client.errors import (
    NotAuthorized,
    ReplyLost,
    RequestFailed,
    ServerError,
    ServerUnreachable,
)

SUCCESS = '{"success": true, "message": "Success"}'


class Server:
    """Answers with `status` and `text`, the first `num_slow` times only after `delay_s`."""

    def __init__(self, *, status=200, text=SUCCESS, delay_s=0.0, num_slow=99):
        self.status, self.text = status, text
        self.delay_s, self.num_slow = delay_s, num_slow
        self.requests = []
        self.url = ""

    def application(self):
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{endpoint}", self.answer)
        return application

    async def answer(self, request):
        payload = await request.json() if request.can_read_body else None
        self.requests.append((request.method, request.path_qs, dict(request.headers), payload))
        if len(self.requests) <= self.num_slow:
            await asyncio.sleep(self.delay_s)
        return web.Response(status=self.status, text=self.text)

    @property
    def only_request(self):
        (request,) = self.requests
        return request


def talk(server, call, *, timeout_s=5.0, host="127.0.0.1", base="{url}", **access):
    async def main():
        async with serving(server, host):
            url = base.format(url=server.url)
            client = SGLangServerClient(url, timeout_s=timeout_s, **access)
            return await asyncio.to_thread(client.run, call)

    return asyncio.run(main())


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(autouse=True)
def short_retry_delay(monkeypatch):
    monkeypatch.setattr(client, "RETRY_DELAY_S", 0.05)


GROUP = {
    "master_address": "::1",
    "master_port": 29500,
    "rank_offset": 1,
    "world_size": 3,
    "group_name": "weights",
    "backend": "gloo",
}
ADMIN, NORMAL = "admin", "normal"


UPDATE = operations.update_weights([b"abc"], load_format="a.b")
RELEASE = operations.release_memory(["weights"])
INIT_GROUP = operations.init_update_group(**GROUP)
DESTROY_GROUP = operations.destroy_update_group("weights")

CALLS = {
    "release": (
        operations.release_memory(("kv_cache", "weights")),
        ("POST", "/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, ADMIN),
    ),
    "resume": (
        operations.resume_memory(["weights"]),
        ("POST", "/resume_memory_occupation", {"tags": ["weights"]}, ADMIN),
    ),
    "update": (
        operations.update_weights(
            [b"\x00\xff\n", b""], load_format="a.b", flush_cache=True, weight_version="17"
        ),
        (
            "POST",
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": ["AP8K", ""],
                "load_format": "a.b",
                "flush_cache": True,
                "weight_version": "17",
            },
            ADMIN,
        ),
    ),
    "init group": (INIT_GROUP, ("POST", "/init_weights_update_group", GROUP, ADMIN)),
    "destroy group": (
        DESTROY_GROUP,
        ("POST", "/destroy_weights_update_group", {"group_name": "weights"}, ADMIN),
    ),
    "model info": (operations.model_info(), ("GET", "/model_info", None, NORMAL)),
}


@pytest.mark.parametrize(("call", "sent"), CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize(
    ("keys", "tokens"),
    [
        ({}, {ADMIN: None, NORMAL: None}),
        ({"api_key": "k"}, {ADMIN: "Bearer k", NORMAL: "Bearer k"}),
        ({"admin_api_key": "a"}, {ADMIN: "Bearer a", NORMAL: None}),
        ({"api_key": "k", "admin_api_key": "a"}, {ADMIN: "Bearer a", NORMAL: "Bearer k"}),
    ],
    ids=("none", "api key", "admin key", "both"),
)
def test_each_endpoint_gets_its_payload_and_key(call, sent, keys, tokens):
    """By SGLang's own decision: what we send is let in, and nothing is sent where none is wanted.

    Negative control: with the other key, or none, SGLang's decision is no.
    """
    from sglang.srt.utils.auth import AuthLevel, decide_request_auth

    server = Server()
    talk(server, call, **keys)
    method, path, headers, payload = server.only_request
    assert (method, path, payload) == sent[:3]
    assert headers.get("Authorization") == tokens[sent[3]]

    def is_let_in(token):
        level = AuthLevel.ADMIN_OPTIONAL if sent[3] == ADMIN else AuthLevel.NORMAL
        return decide_request_auth(
            method=method,
            path=path,
            authorization_header=token,
            api_key=keys.get("api_key"),
            admin_api_key=keys.get("admin_api_key"),
            auth_level=level,
        ).allowed

    assert is_let_in(headers.get("Authorization"))
    if tokens[sent[3]] is not None and path != "/health":
        assert not is_let_in("Bearer wrong")
        assert not is_let_in(None)


def test_an_ipv6_server():
    if loopback() != "::1":
        pytest.skip("this host has no IPv6 loopback")
    server = Server()
    talk(server, RELEASE, host="::1", base="{url}/")  # the slash does no harm
    assert server.url.startswith("http://[::1]:")
    assert server.only_request[1] == "/release_memory_occupation"


# Failures that the server tells.


@pytest.mark.parametrize("status", (400, 404, 409, 422, 500, 503))
def test_a_refusal_names_endpoint_status_and_message(status):
    server = Server(status=status, text='{"success": false, "message": "TP rank 1: no such layer"}')
    with pytest.raises(RequestFailed) as error:
        talk(server, UPDATE, rank=4, replica=2)
    assert str(error.value) == (
        f"rank 4, replica 2: {server.url}/update_weights_from_tensor: HTTP {status}: "
        '{"success": false, "message": "TP rank 1: no such layer"}'
    )
    assert error.value.endpoint == f"{server.url}/update_weights_from_tensor"
    assert (error.value.status, error.value.rank, error.value.replica) == (status, 4, 2)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", (401, 403))
@pytest.mark.parametrize("call", (UPDATE, RELEASE), ids=("update", "release"))
def test_a_wrong_key_is_named_at_once(status, call):
    server = Server(status=status, text='{"error": "Unauthorized"}')
    with pytest.raises(NotAuthorized, match=rf": HTTP {status}: the server refused the admin_api"):
        talk(server, call)
    assert len(server.requests) == 1


@pytest.mark.parametrize("text", ('{"success": false, "message": "no"}', "{}", "null", "done", ""))
def test_an_update_succeeds_only_by_its_reply(text):
    server = Server(text=text)
    with pytest.raises(RequestFailed, match="/update_weights_from_tensor: HTTP 200: "):
        talk(server, UPDATE)
    with pytest.raises(RequestFailed, match="/init_weights_update_group: HTTP 200: "):
        talk(server, INIT_GROUP)


@pytest.mark.parametrize("text", ("null", "", "Cache flushed.\n", '{"status": "ok"}'))
def test_other_operations_succeed_by_status(text):
    talk(Server(text=text), RELEASE)


def test_a_long_message_is_cut():
    with pytest.raises(ServerError) as error:
        talk(Server(status=500, text="x" * 100_000), RELEASE)
    assert len(str(error.value)) < 4200


def test_an_error_survives_pickling_and_ray():
    error = ReplyLost("no reply", endpoint="http://h:1/x", status=None, rank=1, replica=0)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is ReplyLost
    assert str(copy) == str(error) == "rank 1, replica 0: http://h:1/x: no reply"
    of_ray = RayTaskError("f", "traceback", error).as_instanceof_cause()
    for each in (copy, of_ray):
        assert (each.endpoint, each.rank, each.replica) == ("http://h:1/x", 1, 0)


# No reply.


@pytest.mark.parametrize(
    "call",
    (UPDATE, INIT_GROUP, DESTROY_GROUP),
    ids=("update", "init group", "destroy group"),
)
def test_possibly_executed_requests_are_never_repeated(call):
    server = Server(delay_s=0.5)
    end = r"within 0\.2 s, not sent again, because it may have been executed$"
    with pytest.raises(ReplyLost, match=rf"/{call.operation.path}: no reply {end}"):
        talk(server, call, timeout_s=0.2)
    assert len(server.requests) == 1


@pytest.mark.parametrize("num_slow", [1, ATTEMPTS])
def test_an_idempotent_request_is_repeated_a_few_times(num_slow):
    server = Server(delay_s=4.0, num_slow=num_slow)
    expected = contextlib.nullcontext()
    if num_slow == ATTEMPTS:
        end = rf": no reply within 1 s, in {ATTEMPTS} attempts$"
        expected = pytest.raises(ReplyLost, match=end)
    with expected:
        talk(server, RELEASE, timeout_s=1.0)
    assert len(server.requests) == min(num_slow + 1, ATTEMPTS)


def test_every_operation_has_a_limit_of_its_own():
    server = Server(delay_s=0.5)
    talk(server, UPDATE, timeout_s=0.2, timeouts_s={"update": 5})
    with pytest.raises(ReplyLost, match=r"within 0\.1 s"):
        talk(server, RELEASE, timeout_s=5, timeouts_s={"release": 0.1})


# No connection.


def test_a_refused_connection_is_retried_then_named():
    url = f"http://127.0.0.1:{free_port()}"
    message = f"{url}/update_weights_from_tensor: no connection in {CONNECT_ATTEMPTS} attempts: "
    with pytest.raises(ServerUnreachable, match=re.escape(message)):
        SGLangServerClient(url, timeout_s=5).run(UPDATE)


def test_a_server_that_starts_late_is_reached(monkeypatch):
    monkeypatch.setattr(client, "RETRY_DELAY_S", 0.5)
    server, port = Server(), free_port()

    async def main():
        started = SGLangServerClient(f"http://127.0.0.1:{port}", timeout_s=5)
        reply = started.submit(UPDATE)
        await asyncio.sleep(0.1)
        assert not reply.done()
        async with serving(server, port=port):
            await asyncio.wrap_future(reply)

    asyncio.run(main())
    assert len(server.requests) == 1


REPLIES = {
    "no reply": b"",
    "amid the headers": b"HTTP/1.1 200 OK\r\nContent-Len",
    "amid the body": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
    "amid a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\n{",
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
}


@pytest.mark.parametrize("abort", (False, True), ids=("closed", "reset"))
@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES.keys())
@pytest.mark.parametrize("is_idempotent", (False, True), ids=("update", "release"))
def test_a_connection_that_breaks_is_named(reply, abort, is_idempotent):
    connections = []

    async def answer(reader, writer):
        connections.append(await reader.readuntil(b"}"))  # the end of the request's JSON
        writer.write(reply)
        await writer.drain()
        if abort:
            writer.transport.abort()
        writer.close()

    async def main():
        listener = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with listener:
            port = listener.sockets[0].getsockname()[1]
            started = SGLangServerClient(f"http://127.0.0.1:{port}", timeout_s=5)
            await asyncio.wrap_future(started.submit(RELEASE if is_idempotent else UPDATE))

    with pytest.raises(ReplyLost, match="the connection broke") as error:
        asyncio.run(main())
    assert ("not sent again" in str(error.value)) != is_idempotent
    assert len(connections) == (ATTEMPTS if is_idempotent else 1)
