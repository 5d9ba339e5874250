"""The trainer's ranks, real processes: what they agree on, and how they leave together."""

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sglang_loader.common.broadcast.broadcast import all_to_all
from sglang_loader.common.broadcast.update_group import leave
from sglang_loader.common.object_gather import HEADER_NBYTES, SHORT_NBYTES
from unit.trainer_ranks import WORLD_SIZE, RankPool, trainer_group
from verl_sglang_sync import WeightSyncError, collective
from verl_sglang_sync.collective import (
    MARGIN_S,
    Agreement,
    RankLost,
    Reason,
    TorchTrainerGroup,
    TrainerGroup,
    common_reason,
    holds_everywhere,
    run_in_step,
)

TIMEOUT_S = 2.0
SLOW = Reason("slow", is_final=False)


LENGTHS = (0, 3, SHORT_NBYTES - HEADER_NBYTES, 5 * SHORT_NBYTES)
"""Of what four ranks tell each other: what fits into the first collective, and what does not."""


def each_agrees(failures, waiting):
    rank = dist.get_rank()
    group = trainer_group(2)[0]
    return group.agree(failures.get(rank), is_ready=rank not in waiting, signature=rank << 40)


def each_asks():
    rank, (group, _) = dist.get_rank(), trainer_group(2)
    return (
        group.gather(bytes([rank])),
        group.all_gather({"rank": rank}),
        [len(text) for text in group.all_gather("x" * LENGTHS[rank])],
        [holds_everywhere(group, rank != absent) for absent in (2, None)],
        [common_reason(group, SLOW if rank == slow else None) for slow in (None, 3)],
    )


def each_waits(takes_s, fails):
    """Wait in step for the parts that some ranks have: the error, and the seconds it took."""

    async def work():
        await asyncio.sleep(takes_s[rank])
        if rank == fails:
            raise ValueError("the engine refused")

    rank, started, error = dist.get_rank(), time.monotonic(), None
    try:
        part = work() if rank in takes_s else None
        asyncio.run(run_in_step(trainer_group(2)[0], "wake", part))
    except WeightSyncError as failed:
        error = str(failed)
    return error, time.monotonic() - started


def agree_without(victim, how):
    """One good agreement; then the victim is gone, and the others try two more."""
    group = TorchTrainerGroup(timeout_s=TIMEOUT_S)
    assert group.agree().is_ready
    if dist.get_rank() == victim:
        os.kill(os.getpid(), how)
    errors, started = [], time.monotonic()
    for _ in range(2):
        try:
            group.agree()
        except WeightSyncError as error:
            errors.append((type(error) is RankLost and str(error), time.monotonic() - started))
        started = time.monotonic()
    return errors


def connect_without(victim):
    """The victim dies as the ranks connect; the others' errors, and the seconds they took."""

    class Deadly(dist.Store):
        """A rank says there where it is, and dies when it asks for the others."""

        def __init__(self, store):
            super().__init__()
            self._store = store

        def set(self, key, value):
            self._store.set(key, value)

        def wait(self, *_):
            os.kill(os.getpid(), signal.SIGKILL)

    make, started = collective.ProcessGroupGloo, time.monotonic()
    if dist.get_rank() == victim:
        collective.ProcessGroupGloo = lambda store, *where: make(Deadly(store), *where)
    with pytest.raises(RankLost) as lost:
        TorchTrainerGroup(timeout_s=5 * TIMEOUT_S).agree()
    return str(lost.value), time.monotonic() - started


def be_slow(victim):
    """The victim comes late when the group is formed, and to the agreement after it."""
    group = TorchTrainerGroup(timeout_s=TIMEOUT_S)
    for _ in range(2):
        if dist.get_rank() == victim:
            time.sleep(TIMEOUT_S + MARGIN_S / 4)
        assert group.agree().is_ready


def come_late(victim):
    """The victim sleeps through an agreement; how that one ended, and the two after it."""
    group = TorchTrainerGroup(timeout_s=1.0)
    assert group.agree().is_ready
    if dist.get_rank() == victim:
        time.sleep(1.0 + 2.0 + 1.0)  # the limit, `MARGIN_S`, half of `ROLL_CALL_S`
    ends = []
    for _ in range(3):
        try:
            ends.append(None if group.agree().is_ready else "not ready")
        except RankLost as error:
            ends.append(str(error))
    return ends


def run_out_of_memory(victim):
    """The victim has no memory for what the others say at length; how that and the next one end."""
    group, zeros, sizes = TorchTrainerGroup(timeout_s=TIMEOUT_S), torch.zeros, []

    def no_memory(nbytes, **how):
        sizes.append(nbytes)
        if nbytes > SHORT_NBYTES and dist.get_rank() == victim:
            raise RuntimeError("not enough memory")
        return zeros(nbytes, **how)

    with mock.patch.object(torch, "zeros", no_memory), pytest.raises(RankLost) as lost:
        group.all_gather("x" * LENGTHS[-1])
    assert len(sizes) == 2
    return str(lost.value), group.agree().is_ready


def leaves_amid_an_exchange():
    """Ranks 0 and 1 begin it and leave the group, the others do neither: the seconds it takes."""
    group, nothing = dist.new_group(), torch.empty(0, dtype=torch.uint8)
    dist.barrier(group)
    started, sizes = time.monotonic(), [0] * dist.get_world_size()
    if dist.get_rank() < 2:
        all_to_all(nothing, sizes, nothing, sizes, group)
        leave(group, broken=True)
        del group  # the last reference, which waits for the exchange
    seconds = time.monotonic() - started
    dist.barrier()
    return seconds


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
    assert group.agree(is_ready=False) == Agreement((), False, (None,))
    assert group.agree("no memory") == Agreement(("rank 0: no memory",), False, (None,))


def test_items_reach_the_leader_or_everyone(pool):
    everyone = [{"rank": rank} for rank in range(WORLD_SIZE)]
    gathered = [[b"\0", b"\1"], None, [b"\2", b"\3"], None]
    told = everyone, list(LENGTHS), [False, True], [None, Reason("rank 3: slow", is_final=False)]
    assert pool.run(each_asks) == [(items, *told) for items in gathered]


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


class Losing(TrainerGroup):
    """Has lost a rank."""

    def agree(self, *_, **__):
        raise RankLost("rank 2 did not answer")


def test_a_task_ends_when_a_rank_is_lost():
    ended = []

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("work")

    async def stage():
        with pytest.raises(RankLost):
            await run_in_step(Losing(), "wake", work())
        await asyncio.sleep(0)
        return list(ended)

    assert asyncio.run(stage()) == ["work"]


# Not rank 0 stopped: who asks a stopped process for torch's store waits for an answer.
LOST = {
    "killed with the store": (0, signal.SIGKILL),
    "killed": (2, signal.SIGKILL),
    "stopped": (2, signal.SIGSTOP),
}


AS_THEY_CONNECT = 2


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """What the others saw of each loss; at once, for they wait most of the time."""

    def lose(function, victim, *how):
        pool = RankPool(tmp_path_factory.mktemp("lost"))  # of no use afterwards
        try:
            return pool.run(function, victim, *how, lost=(victim,))
        finally:
            pool.close()

    with ThreadPoolExecutor(len(LOST) + 1) as threads:
        yield {
            AS_THEY_CONNECT: threads.submit(lose, connect_without, AS_THEY_CONNECT),
            **{name: threads.submit(lose, agree_without, *how) for name, how in LOST.items()},
        }


@pytest.mark.parametrize("name", LOST)
def test_a_rank_that_is_gone_is_named_in_time(name, without):
    victim, _ = LOST[name]
    for rank, errors in enumerate(without[name].result()):
        if rank == victim:
            continue
        assert len(errors) == 2
        for i, (text, seconds) in enumerate(errors):
            assert f"rank {victim} did not answer" in text or (
                victim == 0 and "the rank that serves torch's store" in text
            )
            assert seconds < TIMEOUT_S + (10 if i else 5)  # then to form a group takes the limit


def test_a_rank_that_dies_as_they_connect_is_named_in_time(without):
    for found in filter(None, without[AS_THEY_CONNECT].result()):
        text, seconds = found
        named, _, _ = text.partition(" did not answer")  # on a busy machine slow ranks, too
        assert f"rank {AS_THEY_CONNECT}" in named
        assert seconds < 15 * TIMEOUT_S, "gloo alone would wait for 60 s"


def test_a_slow_rank_is_waited_for(pool):
    pool.run(be_slow, 3)


def test_ranks_that_all_live_agree_again_after_a_failure(pool):
    for lost, *later in pool.run(come_late, 1):
        assert lost is not None
        assert "a rank that has come back since did not answer" in lost
        assert later == [None, None]


def test_ranks_leave_together_where_one_fails_between_the_collectives_of_an_exchange(pool):
    texts, ready = zip(*pool.run(run_out_of_memory, 1), strict=True)
    assert "rank 1: not enough memory" in texts[1]
    assert all(ready)


def test_a_rank_leaves_a_group_at_once_in_which_others_stay(pool):
    assert max(pool.run(leaves_amid_an_exchange, limit_s=20)) < 5
