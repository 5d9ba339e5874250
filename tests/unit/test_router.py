"""Registration with SGLang's router: three dialects, what is refused, and who is named."""

import asyncio
import subprocess
import sys
import time
from urllib.parse import quote

import pytest

from support.router import Router, serving
from verl_sglang_sync.engine.server_client import client
from verl_sglang_sync.engine.server_client.errors import RouterError
from verl_sglang_sync.http_settings import checked_base_url, server_url
from verl_sglang_sync.router import client as router_client
from verl_sglang_sync.router.client import RouterClient, Worker
from verl_sglang_sync.router.guard import GuardedWorker, start_guard

SERVER = "http://10.0.0.1:30000"
SERVER6 = "http://[fd00::1]:30000"


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr(client, "RETRY_DELAY_S", 0.05)
    monkeypatch.setattr(router_client, "POLL_S", 0.02)


def talk(served, conversation, *, timeout_s=5.0, **access):
    async def main():
        async with serving(served):
            client = RouterClient(f"{served.url}/", timeout_s=timeout_s, **access)
            return await asyncio.to_thread(conversation, client)

    return asyncio.run(main())


@pytest.mark.parametrize("dialect", ("0.1", "0.2", "0.3"))
@pytest.mark.parametrize("server", (SERVER, SERVER6))
def test_a_server_is_added_and_removed(dialect, server):
    served = Router(dialect)

    def conversation(client):
        worker = client.add(server)
        assert list(served.workers.values()) == [server]
        assert (worker.url, worker.id is None) == (server, dialect == "0.1")
        again = client.add(server)  # of a run that was killed, or by two trainers
        assert list(served.workers.values()) == [server]
        assert again == worker
        client.remove(worker)
        assert served.workers == {}
        client.remove(worker)  # it is gone already

    talk(served, conversation)


def test_what_is_sent():
    served = Router("0.3", num_polls=0)
    worker = talk(served, lambda client: client.add(SERVER, api_key="k"))
    assert served.calls == [
        ("POST", "/workers", {"url": SERVER, "api_key": "k"}),
        ("GET", f"/workers/{worker.id}", None),
    ]
    served = Router("0.1")
    talk(served, lambda client: client.add(SERVER, api_key="k"))
    assert [call[:2] for call in served.calls] == [
        ("POST", "/workers"),
        ("POST", f"/remove_worker?url={quote(SERVER, safe='')}"),
        ("POST", f"/add_worker?url={quote(SERVER, safe='')}&api_key=k"),
    ]


def test_the_call_returns_when_the_router_sends_requests():
    served = Router("0.3", num_polls=3)
    talk(served, lambda client: client.add(SERVER))
    assert len(served.calls) == 1 + 4


def test_a_router_that_checks_too_long_is_named():
    served = Router("0.3", num_polls=10**6)
    with pytest.raises(RouterError, match=r"not healthy within 0\.3 s.*processing"):
        talk(served, lambda client: client.add(SERVER), timeout_s=0.3)


@pytest.mark.parametrize(
    ("dialect", "where", "status"),
    [("0.1", "/add_worker", 400), ("0.2", "/workers/", 200), ("0.3", "/workers/", 200)],
)
def test_a_refusal_names_router_endpoint_status_and_message(dialect, where, status):
    served = Router(dialect, failure="health check failed")
    with pytest.raises(RouterError) as error:
        talk(served, lambda client: client.add(SERVER))
    assert str(error.value).startswith(f"{served.url}{where}")
    told = f"the router {served.url} did not add the server {SERVER}: health check failed"
    assert str(error.value).endswith(f": HTTP {status}: {told}")
    assert error.value.status == status


def test_the_routers_key():
    served = Router(api_key="secret")
    talk(served, lambda client: client.add(SERVER), api_key="secret")
    for access in ({}, {"api_key": "wrong"}):
        with pytest.raises(
            RouterError, match=r"/workers: HTTP 401: .*\(see VERL_SGLANG_SYNC_ROUTER"
        ):
            talk(served, lambda client: client.add(SERVER), **access)


def test_no_router_there():
    with pytest.raises(RouterError, match=r"/workers: the router http://127\.0\.0\.1:9 did not "):
        RouterClient("http://127.0.0.1:9", timeout_s=5).add(SERVER)


# The guard: a real process.


def test_a_guard_that_finds_no_router_says_so(capfd):
    worker = Worker(SERVER, "some-id")
    start_guard(
        GuardedWorker(router_url="http://127.0.0.1:9", router_api_key=None, worker=worker)
    ).close()
    told, deadline = "", time.monotonic() + 20
    while f"the router http://127.0.0.1:9 did not remove the server {SERVER}" not in told:
        assert time.monotonic() < deadline, told
        time.sleep(0.05)
        told += capfd.readouterr().err


def test_the_guard_imports_no_engine():
    code = "import sys, verl_sglang_sync.router.guard; print([*sys.modules])"
    command = [sys.executable, "-c", code]
    modules = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert "'msgspec'" in modules
    for heavy in ("torch", "verl", "sglang", "ray"):
        assert f"'{heavy}'" not in modules


# URLs.


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("10.0.0.1", "http://10.0.0.1:80"),
        ("node-7.cluster", "http://node-7.cluster:80"),
        ("::1", "http://[::1]:80"),
        ("[::1]", "http://[::1]:80"),
        ("fd00::a:1", "http://[fd00::a:1]:80"),
        ("fe80::1%eth0", "http://[fe80::1%eth0]:80"),
        ("::ffff:10.0.0.1", "http://[::ffff:10.0.0.1]:80"),
    ],
)
def test_a_servers_url(host, url):
    assert server_url(host, 80) == url


@pytest.mark.parametrize(
    "url", ("http://10.0.0.1:30000", "https://[::1]:1", "http://router", "https://r:8/behind/proxy")
)
def test_a_base_url_is_taken_as_it_is(url):
    assert checked_base_url("key", url) == checked_base_url("key", f"{url}/") == url


@pytest.mark.parametrize(
    "value",
    (
        *("", "10.0.0.1:30000", "ftp://h:1", "http://", "http://:30000", "http://::1:30000"),
        *("http://h:99999", "http://h:x", "http://[::1", "http://h:0", "http://h:1?a=b"),
        *("http://u:p@h:1", "http://h 1:1", "http://h:1\n", 30000, True, ["http://h:1"]),
    ),
)
def test_anything_else_is_no_base_url(value):
    with pytest.raises(ValueError, match=r"^some\.key=.*expected a URL such as http://10\.0\.0\.1"):
        checked_base_url("some.key", value)
