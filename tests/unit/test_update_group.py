"""Forming an update group: whoever waits for a rank that does not come is sent away."""

import asyncio
import contextlib
import re
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from torch._C._distributed_c10d import TCPStore

from sglang_loader.common.broadcast import update_group
from sglang_loader.common.broadcast.update_group import MeetingPoint
from verl_sglang_sync.engine import update_groups
from verl_sglang_sync.engine.server_client import SGLangServerClient
from verl_sglang_sync.engine.update_groups import Replica, UpdateGroupError, UpdateGroups

LIMIT_S = 60
CPU = torch.device("cpu")


def connected(port):
    """A rank's connection to a meeting point of three."""
    limit = timedelta(seconds=LIMIT_S)
    return TCPStore("127.0.0.1", port, 3, wait_for_workers=False, timeout=limit)


class Rank(threading.Thread):
    """Connects as an engine's rank does, and waits for one that never comes."""

    def __init__(self, port):
        super().__init__(daemon=True)
        self.port, self.error = port, None
        self.start()

    def run(self):
        try:
            update_group.check_reachable("127.0.0.1", self.port)
            connected(self.port).wait(["nobody"])
        except Exception as error:
            self.error = error


def test_a_connection_of_its_own_does_not_keep_it_open():
    meeting = MeetingPoint("127.0.0.1", 3, 1)
    store = connected(meeting.port)
    store.set("key", "value")
    meeting.close()
    with pytest.raises(Exception, match=r"shutdown or crash|Broken pipe|Connection"):
        store.get("key")


@pytest.mark.parametrize("num_coming", (2, 1))
def test_ranks_meet_in_the_store_before_any_collective(num_coming, monkeypatch):
    """NCCL's wait for a rank that does not come has no end; this one has."""
    meeting = MeetingPoint("127.0.0.1", 2, 1)
    monkeypatch.setattr(update_group, "_get_process_group_store", lambda group: group.store)
    ended = []

    def rank():
        try:
            store = connected(meeting.port)
            update_group._meet(SimpleNamespace(size=lambda: 2, store=store))
            ended.append("met")
        except Exception as error:
            ended.append(type(error).__name__)

    ranks = [threading.Thread(target=rank, daemon=True) for _ in range(num_coming)]
    for thread in ranks:
        thread.start()
    ranks[0].join(1.0)
    if num_coming == 1:
        assert ended == []
        meeting.close()
    for thread in ranks:
        thread.join(10)
    assert ended == (["met"] * 2 if num_coming == 2 else ["DistNetworkError"])


# The whole of it, with servers whose ranks join as an engine's do.


class Server:
    """Joins after `delay_s`, by waiting at the meeting point; or refuses, or never answers."""

    def __init__(self, behaviour, delay_s=0.0):
        self.behaviour, self.delay_s = behaviour, delay_s
        self.url, self.num_waiting, self.left = "", 0, []

    async def info(self, request):
        return web.json_response({})

    async def init(self, request):
        payload = await request.json()
        if self.behaviour == "refuses":
            return web.json_response({"success": False, "message": "no room"}, status=400)
        await asyncio.sleep(self.delay_s)
        self.num_waiting += 1
        rank = Rank(payload["master_port"])
        await asyncio.to_thread(rank.join, LIMIT_S)
        self.left.append(rank.error)
        return web.json_response({"success": False, "message": f"{rank.error}"}, status=400)

    async def destroy(self, request):
        return web.json_response({"success": True})


@contextlib.contextmanager
def serving(*servers):
    started, stopped = threading.Event(), threading.Event()

    async def serve():
        runners = []
        for server in servers:
            application = web.Application()
            application.router.add_get("/model_info", server.info)
            application.router.add_post("/init_weights_update_group", server.init)
            application.router.add_post("/destroy_weights_update_group", server.destroy)
            runners.append(web.AppRunner(application, shutdown_timeout=0.1))
            await runners[-1].setup()
            await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
            server.url = f"http://127.0.0.1:{runners[-1].addresses[0][1]}"
        started.set()
        await asyncio.to_thread(stopped.wait)
        for runner in runners:
            await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(10)
    try:
        yield [
            Replica(
                identity=s.url,
                base_url=s.url,
                client=SGLangServerClient(s.url, timeout_s=LIMIT_S),
                num_ranks=1,
            )
            for s in servers
        ]
    finally:
        stopped.set()
        thread.join()


@pytest.fixture
def own_join(monkeypatch):
    """Rank 0, which waits for the others as gloo does; how it ended."""
    ended = []

    def join(place, *_):
        store = connected(place.port)
        try:
            store.set("rank 0", "is here")
            store.wait(["nobody"])
        except Exception as error:
            ended.append(error)
            raise

    monkeypatch.setattr(update_groups, "join", join)
    return ended


def test_the_replica_that_refuses_is_named_and_all_others_leave(own_join):
    early, refusing, late = Server("joins"), Server("refuses"), Server("joins", delay_s=1.5)
    with serving(early, refusing, late) as replicas:
        groups = UpdateGroups(address="127.0.0.1", device=CPU, timeout_s=LIMIT_S)
        started = time.monotonic()
        with pytest.raises(UpdateGroupError) as error:
            groups.with_replicas(replicas)
        assert time.monotonic() - started < 20
        assert (
            str(error.value)
            .partition(" was not formed: ")[2]
            .startswith(
                f"replica 1 ({refusing.url}) did not join the update group: "
                f"{refusing.url}/init_weights_update_group: HTTP 400: "
            )
        )
        assert "no room" in str(error.value)
        assert [len(server.left) for server in (early, late)] == [1, 1]
        assert early.left[0] is not None and late.left[0] is not None
        assert len(own_join) == 1


def test_who_never_answers_is_named(own_join, monkeypatch):
    monkeypatch.setattr(update_groups, "LEAVE_S", 3.0)
    monkeypatch.setattr(update_groups, "REPLY_S", 0.1)
    silent = Server("joins", delay_s=8.0)
    with serving(silent) as replicas:
        groups = UpdateGroups(address="127.0.0.1", device=CPU, timeout_s=2)
        with pytest.raises(UpdateGroupError, match=re.escape(silent.url)):
            groups.with_replicas(replicas)
