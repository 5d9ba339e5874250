"""Ranks of a session in step: one that has failed still takes part in what others wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from verl_sglang_sync.collective import RoundResult, RoundState, SingleProcess
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.session_ranks import OpeningRequest, RanksInStep
from verl_sglang_sync.session_transport import SessionTransport
from verl_sglang_sync.weight_sync import WeightSyncError

SETTINGS = WeightSyncConfig(
    mode="compiled",
    bucket_bytes=256,
    request_timeout_s=5,
    multi_stage_wake_up=True,
    free_cache_engine=True,
    manifest_check="off",
)


class Engine:
    """Every reply of it is lost."""

    def start_update(self, *_: Any, **__: Any) -> Future[None]:
        reply: Future[None] = Future()
        reply.set_exception(ConnectionError("the reply was lost"))
        return reply


class Group(SingleProcess):
    """Writes down when it is asked to agree."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def agree(self, state: RoundState, failure: str | None, signature: int = 0) -> RoundResult:
        self._events.append("agree")
        return super().agree(state, failure, signature)


@pytest.fixture
def lost() -> OpeningRequest:
    """A request whose reply nobody has looked at."""
    request = OpeningRequest(Engine(), "1")  # type: ignore[arg-type]
    request.post([b"an invitation"])
    return request


def test_a_rank_whose_last_reply_was_lost_exports_before_it_agrees(lost: OpeningRequest) -> None:
    events: list[str] = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("first", "second"):
            events.append(name)
            yield name, torch.ones(60)

    transport = SessionTransport(
        engine=Engine(),  # type: ignore[arg-type]
        settings=SETTINGS,
        group=Group(events),
        device=torch.device("cpu"),
    )
    transport._unanswered = lost
    with pytest.raises(WeightSyncError, match="the reply was lost"):
        asyncio.run(
            transport.sync(export(), version="2", report=SyncReport(mode="compiled", replica=0))
        )
    assert events[0] == "first", "the other ranks would wait in the export's collectives"
    assert set(events) == {"first", "second", "agree"}
    assert transport._unanswered is None, "said once"


def test_the_first_failure_is_kept() -> None:
    def fail(text: str) -> None:
        raise ValueError(text)

    ranks = RanksInStep(SingleProcess())
    assert ranks.is_well
    assert ranks.take_part(lambda: 1) == ranks.attempt(lambda: 1) == 1
    ranks.attempt(lambda: fail("the first"))
    assert not ranks.is_well
    assert ranks.attempt(lambda: 1) is None
    assert ranks.take_part(lambda: 1) == 1
    ranks.take_part(lambda: fail("the second"))
    assert not ranks.agree()
    assert "the first" in str(ranks.error)
    assert "the second" not in str(ranks.error)
