"""One sync: it arrives bit by bit on every rank, or is published on none, and never hangs."""

import asyncio
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from support.settings import settings_of
from unit.serving_engine import ServingEngine
from unit.trainer_ranks import WORLD_SIZE, RanksHang, SyncCase, barrier_of, expected, sync
from verl_sglang_sync import WeightSyncError
from verl_sglang_sync.collective import SingleProcess
from verl_sglang_sync.report import SyncReport, warn_once
from verl_sglang_sync.routes.pull.route import NOT_IN_PLACE
from verl_sglang_sync.sync.transport import SessionTransport

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


# One process is enough for what follows.


class Trainer:
    """A rank on its own, and its engine."""

    def __init__(self, mode, bucket_bytes=1024):
        self.engine = ServingEngine()
        self.mode = mode
        config = settings_of(
            mode,
            bucket_bytes=bucket_bytes,
            request_timeout_s=20,
            manifest_check="off",
            free_cache_engine=False,
        )
        self.transport = SessionTransport(
            engine=self.engine,
            settings=config.for_session(),
            group=SingleProcess(),
            device=torch.device("cpu"),
        )

    def sync(self, weights):
        """One sync; its report."""
        report = SyncReport(mode=self.mode, replica=0)
        asyncio.run(self.transport.sync(iter(weights), version="1", report=report))
        return report

    def received(self, weights):
        """What the engine's `load_weights` saw in one sync: contents by name, in order."""
        self.sync(weights)
        return {name: content(t) for name, t in self.engine.models[0].loaded.items()}


@pytest.fixture(scope="module")
def trainers():
    """One of each mode, for one sync after the other."""
    return {mode: Trainer(mode) for mode in MODES}


def content(tensor):
    """Everything that must arrive: dtype, shape, and the bytes in logical order."""
    with torch.no_grad():
        raw = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(raw.tolist())


def contents(weights):
    return {name: content(tensor) for name, tensor in weights}


DTYPES = (
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int64,
    torch.bool,
)


def filled(shape, dtype, seed=0):
    """Random bytes as a tensor; for bool random truth values."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, high, (nbytes,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)


def transposed(shape, dtype, seed):
    return filled(shape[::-1], dtype, seed).permute(tuple(range(len(shape)))[::-1])


def row_of_a_bigger_one(shape, dtype, seed):
    return filled((3, *shape), dtype, seed)[1]


def every_second_column(shape, dtype, seed):
    return filled((*shape, 2), dtype, seed)[..., 1]


def expanded(shape, dtype, seed):
    return filled(shape[1:], dtype, seed).expand(shape)


LAYOUTS = (filled, transposed, row_of_a_bigger_one, every_second_column, expanded)


@st.composite
def exports(draw):
    weights = []
    for index in range(draw(st.integers(1, 12))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        layout = draw(st.sampled_from(LAYOUTS))
        weights.append((f"model.{index}", layout(shape, draw(st.sampled_from(DTYPES)), index)))
    return weights


@both_modes
@settings(max_examples=30)
@given(weights=exports())
def test_what_arrives_is_what_was_exported(trainers, mode, weights):
    assert trainers[mode].received(weights) == contents(weights)


def test_the_layouts_are_what_they_say():
    shape = (3, 4)
    made = {layout.__name__: layout(shape, torch.float32, 0) for layout in LAYOUTS}
    assert {name for name, tensor in made.items() if not tensor.is_contiguous()} == {
        "transposed",
        "every_second_column",
        "expanded",
    }
    in_bigger = {n for n, t in made.items() if t.untyped_storage().nbytes() > t.nbytes}
    assert in_bigger == {"row_of_a_bigger_one", "every_second_column"}
    assert all(tensor.shape == shape for tensor in made.values())


def test_the_comparison_sees_one_wrong_bit():
    tensor = filled((3, 4), torch.bfloat16)
    other = tensor.clone()
    other.view(torch.int16)[1, 2] ^= 1
    assert content(tensor) == content(tensor.clone())
    assert content(tensor) != content(other)
    assert content(tensor) != content(tensor.view(torch.float16))


TIED = filled((4, 4), torch.float32)
UNUSUAL = {
    "every dtype in one bucket": [(str(dtype), filled((3,), dtype)) for dtype in DTYPES],
    "not a number, negative zero": [
        ("w", torch.tensor([0x7FC1, -62, -32768, 0x7F80], dtype=torch.int16).view(torch.bfloat16))
    ],
    "one tensor, ten times a bucket": [("giant", filled((10, 256), torch.float32))],
    "a giant among others": [
        ("a", torch.ones(4)),
        ("giant", filled((10, 256), torch.float32)),
        ("b", torch.zeros(4)),
    ],
    "nothing but empty tensors": [
        ("a", torch.empty(0, 3)),
        ("b", torch.empty(2, 0, dtype=torch.bfloat16)),
    ],
    "one memory under two names": [("model.embed_tokens.weight", TIED), ("lm_head.weight", TIED)],
    "parameters, and views of them": [
        (str(i), part)
        for i, part in enumerate(nn.Parameter(filled((8, 4), torch.float32)).chunk(2))
    ],
}


@both_modes
@pytest.mark.parametrize("weights", UNUSUAL.values(), ids=UNUSUAL.keys())
def test_unusual_exports_arrive(trainers, mode, weights):
    assert trainers[mode].received(weights) == contents(weights)


@both_modes
def test_a_name_exported_twice_is_refused(mode):
    with pytest.raises(WeightSyncError, match="'w' was exported twice"):
        Trainer(mode).sync([("w", torch.zeros(1)), ("w", torch.ones(1))])


@pytest.mark.parametrize(("mode", "num_buffers"), (("bucketed", 1), ("flattened", 2)))
def test_the_report_counts_a_sync(mode, num_buffers):
    report = Trainer(mode).sync([(f"t{i}", torch.ones(64)) for i in range(9)])
    assert (report.num_buckets, report.num_tensors, report.payload_bytes) == (3, 9, 9 * 256)
    assert (report.num_replayed, report.num_eager) == (0, 3)
    assert report.staging_bytes == num_buffers * 1024
    assert {"export", "pack", "load", "commit"} <= set(report.seconds)


@both_modes
def test_a_failed_sync_drains_an_export_that_fails_again(mode):
    seen, trainer = [], Trainer(mode)

    def export():
        for i in range(12):
            seen.append(i)
            yield f"t{i}", torch.ones(64)
        seen.append("end")
        raise RuntimeError("and the export broke as well")

    trainer.engine.models[0].fails_at = 0
    with pytest.raises(WeightSyncError, match="the engine refused") as error:
        trainer.sync(export())
    assert seen == [*range(12), "end"]
    assert "rank 0: Traceback" in str(error.value)


@both_modes
@pytest.mark.parametrize("is_fused", (False, True))
def test_no_more_than_a_bucket_and_the_next_tensor_is_held(mode, is_fused):
    refs, alive = [], []

    def export():
        for index in range(12):
            tensor = torch.ones(2 if is_fused else 1, 64)
            refs.append(StorageWeakRef(tensor.untyped_storage()))
            alive.append(sum(not ref.expired() for ref in refs))
            for i, row in enumerate(tensor):
                yield f"t{index}.{i}", row
                del row
            del tensor

    Trainer(mode).sync(export())
    assert len(refs) == 12
    assert max(alive) == (3 if is_fused else 5)  # four rows make a bucket, the fifth closes it


class ByName(nn.Module):
    """Has a parameter for each tensor, so that a load plan can be made."""

    def __init__(self, weights):
        super().__init__()
        for name, tensor in weights:
            parameter = nn.Parameter(torch.zeros_like(tensor), requires_grad=False)
            self.register_parameter(name, parameter)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).copy_(tensor)


@pytest.mark.parametrize("mode", ("compiled", *MODES))
def test_only_compiled_makes_a_plan_and_all_modes_load_the_same(mode):
    seen, trainer = [], Trainer(mode)
    for seed in range(3):
        weights = [(f"t{i}", filled((8, 16), torch.bfloat16, 10 * seed + i)) for i in range(9)]
        if not seed:
            trainer.engine.models = [ByName(weights)]
        report = trainer.sync(weights)
        seen.append((report.num_replayed, report.num_eager))
        assert contents(trainer.engine.models[0].named_parameters()) == contents(weights)
    replayed = [(0, 3), (3, 0), (3, 0)]
    assert seen == (replayed if mode == "compiled" else [(0, 3)] * 3)


def test_an_export_that_names_no_parameters_is_packed_and_the_trainer_says_so_once(caplog):
    warn_once.cache_clear()
    weights = [(f"t{i}", filled((8, 16), torch.bfloat16, i)) for i in range(9)]
    trainer = Trainer("compiled")
    trainer.engine.models = [ByName(weights)]
    for _ in range(3):
        assert trainer.sync(weights).num_pulled == 0
    said = [record.getMessage() for record in caplog.records if NOT_IN_PLACE in record.getMessage()]
    assert len(said) == 1
    assert "FSDP2, without adapters" in said[0]
