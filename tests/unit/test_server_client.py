"""The client against real servers on this host: what it sends, and how each failure is named."""

import asyncio
import base64
import contextlib
import re
import socket

import pytest
from aiohttp import web

from verl_sglang_sync import server_client
from verl_sglang_sync.server_client import CONNECT_ATTEMPTS, ServerError, SGLangServerClient


class Server:
    """Answers every POST with `status` and `text` after `delay_s`; keeps what it was sent."""

    def __init__(self, *, status=200, text="{}", delay_s=0.0):
        self.status, self.text, self.delay_s = status, text, delay_s
        self.requests = []
        self.url = ""

    async def answer(self, request):
        self.requests.append((request.path_qs, dict(request.headers), await request.json()))
        await asyncio.sleep(self.delay_s)
        return web.Response(status=self.status, text=self.text)

    @property
    def only_request(self):
        (request,) = self.requests
        return request


@contextlib.asynccontextmanager
async def serving(server, host="127.0.0.1", port=0):
    application = web.Application(client_max_size=1 << 30)
    application.router.add_post("/{endpoint}", server.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, host, port, shutdown_timeout=0.1)
    await site.start()
    try:
        port = runner.addresses[0][1]
        server.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        yield server
    finally:
        await runner.cleanup()


def talk(server, conversation, *, timeout_s=5.0, api_key=None, host="127.0.0.1", base="{url}"):
    """Run `conversation(client)` against `server`."""

    async def main():
        async with serving(server, host):
            url = base.format(url=server.url)
            await conversation(SGLangServerClient(url, timeout_s=timeout_s, api_key=api_key))

    asyncio.run(main())


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def short_retry_delay(monkeypatch):
    monkeypatch.setattr(server_client, "CONNECT_RETRY_DELAY_S", 0.05)


PAYLOADS = {
    "release": (
        lambda client: client.release_memory(("kv_cache", "weights")),
        "/release_memory_occupation",
        {"tags": ["kv_cache", "weights"]},
    ),
    "resume": (
        lambda client: client.resume_memory(["weights"]),
        "/resume_memory_occupation",
        {"tags": ["weights"]},
    ),
    "update": (
        lambda client: client.update_weights([b"\x00\xff\n", b""], load_format="a.b"),
        "/update_weights_from_tensor",
        {
            "serialized_named_tensors": ["AP8K", ""],
            "load_format": "a.b",
            "flush_cache": False,
            "weight_version": None,
        },
    ),
    "last update": (
        lambda client: client.update_weights(
            [b"abc"], load_format="a.b", flush_cache=True, weight_version="17"
        ),
        "/update_weights_from_tensor",
        {
            "serialized_named_tensors": ["YWJj"],
            "load_format": "a.b",
            "flush_cache": True,
            "weight_version": "17",
        },
    ),
}


@pytest.mark.parametrize(("call", "path", "payload"), PAYLOADS.values(), ids=PAYLOADS.keys())
def test_what_is_sent(call, path, payload):
    server = Server()
    talk(server, call)
    sent_path, _, sent = server.only_request
    assert (sent_path, sent) == (path, payload)


def test_a_bucket_of_many_bytes_arrives_whole():
    server, handle = Server(), bytes(range(256)) * 40_000
    talk(server, lambda client: client.update_weights([handle], load_format="a.b"))
    (text,) = server.only_request[2]["serialized_named_tensors"]
    assert base64.b64decode(text, validate=True) == handle


@pytest.mark.parametrize("api_key", (None, "secret"))
def test_the_api_key_is_a_bearer_token(api_key):
    server = Server()
    talk(server, lambda client: client.resume_memory(["weights"]), api_key=api_key)
    expected = None if api_key is None else f"Bearer {api_key}"
    assert server.only_request[1].get("Authorization") == expected


def test_a_slash_after_the_base_url_does_no_harm():
    server = Server()
    talk(server, lambda client: client.resume_memory(["weights"]), base="{url}/")
    assert server.only_request[0] == "/resume_memory_occupation"


def test_an_ipv6_server():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this host has no IPv6 loopback: {error}")
    server = Server()
    talk(server, lambda client: client.release_memory(["weights"]), host="::1")
    assert server.url.startswith("http://[::1]:")
    assert server.only_request[0] == "/release_memory_occupation"


@pytest.mark.parametrize("status", (400, 401, 404, 500, 503))
def test_a_refusal_names_endpoint_status_and_message(status):
    server = Server(status=status, text='{"success": false, "message": "TP rank 1: no such layer"}')
    with pytest.raises(ServerError) as error:
        talk(server, lambda client: client.update_weights([b""], load_format="a.b"))
    assert str(error.value) == (
        f"{server.url}/update_weights_from_tensor: HTTP {status}: "
        '{"success": false, "message": "TP rank 1: no such layer"}'
    )
    assert len(server.requests) == 1


def test_a_long_message_is_cut():
    server = Server(status=500, text="x" * 100_000)
    with pytest.raises(ServerError) as error:
        talk(server, lambda client: client.release_memory([]))
    assert len(str(error.value)) < 4200


def test_a_request_that_timed_out_is_named_and_never_repeated():
    server = Server(delay_s=1.5)

    async def conversation(client):
        with pytest.raises(ServerError, match=r"/resume_memory_occupation: no reply within 0.2 s"):
            await client.resume_memory(["weights"])
        await asyncio.sleep(1.6)  # a repetition would have come by now

    talk(server, conversation, timeout_s=0.2)
    assert len(server.requests) == 1


def test_a_slow_reply_within_the_limit_is_a_success():
    server = Server(delay_s=0.3)
    talk(server, lambda client: client.resume_memory(["weights"]), timeout_s=5)
    assert len(server.requests) == 1


def test_a_refused_connection_is_tried_again_and_then_named(short_retry_delay):
    url = f"http://127.0.0.1:{free_port()}"
    client = SGLangServerClient(url, timeout_s=5)
    message = f"{url}/release_memory_occupation: no connection in {CONNECT_ATTEMPTS} attempts: "
    with pytest.raises(ServerError, match=re.escape(message)):
        asyncio.run(client.release_memory(["weights"]))


def test_a_server_that_starts_late_is_reached(monkeypatch):
    monkeypatch.setattr(server_client, "CONNECT_RETRY_DELAY_S", 0.5)
    server, port = Server(), free_port()

    async def main():
        client = SGLangServerClient(f"http://127.0.0.1:{port}", timeout_s=5)
        call = asyncio.create_task(client.resume_memory(["weights"]))
        await asyncio.sleep(0.1)
        assert not call.done()
        async with serving(server, port=port):
            await call

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
def test_a_connection_that_breaks_is_named_and_the_request_not_repeated(reply, abort):
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
            client = SGLangServerClient(f"http://127.0.0.1:{port}", timeout_s=5)
            await client.resume_memory(["weights"])

    with pytest.raises(ServerError, match="/resume_memory_occupation: the connection broke: "):
        asyncio.run(main())
    assert len(connections) == 1
