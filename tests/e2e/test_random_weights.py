"""An engine that starts from random weights serves nobody before its first sync."""

import asyncio
import time

import pytest

from support.http_requests import answer_to, release, resume, status_of_request
from support.served import served
from support.trainer import sync_error

pytestmark = pytest.mark.e2e

WARMED_UP = "The server is fired up and ready to roll!"
EXTRA = ("--load-format", "dummy", "--log-level", "info")


def test_requests_wait_for_first_sync_warm_ups_not(tmp_path):
    with served(tmp_path, extra=EXTRA, warms_up=True) as engine:
        assert WARMED_UP in engine.log
        with engine.ranks() as ranks, answer_to(engine.url, "early") as answer:
            release(engine.url, "kv_cache", "weights")  # as verl does after the launch
            assert "'weights'" in ranks.run(try_to_sync)[0]
            resume(engine.url, "weights", "kv_cache")
            time.sleep(1)
            assert not answer.done()
            assert engine.version == "default"
            ranks.run(sync)
            assert answer.result().status == 200
        assert engine.version == "synced"
        assert status_of_request(engine.url) == 200
        assert engine.lives


def try_to_sync(rank):
    return sync_error(rank.manager("compiled"), rank.weights())


def sync(rank):
    asyncio.run(rank.manager("compiled").sync(rank.weights(), version="synced"))
