"""One sync: it arrives bit by bit on every rank, or is published on none, and never hangs."""

import pytest

from unit.trainer_ranks import WORLD_SIZE, RanksHang, SyncCase, barrier_of, expected, sync

MODES = ("bucketed", "flattened")
FIRST, LAST = 0, 2  # the buckets of a case: three of four tensors each
both_modes = pytest.mark.parametrize("mode", MODES)


def check_arrived(case, outcomes):
    """Every TP rank of every replica loaded exactly the exported bytes, in order."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, outcome.error
        assert outcome.drained
        is_leader = rank % case.tp == 0
        wanted = [list(expected(case).items())] * case.tp if is_leader else []
        assert [list(loaded.items()) for loaded in outcome.loaded] == wanted
        assert outcome.num_loads == [3] * len(wanted)
        assert outcome.num_published == int(is_leader)


def check_good_sync(pool, case):
    """A later sync works in the same processes and groups."""
    good = SyncCase(mode=case.mode, tp=case.tp, seed=case.seed + 1)
    check_arrived(good, pool.run(sync, good))


def check_failed_everywhere(outcomes, *texts):
    """All ranks raised the same error, which has all of `texts`, and no engine published."""
    (error,) = {outcome.error for outcome in outcomes}
    assert error is not None
    assert error.startswith("weight sync failed")
    for text in texts:
        assert text in error
    assert max(outcome.seconds for outcome in outcomes) < 30
    assert not any(outcome.num_published for outcome in outcomes)


def check_drained(case, outcomes):
    for rank, outcome in enumerate(outcomes):
        assert outcome.drained
        assert outcome.exported == case.num_tensors_on.get(rank, case.num_tensors)


@both_modes
@pytest.mark.parametrize("tp", (1, 2, 4))
def test_every_tensor_reaches_every_tp_rank_of_every_replica(pool, mode, tp):
    case = SyncCase(mode=mode, tp=tp)
    check_arrived(case, pool.run(sync, case))


@both_modes
def test_no_rank_packs_into_a_buffer_that_its_engine_still_reads(pool, mode):
    """Nothing in the export holds the ranks back here: its tensors are whole on each of them."""
    case = SyncCase(mode=mode, collective=False, load_takes_s=0.2)
    check_arrived(case, pool.run(sync, case))


def test_the_check_of_arrival_sees_other_weights(pool):
    outcomes = pool.run(sync, SyncCase(seed=1))
    with pytest.raises(AssertionError):
        check_arrived(SyncCase(seed=2), outcomes)


@pytest.mark.parametrize(
    ("mode", "tp", "engine", "bucket"),
    (
        ("flattened", 4, (0, 3), FIRST),
        ("bucketed", 2, (0, 0), FIRST),
        ("flattened", 2, (2, 1), LAST),
        ("bucketed", 1, (3, 0), LAST),
    ),
)
def test_a_load_that_fails_on_one_engine_rank_is_published_nowhere(pool, mode, tp, engine, bucket):
    case = SyncCase(mode=mode, tp=tp, load_fails=(*engine, bucket))
    outcomes = pool.run(sync, case)
    refusal = f"RuntimeError: the engine refused bucket {bucket}"
    check_failed_everywhere(outcomes, f"rank {sum(engine)}: Traceback", refusal)
    check_drained(case, outcomes)
    assert outcomes[engine[0]].num_loads[engine[1]] == bucket + 1
    check_good_sync(pool, case)


@both_modes
@pytest.mark.parametrize(("rank", "index"), ((1, 0), (2, 5), (1, 11)))
def test_packing_that_fails_on_one_rank_fails_on_all(pool, mode, rank, index):
    case = SyncCase(mode=mode, bad_tensor=(rank, index))
    outcomes = pool.run(sync, case)
    check_failed_everywhere(outcomes, f"rank {rank}: Traceback", "Cannot copy out of meta tensor")
    check_drained(case, outcomes)
    check_good_sync(pool, case)


@both_modes
@pytest.mark.parametrize("index", (0, 11))
def test_an_export_that_fails_on_one_rank_fails_on_all(pool, mode, index):
    case = SyncCase(mode=mode, export_fails=(1, index), collective=False)
    outcomes = pool.run(sync, case)
    check_failed_everywhere(outcomes, "rank 1: Traceback", f"layers.{index}.mlp", "broke")
    assert outcomes[1].exported == index
    check_good_sync(pool, case)


def test_an_export_that_fails_on_all_ranks_names_them_all(pool):
    case = SyncCase(export_fails=(-1, 5))
    outcomes = pool.run(sync, case)
    check_failed_everywhere(outcomes, *(f"rank {r}: Traceback" for r in range(WORLD_SIZE)))
    check_good_sync(pool, case)


def test_an_export_that_fails_amid_its_collectives_ends_with_their_timeout(pool):
    """Nobody can take the dead rank's part; the others leave when their own collective gives up."""
    case = SyncCase(export_fails=(1, 5), export_timeout_s=2)
    outcomes = pool.run(sync, case)
    check_failed_everywhere(outcomes, "rank 1: Traceback", "layers.5.mlp", "broke")
    check_good_sync(pool, case)


DIFFERENT_NUMBERS = {
    "a bucket more": {1: 16},
    "less on a leader": {2: 3},
    "nothing on one": {3: 0},
    "one less in the last bucket, on all but one": {0: 11, 1: 11, 2: 11},
    "one less in a replica": {2: 11, 3: 11},
}


@pytest.mark.parametrize("num_tensors_on", DIFFERENT_NUMBERS.values(), ids=DIFFERENT_NUMBERS.keys())
def test_ranks_that_export_different_numbers_of_tensors_all_fail(pool, num_tensors_on):
    case = SyncCase(num_tensors_on=num_tensors_on, collective=False)
    outcomes = pool.run(sync, case)
    is_empty = 0 in num_tensors_on.values()
    text = "exported no tensor" if is_empty else "the ranks exported different tensors"
    check_failed_everywhere(outcomes, text)
    check_drained(case, outcomes)
    check_good_sync(pool, case)


def test_an_empty_export_fails_on_all_ranks(pool):
    case = SyncCase(num_tensors=0)
    check_failed_everywhere(pool.run(sync, case), "the trainer exported no tensor")
    check_good_sync(pool, case)


def test_the_pool_sees_a_rank_that_hangs(pool):
    with pytest.raises(RanksHang, match=r"ranks \[1, 2\] hang"):
        pool.run(barrier_of, (1, 2), limit_s=2)
    check_good_sync(pool, SyncCase())
