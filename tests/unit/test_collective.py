"""The trainer's ranks, real processes: what they agree on, and how they leave together."""

from __future__ import annotations

import signal

import pytest

from unit.collective_ranks import (
    TIMEOUT_S,
    agree_without,
    come_late,
    each_agrees,
    each_asks,
    each_waits,
    leaves_amid_an_exchange,
)
from unit.trainer_ranks import WORLD_SIZE, RankPool
from verl_sglang_sync.collective import Agreement, TrainerGroup

SIGNATURES = tuple(rank << 40 for rank in range(WORLD_SIZE))


@pytest.mark.parametrize(
    ("failures", "waiting", "agreement"),
    [
        ({}, (), Agreement((), True, SIGNATURES)),
        ({}, (2,), Agreement((), False, SIGNATURES)),
        (
            {1: "no memory", 3: "no peer"},
            (2,),
            Agreement(("rank 1: no memory", "rank 3: no peer"), False, SIGNATURES),
        ),
    ],
    ids=["well", "one waits", "two fail"],
)
def test_all_ranks_learn_the_same(pool, failures, waiting, agreement):
    assert pool.run(each_agrees, failures, waiting) == [agreement] * WORLD_SIZE


def test_a_process_on_its_own_agrees_with_itself():
    group = TrainerGroup()
    assert group.agree(signature=3) == Agreement((), True, (3,))
    assert group.agree(is_ready=False) == Agreement((), False, (0,))
    assert group.agree("no memory") == Agreement(("rank 0: no memory",), False, (0,))


def test_items_reach_the_leader_or_everyone(pool):
    everyone = [{"rank": rank} for rank in range(WORLD_SIZE)]
    gathered = [[b"\0", b"\1"], None, [b"\2", b"\3"], None]
    reasons = [None, "rank 3: slow", "the ranks traced different exports"]
    assert pool.run(each_asks) == [(items, everyone, [False, True], reasons) for items in gathered]


def test_all_ranks_wait_for_the_last_task(pool):
    for error, seconds in pool.run(each_waits, {0: 0.1, 2: 1.2}, None):
        assert error is None
        assert seconds > 1


def test_a_failed_task_ends_the_wait_of_all(pool):
    for error, seconds in pool.run(each_waits, {0: 0.1, 2: 40.0}, 0):
        assert error.startswith("stage 'wake' failed\nrank 0: Traceback")
        assert "ValueError: the engine refused" in error
        assert seconds < 20


def test_nobody_waits_where_nobody_has_a_task(pool):
    assert all(error is None for error, _ in pool.run(each_waits, {}, None))


# Ranks that are lost.


# Not rank 0 stopped: who asks a stopped process for torch's store waits for an answer.
@pytest.mark.parametrize(
    ("victim", "how"),
    [(0, signal.SIGKILL), (2, signal.SIGKILL), (2, signal.SIGSTOP)],
    ids=["killed with the store", "killed", "stopped"],
)
def test_a_rank_that_is_gone_is_named_in_time(victim, how):
    pool = RankPool()  # its processes are of no use afterwards
    try:
        outcomes = pool.run(agree_without, victim, how, lost=(victim,))
    finally:
        pool.close()
    for rank, errors in enumerate(outcomes):
        if rank == victim:
            continue
        assert len(errors) == 2
        for i, (text, seconds) in enumerate(errors):
            assert f"rank {victim} did not answer" in text or (
                victim == 0 and "the rank that serves torch's store" in text
            )
            assert seconds < TIMEOUT_S + (10 if i else 5)  # then to form a group takes the limit


def test_ranks_that_all_live_agree_again_after_a_failure(pool):
    for lost, *later in pool.run(come_late, 1):
        assert lost is not None
        assert "a rank that has come back since did not answer" in lost
        assert later == [None, None]


def test_a_rank_leaves_a_group_at_once_in_which_others_stay(pool):
    assert max(pool.run(leaves_amid_an_exchange, limit_s=20)) < 5
