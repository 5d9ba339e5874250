"""Ranks of a session in step: one that has failed still takes part in what others wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from unit.lost_replies import LosesReplies, lost_reply
from unit.test_session_commit import SETTINGS
from verl_sglang_sync.collective import RoundResult, RoundState, SingleProcess
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.session_ranks import RanksInStep
from verl_sglang_sync.session_transport import SessionTransport
from verl_sglang_sync.weight_sync import WeightSyncError


class Group(SingleProcess):
    """Writes down when it is asked to agree."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def agree(self, state: RoundState, failure: str | None, signature: int = 0) -> RoundResult:
        self._events.append("agree")
        return super().agree(state, failure, signature)


def test_a_rank_whose_last_reply_was_lost_exports_before_it_agrees() -> None:
    events: list[str] = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("first", "second"):
            events.append(name)
            yield name, torch.ones(60)

    transport = SessionTransport(
        engine=LosesReplies(),  # type: ignore[arg-type]
        settings=replace(SETTINGS, manifest_check="off"),
        group=Group(events),
        device=torch.device("cpu"),
    )
    transport._unanswered = lost_reply()
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
