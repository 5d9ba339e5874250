"""One sync over real processes: it arrives everywhere, or fails everywhere, and never hangs."""

import asyncio

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from unit.trainer_ranks import WORLD_SIZE, RanksHang, SyncCase, barrier_of, expected, sync
from verl_sglang_sync.collective import SingleProcess
from verl_sglang_sync.packing import FlattenedPacker, NamedTensorPacker
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.weight_sync import WeightSyncError, run_sync

MODES = ("bucketed", "flattened")
FIRST, MIDDLE, LAST = 0, 1, 2  # the buckets of a case: three of four tensors each
both_modes = pytest.mark.parametrize("mode", MODES)


def check_arrived(case, outcomes):
    """Every TP rank of every replica loaded exactly the exported bytes, in order."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None
        assert outcome.drained
        is_leader = rank % case.tp == 0
        wanted = [list(expected(case).items())] * case.tp if is_leader else []
        assert [list(loaded.items()) for loaded in outcome.loaded] == wanted


def check_good_sync(pool, case):
    """A later sync works in the same processes and groups."""
    good = SyncCase(mode=case.mode, tp=case.tp, seed=case.seed + 1)
    check_arrived(good, pool.run(sync, good))


def check_failed_everywhere(outcomes, *texts):
    """All ranks raised the same error, which has all of `texts`; returns it."""
    errors = {outcome.error for outcome in outcomes}
    assert len(errors) == 1
    (error,) = errors
    assert error is not None
    assert error.startswith("weight sync failed")
    for text in texts:
        assert text in error
    assert max(outcome.seconds for outcome in outcomes) < 30
    return error


def check_drained(case, outcomes):
    for rank, outcome in enumerate(outcomes):
        assert outcome.drained
        assert outcome.exported == case.num_tensors_on.get(rank, case.num_tensors)


@both_modes
@pytest.mark.parametrize("tp", (1, 2, 4))
def test_every_tensor_reaches_every_tp_rank_of_every_replica(pool, mode, tp):
    case = SyncCase(mode=mode, tp=tp)
    outcomes = pool.run(sync, case)
    check_arrived(case, outcomes)
    assert [outcome.num_loads for outcome in outcomes] == [
        3 if rank % tp == 0 else 0 for rank in range(WORLD_SIZE)
    ]


@both_modes
@pytest.mark.parametrize("tp", (2, 4))
def test_no_rank_packs_its_next_bucket_while_the_engine_reads_the_last(pool, mode, tp):
    """Nothing in the export holds the ranks back here: its tensors are whole on each of them."""
    case = SyncCase(mode=mode, tp=tp, collective=False, load_takes_s=0.2)
    check_arrived(case, pool.run(sync, case))


def test_the_check_of_arrival_sees_other_weights(pool):
    outcomes = pool.run(sync, SyncCase(seed=1))
    with pytest.raises(AssertionError):
        check_arrived(SyncCase(seed=2), outcomes)


@both_modes
@pytest.mark.parametrize("bucket", (FIRST, MIDDLE, LAST))
@pytest.mark.parametrize(("tp", "leader"), ((4, 0), (2, 0), (2, 2), (1, 3)))
def test_a_load_that_fails_on_a_leader_fails_on_all_ranks(pool, mode, bucket, tp, leader):
    case = SyncCase(mode=mode, tp=tp, load_fails=((leader, bucket),))
    outcomes = pool.run(sync, case)
    error = check_failed_everywhere(
        outcomes,
        f"rank {leader}: Traceback",
        f"RuntimeError: the engine refused bucket {bucket}",
    )
    assert error.count("Traceback") == 1
    check_drained(case, outcomes)
    # no replica goes on after the round in which one failed
    assert {outcome.num_loads for outcome in outcomes[::tp]} == {bucket + 1}
    check_good_sync(pool, case)


def test_failures_of_several_replicas_are_all_named(pool):
    case = SyncCase(tp=2, load_fails=((0, MIDDLE), (2, MIDDLE)))
    outcomes = pool.run(sync, case)
    check_failed_everywhere(outcomes, "rank 0: Traceback", "rank 2: Traceback")
    check_drained(case, outcomes)
    check_good_sync(pool, case)


@both_modes
@pytest.mark.parametrize("index", (0, 5, 7, 11))
@pytest.mark.parametrize("rank", (1, 2))
def test_packing_that_fails_on_one_rank_fails_on_all(pool, mode, rank, index):
    case = SyncCase(mode=mode, bad_tensor=(rank, index, "without data"))
    outcomes = pool.run(sync, case)
    check_failed_everywhere(outcomes, f"rank {rank}: Traceback", "Cannot copy out of meta tensor")
    check_drained(case, outcomes)
    assert {outcome.num_loads for outcome in outcomes[::2]} == {index // 4}
    check_good_sync(pool, case)


@pytest.mark.parametrize("index", (0, 5, 7, 11))
def test_a_clone_that_fails_amid_a_bucket_leaves_the_exports_in_step(pool, index):
    case = SyncCase(mode="bucketed", bad_tensor=(1, index, "unclonable"))
    outcomes = pool.run(sync, case)
    check_failed_everywhere(outcomes, "rank 1: Traceback", "out of memory while cloning")
    check_drained(case, outcomes)
    check_good_sync(pool, case)


@pytest.mark.parametrize("rank", (0, 1, 3))
@pytest.mark.parametrize("bucket", (FIRST, MIDDLE, LAST))
def test_handles_that_cannot_be_made_on_one_rank_fail_on_all(pool, rank, bucket):
    case = SyncCase(mode="bucketed", bad_tensor=(rank, 4 * bucket, "unshareable"))
    outcomes = pool.run(sync, case)
    check_failed_everywhere(outcomes, f"rank {rank}: Traceback", "this tensor cannot be shared")
    check_drained(case, outcomes)
    assert outcomes[rank // 2 * 2].num_loads == bucket  # its replica never loads half a bucket
    check_good_sync(pool, case)


@both_modes
@pytest.mark.parametrize("index", (0, 5, 11))
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
    "a bucket less": {1: 8},
    "less on a leader": {2: 3},
    "nothing on one": {3: 0},
    "one tensor more in the last bucket": {1: 11},
    "one less in the last bucket, on all but one": {0: 11, 1: 11, 2: 11},
    "one less in a replica": {2: 11, 3: 11},
}


@both_modes
@pytest.mark.parametrize("num_tensors_on", DIFFERENT_NUMBERS.values(), ids=DIFFERENT_NUMBERS.keys())
def test_ranks_that_export_different_numbers_of_tensors_all_fail(pool, mode, num_tensors_on):
    case = SyncCase(mode=mode, num_tensors_on=num_tensors_on, collective=False)
    outcomes = pool.run(sync, case)
    check_failed_everywhere(outcomes, "the ranks exported different tensors")
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


# One process is enough for what follows.


def run_alone(mode, weights, load, bucket_bytes=4 * 256):
    report = SyncReport(mode=mode, replica=0)
    packer = FlattenedPacker if mode == "flattened" else NamedTensorPacker
    coroutine = run_sync(
        weights,
        packer=packer(device=torch.device("cpu"), bucket_bytes=bucket_bytes, report=report),
        group=SingleProcess(),
        load=load,
        report=report,
    )
    asyncio.run(coroutine)
    return report


@both_modes
def test_the_report_counts_a_sync(mode):
    loaded = []

    async def load(handles, parcel):
        loaded.append((len(handles), parcel.plan.last))

    report = run_alone(mode, [(f"t{i}", torch.ones(64)) for i in range(9)], load)
    assert loaded == [(1, False), (1, False), (1, True)]
    assert (report.num_buckets, report.num_tensors, report.payload_bytes) == (3, 9, 9 * 256)
    assert set(report.seconds) == {"export", "pack", "load"}


@both_modes
def test_a_failed_sync_drains_an_export_that_fails_again(mode):
    seen = []

    def export():
        for i in range(6):
            seen.append(i)
            yield f"t{i}", torch.ones(64)
        seen.append("end")
        raise RuntimeError("and the export broke as well")

    async def load(handles, parcel):
        raise RuntimeError("the engine refused")

    with pytest.raises(WeightSyncError, match="the engine refused") as error:
        run_alone(mode, export(), load)
    assert seen == [0, 1, 2, 3, 4, 5, "end"]
    assert "rank 0: Traceback" in str(error.value)


@both_modes
def test_no_more_than_a_bucket_is_held_while_the_next_one_is_exported(mode):
    refs, alive = [], []

    def export():
        for index in range(24):
            tensor = torch.ones(64)
            refs.append(StorageWeakRef(tensor.untyped_storage()))
            alive.append(sum(not ref.expired() for ref in refs))
            yield f"t{index}", tensor
            del tensor

    async def load(handles, parcel):
        pass

    run_alone(mode, export(), load)
    assert len(refs) == 24
    assert max(alive) == 5  # a bucket of four, and the tensor that closes it
