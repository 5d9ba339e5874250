"""The trainer's ranks, real processes: what they agree on, and how they leave together."""

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sglang_loader.common.broadcast.broadcast import all_to_all
from sglang_loader.common.broadcast.update_group import leave
from sglang_loader.common.object_gather import HEADER_NBYTES, SHORT_NBYTES
from sglang_loader.common.ranks import Ranks, RanksFailed, Reason
from unit.trainer_ranks import WORLD_SIZE, RankPool, trainer_ranks
from verl_sglang_sync import WeightSyncError
from verl_sglang_sync import trainer_ranks as ranks_module
from verl_sglang_sync.trainer_ranks import MARGIN_S, RankLost, TrainerRanks, run_on_all

TIMEOUT_S = 2.0
LATE_S = 12.0
"""In place of a margin of the ranks: a busy machine may itself be seconds late."""
SLOW = Reason("slow", is_final=False)


LENGTHS = (0, 3, SHORT_NBYTES - HEADER_NBYTES, 5 * SHORT_NBYTES)
"""Of what four ranks tell each other: what fits into the first collective, and what does not."""


def each_asks():
    rank, (ranks, _) = dist.get_rank(), trainer_ranks(2)

    def fails_on(slow):
        if rank == slow:
            raise TimeoutError("slow")
        return rank

    return (
        ranks.replica_ranks,
        ranks.gather({"rank": rank}),
        [len(text) for text in ranks.gather("x" * LENGTHS[rank])],
        [ranks.all(rank != absent) for absent in (2, None)],
        [ranks.step(partial(fails_on, slow), passing=(TimeoutError,)) for slow in (None, 3)],
    )


CALLS = {
    "gather": lambda ranks: ranks.gather(1),
    "all": lambda ranks: ranks.all(True),
    "step": lambda ranks: ranks.step(int),
    "poll": lambda ranks: ranks.poll(lambda: None),
    "check": lambda ranks: ranks.check(),
}


def some_fail(failing, call):
    """Some ranks fail, the others make a call; what each raises, and that all meet again."""
    rank, (ranks, _) = dist.get_rank(), trainer_ranks(2)
    own = ValueError(f"no memory on {rank}") if rank in failing else None
    try:
        with ranks.section(), ranks.section():
            if own is not None:
                raise own
            CALLS[call](ranks)
    except RanksFailed as error:
        return type(error), str(error), error.__cause__ is own, ranks.gather(rank)
    return None


def ranks_differ():
    with pytest.raises(WeightSyncError) as raised:
        trainer_ranks(2)[0].poll(lambda: True, same=min(dist.get_rank(), 1))
    return str(raised.value)


def leaves_late(how):
    """Rank 1 fails once the others have left the section; what the ranks gather in the next one."""
    rank, (ranks, _) = dist.get_rank(), trainer_ranks(2)
    error = None
    try:
        with ranks.section():
            ranks.gather(rank)
            if rank == 1:
                raise how
    except (WeightSyncError, KeyboardInterrupt) as raised:
        error = repr(raised.__cause__ or raised)
    with ranks.section():
        return error, ranks.gather(rank)


def each_waits(takes_s, fails):
    """Wait for the parts that some ranks have: the error, and the seconds it took."""

    async def work():
        await asyncio.sleep(takes_s[rank])
        if rank == fails:
            raise ValueError("the engine refused")

    dist.barrier()  # a rank that begins late waits for less
    rank, started, error = dist.get_rank(), time.monotonic(), None
    try:
        part = work() if rank in takes_s else None
        asyncio.run(run_on_all(trainer_ranks(2)[0], "wake", part))
    except WeightSyncError as failed:
        error = str(failed)
    return error, time.monotonic() - started


def agree_without(victim, how):
    """One good agreement; then the victim is gone, and the others try two more."""
    ranks = TrainerRanks(timeout_s=TIMEOUT_S)
    assert ranks.all(True)
    if dist.get_rank() == victim:
        os.kill(os.getpid(), how)
    errors, started = [], time.monotonic()
    for _ in range(2):
        try:
            ranks.check()
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

    make, started = ranks_module.ProcessGroupGloo, time.monotonic()
    if dist.get_rank() == victim:
        ranks_module.ProcessGroupGloo = lambda store, *where: make(Deadly(store), *where)
    with pytest.raises(RankLost) as lost:
        TrainerRanks(timeout_s=5 * TIMEOUT_S).check()
    return str(lost.value), time.monotonic() - started


def be_slow(victim):
    """The victim comes late when the group is formed, and to the agreement after it."""
    ranks = TrainerRanks(timeout_s=TIMEOUT_S)
    with mock.patch.object(ranks_module, "MARGIN_S", LATE_S):
        for _ in range(2):
            if dist.get_rank() == victim:
                time.sleep(TIMEOUT_S + 0.5)
            assert ranks.all(True)


def come_late(victim):
    """The victim sleeps through an agreement; how that one ended, and the two after it."""
    ranks = TrainerRanks(timeout_s=1.0)
    assert ranks.all(True)
    if dist.get_rank() == victim:
        time.sleep(1.0 + MARGIN_S + 4.0)  # the others call the roll meanwhile
    ends = []
    with mock.patch.object(ranks_module, "ROLL_CALL_S", LATE_S):
        for _ in range(3):
            try:
                ends.append(None if ranks.all(True) else "not ready")
            except RankLost as error:
                ends.append(str(error))
    return ends


def run_out_of_memory(victim):
    """The victim has no memory for what the others say at length; how that and the next one end."""
    ranks, zeros, sizes = TrainerRanks(timeout_s=TIMEOUT_S), torch.zeros, []

    def no_memory(nbytes, **how):
        sizes.append(nbytes)
        if nbytes > SHORT_NBYTES and dist.get_rank() == victim:
            raise RuntimeError("not enough memory")
        return zeros(nbytes, **how)

    with mock.patch.object(torch, "zeros", no_memory), pytest.raises(RankLost) as lost:
        ranks.gather("x" * LENGTHS[-1])
    assert len(sizes) == 2
    return str(lost.value), ranks.all(True)


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


def test_items_reach_everyone(pool):
    reason = Reason("rank 3: slow", is_final=False)
    for rank, (of_replica, *found, steps) in enumerate(pool.run(each_asks)):
        assert of_replica == ((0, 1), (2, 3))[rank // 2]
        everyone = [{"rank": rank} for rank in range(WORLD_SIZE)]
        assert found == [everyone, list(LENGTHS), [False, True]]
        assert steps == [(rank, None), (None, reason)]


def test_a_rank_on_its_own_meets_itself():
    ranks, turns = Ranks(), iter((None, None, "done"))
    assert ranks.gather(3) == [3]
    assert ranks.poll(lambda: next(turns)) == ["done"]
    assert ranks.step(lambda: [][0])[1].text.startswith("rank 0: Traceback")
    with pytest.raises(RanksFailed, match=r"(?s)rank 0: .*no memory"), ranks.section():
        raise ValueError("no memory")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("failing", [(1,), (1, 3), (0, 1, 2, 3)], ids=["one", "two", "all"])
def test_all_ranks_raise_the_same_failures(pool, failing, call):
    (kind, text, *_), *others = pool.run(some_fail, failing, call)
    for answer in ((kind, text, True, list(range(WORLD_SIZE))), *others):
        assert answer == (WeightSyncError, text, True, list(range(WORLD_SIZE)))
    assert all(f"ValueError: no memory on {rank}" in text for rank in failing)
    assert text.count("no memory on") == len(failing)


def test_values_that_must_be_the_same_are_named(pool):
    (text,) = set(pool.run(ranks_differ))
    assert text.endswith("the ranks differ: rank 0: 0, rank 1: 1, rank 2: 1, rank 3: 1")


@pytest.mark.parametrize("how", [ValueError("late"), KeyboardInterrupt()], ids=repr)
def test_a_late_failure_ends_no_other_section(pool, how):
    """One of a rank after which no rank meets it in that section."""
    for rank, (error, gathered) in enumerate(pool.run(leaves_late, how)):
        assert error == (repr(how) if rank == 1 else None)
        assert gathered == list(range(WORLD_SIZE))


def test_all_ranks_wait_for_the_last_task(pool):
    for error, seconds in pool.run(each_waits, {0: 0.1, 2: 1.5}, None):
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


class Losing(TrainerRanks):
    """Has lost a rank."""

    def _exchange(self, turn):
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
            await run_on_all(Losing(), "wake", work())
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
def test_a_missing_rank_is_named_in_time(name, without):
    victim, _ = LOST[name]
    for rank, errors in enumerate(without[name].result()):
        if rank == victim:
            continue
        assert len(errors) == 2
        for text, seconds in errors:
            assert f"rank {victim} did not answer" in text or (
                victim == 0 and "the rank that serves torch's store" in text
            )
            assert seconds < TIMEOUT_S + 15  # torch's own limit is half an hour


def test_a_rank_dead_while_connecting_is_named(without):
    for found in filter(None, without[AS_THEY_CONNECT].result()):
        text, seconds = found
        named, _, _ = text.partition(" did not answer")  # on a busy machine slow ranks, too
        assert f"rank {AS_THEY_CONNECT}" in named
        assert seconds < 15 * TIMEOUT_S, "gloo alone would wait for 60 s"


def test_a_slow_rank_is_waited_for(pool):
    pool.run(be_slow, 3)


def test_living_ranks_agree_again_after_a_failure(pool):
    for lost, *later in pool.run(come_late, 1):
        assert lost is not None
        assert "a rank that has come back since did not answer" in lost
        assert later == [None, None]


def test_a_failure_between_collectives_ends_all_ranks(pool):
    texts, ready = zip(*pool.run(run_out_of_memory, 1), strict=True)
    assert "rank 1: not enough memory" in texts[1]
    assert all(ready)


def test_a_rank_leaves_an_occupied_group_at_once(pool):
    assert max(pool.run(leaves_amid_an_exchange, limit_s=20)) < 5
