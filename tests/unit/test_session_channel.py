"""Both ends of a session's socket in one process: what comes first of two things at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_loader import session_messages as wire
from sglang_loader.session_channel import GRACE_MS, Channel

TOKEN = "t" * 32


class ReplyCame(RuntimeError):
    """Raised by `watch`: the engine has answered the request."""


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Channel[Any], Channel[Any]]]:
    """The trainer's and the engine's; one message has passed."""
    endpoint = f"ipc://{tmp_path}/s"
    common: dict[str, Any] = {"token": TOKEN, "timeout_s": 20}
    trainer: Channel[Any] = Channel(
        endpoint, bind=True, decode=wire.decode_from_engine, peer="engine", **common
    )
    engine: Channel[Any] = Channel(
        endpoint, bind=False, decode=wire.decode_from_trainer, peer="trainer", **common
    )
    with trainer, engine:
        engine.send(wire.BucketDone, index=0)
        assert trainer.receive().index == 0
        yield trainer, engine


def test_a_message_that_is_slower_than_the_reply_is_heard(
    ends: tuple[Channel[Any], Channel[Any]],
) -> None:
    trainer, engine = ends
    late = threading.Timer(0.4, lambda: engine.send(wire.BucketDone, index=1))

    def watch() -> None:
        if not late.is_alive():
            late.start()
        raise ReplyCame

    assert trainer.receive(watch=watch).index == 1
    late.join()


def test_a_peer_that_says_nothing_ends_the_wait(ends: tuple[Channel[Any], Channel[Any]]) -> None:
    trainer, _ = ends

    def watch() -> None:
        raise ReplyCame

    started = time.monotonic()
    with pytest.raises(ReplyCame):
        trainer.receive(watch=watch)
    assert time.monotonic() - started < GRACE_MS / 1000 + 5
