"""One sync: it arrives bit by bit on every rank, or is published on none, and never hangs."""

import hashlib
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from unit.serving_engine import ServingEngine, colocated, synced
from unit.trainer_ranks import TIMEOUT_S, WORLD_SIZE, trainer_ranks
from verl_sglang_sync import WeightSyncError
from verl_sglang_sync.sources.export import Reexport


@dataclass(frozen=True, kw_only=True)
class SyncCase:
    """One sync: `num_tensors` tensors, four to a bucket.

    Attributes:
        load_fails: (leader's rank, TP rank, bucket): its engine refuses.
        bad_tensor: (rank, tensor): one that cannot be packed is exported there.
        export_fails: (rank, tensor) at which the trainer's generator raises; rank -1 is all, and
            tensor -1 is before there is a generator.
        num_tensors_on: ranks that export another number of tensors.
        collective: gather each tensor's shards from all ranks, as FSDP's export does.
        export_timeout_s: of the export's own collectives.
        load_takes_s: how long the engine waits before it reads a bucket.
    """

    mode: str = "flattened"
    tp: int = 2
    num_tensors: int = 12
    seed: int = 0
    load_fails: tuple[int, int, int] | None = None
    bad_tensor: tuple[int, int] | None = None
    export_fails: tuple[int, int] | None = None
    num_tensors_on: dict[int, int] = field(default_factory=dict)
    collective: bool = True
    export_timeout_s: float | None = None
    load_takes_s: float = 0.0


@dataclass
class SyncOutcome:
    """What one rank saw of a sync.

    Attributes:
        error: text of the `WeightSyncError`.
        exported: tensors the generator gave.
        drained: the generator was run to its end.
        loaded: by TP rank: digest by name, on the leader; in loading order.
        num_loads: buckets that reached each TP rank, refused ones included.
        num_published: syncs that the leader's engine took as good.
    """

    error: str | None = None
    exported: int = 0
    drained: bool = False
    loaded: list[dict[str, str]] = field(default_factory=list)
    num_loads: list[int] = field(default_factory=list)
    num_published: int = 0
    seconds: float = 0.0


def name_of(index):
    return f"model.layers.{index}.mlp.down_proj.weight"


def full_tensor(seed, index):
    """256 bytes as float32, or 128 as bfloat16: one alignment unit each."""
    generator = torch.Generator().manual_seed(1000 * seed + index)
    full = torch.randn(WORLD_SIZE, 16, generator=generator)
    return full.bfloat16() if index % 2 else full


def digest(tensor):
    raw = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(raw).hexdigest()}"


def expected(case):
    """What every TP rank must have loaded."""
    return {name_of(i): digest(full_tensor(case.seed, i)) for i in range(case.num_tensors)}


def _export(case, outcome, group):
    rank = dist.get_rank()
    for index in range(case.num_tensors_on.get(rank, case.num_tensors)):
        if case.export_fails in ((rank, index), (-1, index)):
            raise RuntimeError(f"the export of {name_of(index)} broke")
        tensor = full_tensor(case.seed, index)
        if case.collective:
            shards = [torch.empty_like(shard) for shard in tensor.chunk(WORLD_SIZE)]
            dist.all_gather(shards, tensor.chunk(WORLD_SIZE)[rank].contiguous(), group=group)
            tensor = torch.cat(shards)
        if case.bad_tensor == (rank, index):
            tensor = tensor.to("meta")
        outcome.exported += 1
        yield name_of(index), tensor
    outcome.drained = True


def sync(case):

    ranks, is_leader = trainer_ranks(case.tp)
    export_group = None
    if case.export_timeout_s is not None:
        export_group = dist.new_group(timeout=timedelta(seconds=case.export_timeout_s))
    outcome, engine = SyncOutcome(), ServingEngine(tp=case.tp)
    for model in engine.models:
        model.load_takes_s = case.load_takes_s
    if case.load_fails is not None and case.load_fails[0] == dist.get_rank():
        engine.models[case.load_fails[1]].fails_at = case.load_fails[2]
    limits = {"bucket_bytes": 4 * 256, "request_timeout_s": TIMEOUT_S}
    keys = {"manifest_check": "off", "free_cache_engine": False, **limits}
    weight_sync = colocated(engine if is_leader else None, case.mode, ranks, **keys)
    weights = _export(case, outcome, export_group)
    if case.export_fails == (dist.get_rank(), -1):
        weights = Reexport(Mock(side_effect=RuntimeError("the export was not begun")))
    started = time.monotonic()
    try:
        synced(weight_sync, weights, case.mode)
    except WeightSyncError as error:
        outcome.error = str(error)
    outcome.seconds = time.monotonic() - started
    if is_leader:
        outcome.loaded = [
            {name: digest(tensor) for name, tensor in model.loaded.items()}
            for model in engine.models
        ]
        outcome.num_loads = [model.num_loads for model in engine.models]
        outcome.num_published = engine.num_published
    return outcome


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


@pytest.mark.parametrize("mode", ["flattened", "compiled"])
def test_no_rank_packs_into_a_buffer_in_use(pool, mode):
    """Nothing in the export holds the ranks back here: its tensors are whole on each of them."""
    case = SyncCase(mode=mode, collective=False, load_takes_s=0.2)
    check_arrived(case, pool.run(sync, case))


REFUSED = "RuntimeError: the engine refused bucket"
UNPACKED = "Cannot copy out of meta tensor"
FIRST, LAST = 0, 2  # the buckets of a case: three of four tensors each
FAILS = {
    "a load": (SyncCase(tp=4, load_fails=(0, 3, FIRST)), ["rank 3: Traceback", f"{REFUSED} 0"]),
    "a load of the last bucket": (
        SyncCase(mode="flattened", load_fails=(2, 1, LAST)),
        ["rank 3: Traceback", f"{REFUSED} 2"],
    ),
    "packing": (
        SyncCase(mode="flattened", tp=1, bad_tensor=(1, 0)),
        ["rank 1: Traceback", UNPACKED],
    ),
    "packing the last tensor": (SyncCase(bad_tensor=(2, 11)), ["rank 2: Traceback", UNPACKED]),
    "the export": (
        SyncCase(export_fails=(1, 11), collective=False),
        ["rank 1: Traceback", "layers.11.mlp", "broke"],
    ),
    "the export, as it begins": (
        SyncCase(export_fails=(1, -1), collective=False),
        ["rank 1: Traceback", "the export was not begun"],
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
        ["the trainer ranks exported different tensors"],
    ),
    "one tensor less in a replica": (
        SyncCase(num_tensors_on={2: 11, 3: 11}, collective=False),
        ["the trainer ranks exported different tensors"],
    ),
    "nothing on one rank": (
        SyncCase(num_tensors_on={3: 0}, collective=False),
        ["exported no tensor"],
    ),
    "nothing at all": (SyncCase(num_tensors=0), ["the trainer exported no tensor"]),
}
"""What fails, and what every rank's error says."""


@pytest.mark.parametrize(("case", "texts"), FAILS.values(), ids=FAILS)
def test_one_ranks_failure_publishes_nowhere(pool, case, texts):
    """In a later sync every tensor reaches every TP rank of every replica, in the same processes
    and groups.
    """
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
    outcomes = pool.run(sync, good)
    check_arrived(good, outcomes)
    with pytest.raises(AssertionError):  # the check sees other weights
        check_arrived(replace(good, seed=2), outcomes)
