"""Trainer ranks as real processes on gloo, each replica with an engine, for the tests of a sync.

    outcomes = pool.run(sync, SyncCase(tp=2, load_fails=(0, 1)))  # one outcome per rank

The processes stay for the whole test session, so that a test may run a good sync after a failed one
in the same processes. A rank that does not answer in time ends the pool; the next run starts it
anew.
"""

import asyncio
import hashlib
import os
import socket
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from support.remote import Remote, finish, results_of
from support.settings import settings_of
from unit.serving_engine import ServingEngine

WORLD_SIZE = 4
LIMIT_S = 60.0
TIMEOUT_S = 20.0


class RankPool:
    """`WORLD_SIZE` processes in one gloo group; each runs what it is sent. `folder` gets logs."""

    def __init__(self, folder):
        self._folder, self._ranks = folder, []

    def run(self, function, *args, limit_s=LIMIT_S, lost=()):
        """Call `function(*args)` on every rank; return the results by rank, None of the `lost`.

        None may fail, or take longer than `limit_s`; then all are ended.
        """
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            rank.begin(_call, function, args)
        awaited = [rank for rank in range(WORLD_SIZE) if rank not in lost]
        outcomes = finish([self._ranks[rank] for rank in awaited], limit_s)
        if None in outcomes:
            self.close()
        found = dict(zip(awaited, results_of(outcomes), strict=True))
        return [found.get(rank) for rank in range(WORLD_SIZE)]

    def close(self):
        for rank in self._ranks:
            rank.kill()  # also where it is stopped
            rank.end()
        self._ranks = []

    def _start(self):
        with socket.socket() as probe:  # rank 0 serves torch's store there, as in a trainer
            probe.bind(("127.0.0.1", 0))
            rendezvous = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        for rank in range(WORLD_SIZE):
            join, log = partial(_join, rank, rendezvous), self._folder / f"rank{rank}.log"
            self._ranks.append(Remote(join, environment=os.environ, log=log))
        results_of(finish(self._ranks, 150))  # imports and rendezvous are not what tests time


def _join(rank, rendezvous):
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy("file_system")
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD_SIZE)


def _call(_, function, args):
    return function(*args)


_groups = {}


def trainer_group(tp):
    """The group of this rank where each replica has `tp` ranks, kept from case to case."""
    from torch.distributed.device_mesh import init_device_mesh

    from verl_sglang_sync.collective import TorchTrainerGroup

    if tp not in _groups:
        mesh = init_device_mesh("cpu", (WORLD_SIZE // tp, tp), mesh_dim_names=("dp", "infer_tp"))[
            "infer_tp"
        ]
        group = TorchTrainerGroup(timeout_s=TIMEOUT_S, tp_mesh=mesh)
        _groups[tp] = group, mesh.get_local_rank() == 0
    return _groups[tp]


@dataclass(frozen=True, kw_only=True)
class SyncCase:
    """One sync: `num_tensors` tensors, four to a bucket.

    Attributes:
        load_fails: (leader's rank, TP rank, bucket): its engine refuses.
        bad_tensor: (rank, tensor): one that cannot be packed is exported there.
        export_fails: (rank, tensor) at which the trainer's generator raises; rank -1 is all.
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
    from verl_sglang_sync import WeightSyncError
    from verl_sglang_sync.report import SyncReport
    from verl_sglang_sync.sync.transport import colocated_transport

    group, is_leader = trainer_group(case.tp)
    export_group = None
    if case.export_timeout_s is not None:
        export_group = dist.new_group(timeout=timedelta(seconds=case.export_timeout_s))
    outcome, engine = SyncOutcome(), ServingEngine(tp=case.tp)
    for model in engine.models:
        model.load_takes_s = case.load_takes_s
    if case.load_fails is not None and case.load_fails[0] == dist.get_rank():
        engine.models[case.load_fails[1]].fails_at = case.load_fails[2]
    limits = {"bucket_bytes": 4 * 256, "request_timeout_s": TIMEOUT_S}
    settings = settings_of(case.mode, manifest_check="off", free_cache_engine=False, **limits)
    transport = colocated_transport(
        engine=engine if is_leader else None,
        settings=settings.for_session(),
        group=group,
        device=torch.device("cpu"),
    )
    weights, report = _export(case, outcome, export_group), SyncReport(mode=case.mode, replica=0)
    started = time.monotonic()
    try:
        asyncio.run(transport.sync(weights, version="1", report=report))
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


@dataclass(frozen=True, kw_only=True)
class StageCase:
    """One pass through the sharding manager: wake, body, sleep.

    Attributes:
        fails: (leader's rank, operation) that its engine refuses.
        report_file: where every replica's leader writes its line.
    """

    tp: int = 2
    report_file: str | None = None
    fails: tuple[int, str] | None = None


def stages(case):
    """Go through a sharding manager's stages on this rank; return (events, error)."""
    from verl_sglang_sync import WeightSyncError
    from verl_sglang_sync.sync.sharding_manager import SGLangShardingManager

    group, is_leader = trainer_group(case.tp)
    events = []
    fails = case.fails[1] if case.fails and case.fails[0] == dist.get_rank() else None
    manager = SGLangShardingManager(
        engine=ServingEngine(events, fails, tp=case.tp) if is_leader else None,
        settings=settings_of("flattened", report_file=case.report_file, bucket_bytes=256),
        group=group,
        device=torch.device("cpu"),
        replica=dist.get_rank() // case.tp,
        export=lambda: ((name_of(i), full_tensor(0, i)) for i in range(2)),
        free_trainer=lambda: events.append(("free trainer",)),
        barrier=lambda: (dist.barrier(), events.append(("barrier",))),
    )
    error = None
    try:
        with manager:
            events.append(("body",))
    except WeightSyncError as raised:
        error = str(raised)
    return events, error
