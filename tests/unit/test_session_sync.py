"""One sync: it arrives bit by bit on every rank, or is published on none, and never hangs."""

import pytest

from unit.trainer_ranks import WORLD_SIZE, SyncCase, expected, sync


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


@pytest.mark.parametrize(("mode", "tp"), [("bucketed", 1), ("bucketed", 2), ("flattened", 4)])
def test_every_tensor_reaches_every_tp_rank_of_every_replica(pool, mode, tp):
    case = SyncCase(mode=mode, tp=tp)
    outcomes = pool.run(sync, case)
    check_arrived(case, outcomes)
    with pytest.raises(AssertionError):  # the check sees other weights
        check_arrived(SyncCase(mode=mode, tp=tp, seed=1), outcomes)


@pytest.mark.parametrize("mode", ["bucketed", "flattened"])
def test_no_rank_packs_into_a_buffer_that_its_engine_still_reads(pool, mode):
    """Nothing in the export holds the ranks back here: its tensors are whole on each of them."""
    case = SyncCase(mode=mode, collective=False, load_takes_s=0.2)
    check_arrived(case, pool.run(sync, case))


REFUSED = "RuntimeError: the engine refused bucket"
UNPACKED = "Cannot copy out of meta tensor"
FIRST, LAST = 0, 2  # the buckets of a case: three of four tensors each
FAILS = {
    "a load": (SyncCase(tp=4, load_fails=(0, 3, FIRST)), ["rank 3: Traceback", f"{REFUSED} 0"]),
    "a load of the last bucket": (
        SyncCase(mode="bucketed", load_fails=(2, 1, LAST)),
        ["rank 3: Traceback", f"{REFUSED} 2"],
    ),
    "packing": (
        SyncCase(mode="bucketed", bad_tensor=(1, 0)),
        ["rank 1: Traceback", UNPACKED],
    ),
    "packing the last tensor": (SyncCase(bad_tensor=(2, 11)), ["rank 2: Traceback", UNPACKED]),
    "the export": (
        SyncCase(export_fails=(1, 11), collective=False),
        ["rank 1: Traceback", "layers.11.mlp", "broke"],
    ),
    "the export, on all ranks": (
        SyncCase(export_fails=(-1, 5)),
        [f"rank {rank}: Traceback" for rank in range(WORLD_SIZE)],
    ),
    # Nobody can take the dead rank's part; the others leave when their own collective gives up.
    "the export, amid its collectives": (
        SyncCase(export_fails=(1, 5), export_timeout_s=2),
        ["rank 1: Traceback", "layers.5.mlp", "broke"],
    ),
    "a bucket more": (
        SyncCase(num_tensors_on={1: 16}, collective=False),
        ["the ranks exported different tensors"],
    ),
    "one tensor less in a replica": (
        SyncCase(num_tensors_on={2: 11, 3: 11}, collective=False),
        ["the ranks exported different tensors"],
    ),
    "nothing on one rank": (
        SyncCase(num_tensors_on={3: 0}, collective=False),
        ["exported no tensor"],
    ),
    "nothing at all": (SyncCase(num_tensors=0), ["the trainer exported no tensor"]),
}
"""What fails, and what every rank's error says."""


@pytest.mark.parametrize(("case", "texts"), FAILS.values(), ids=FAILS)
def test_what_fails_on_a_rank_fails_on_all_and_is_published_nowhere(pool, case, texts):
    """A later sync works in the same processes and groups."""
    outcomes = pool.run(sync, case)
    (error,) = {outcome.error for outcome in outcomes}
    assert error is not None and error.startswith("weight sync failed")
    for text in texts:
        assert text in error
    assert max(outcome.seconds for outcome in outcomes) < 30
    assert not any(outcome.num_published for outcome in outcomes)
    if case.export_fails is None:
        for rank, outcome in enumerate(outcomes):
            assert outcome.drained
            assert outcome.exported == case.num_tensors_on.get(rank, case.num_tensors)
    good = SyncCase(mode=case.mode, tp=case.tp, seed=1)
    check_arrived(good, pool.run(sync, good))
