"""Trainer ranks as real processes on gloo, with an engine that records, for the tests of a sync.

    outcomes = pool.run(sync, SyncCase(tp=2, load_fails=(0, 1)))  # one outcome per rank

The processes stay for the whole test session, so that a test may run a good sync after a failed one
in the same processes. A rank that does not answer in time ends the pool; the next run starts it
anew.
"""

import asyncio
import hashlib
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sglang_loader.manifest_verdict import ManifestVerdict
from sglang_loader.weight_manifest import decode_manifest

WORLD_SIZE = 4
LIMIT_S = 30.0
# The ranks are forked from a server that has imported these, which take 12 s, once.
PRELOADED = [
    "sglang.srt.utils",
    "verl.utils.ulysses",
    "verl.workers.engine.fsdp.transformer_impl",
    "verl_sglang_sync.weight_sync",
    "unit.exchange_ranks",
]


class RanksHang(AssertionError):
    """Some ranks did not come back within the limit."""


class RankPool:
    """`WORLD_SIZE` processes in one gloo group; each runs what it is sent."""

    def __init__(self):
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._ranks = []
        self._folder = None

    def run(self, function, *args, limit_s=LIMIT_S):
        """Call `function(*args)` on every rank; return the results by rank.

        Raises:
            RanksHang: a rank took longer than `limit_s`; all are ended.
        """
        if not self._ranks:
            self._start()
        for _, connection in self._ranks:
            connection.send((function, args))
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        deadline, results = time.monotonic() + limit_s, {}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise RanksHang(f"ranks {sorted(waiting.values())} hang, limit {limit_s:g} s")
            for connection in ready:
                results[waiting.pop(connection)] = connection.recv()
        errors = [f"rank {rank}: {error}" for rank, (error, _) in results.items() if error]
        assert not errors, "\n".join(errors)
        return [results[rank][1] for rank in range(WORLD_SIZE)]

    def close(self):
        """End the processes."""
        for process, connection in self._ranks:
            connection.close()
            process.terminate()
            process.join()
        if self._folder is not None:
            self._folder.cleanup()
        self._ranks, self._folder = [], None

    def _start(self):
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = Path(self._folder.name) / "rendezvous"
        for rank in range(WORLD_SIZE):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(rank, rendezvous.as_uri(), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        self.run(dist.barrier, limit_s=90)  # imports and rendezvous are not what tests time


def _serve(rank, rendezvous, connection):
    torch.set_num_threads(1)
    mp.set_sharing_strategy("file_system")
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD_SIZE)
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            answer = None, function(*args)
        except Exception:
            answer = traceback.format_exc(), None
        connection.send(answer)


_meshes = {}


def trainer_group(tp):
    """The group of this rank where each replica has `tp` ranks, kept from case to case."""
    from torch.distributed.device_mesh import init_device_mesh

    from verl_sglang_sync.collective import TorchTrainerGroup

    if tp not in _meshes:
        _meshes[tp] = init_device_mesh(
            "cpu", (WORLD_SIZE // tp, tp), mesh_dim_names=("dp", "infer_tp")
        )["infer_tp"]
    return TorchTrainerGroup(_meshes[tp]), _meshes[tp].get_local_rank() == 0


def barrier_of(ranks):
    """Enter a barrier of all on some ranks only, which then hang."""
    if dist.get_rank() in ranks:
        dist.barrier()


@dataclass(frozen=True, kw_only=True)
class SyncCase:
    """One sync: `num_tensors` tensors, four to a bucket.

    Attributes:
        load_fails: (leader's rank, bucket) pairs at which the engine refuses.
        bad_tensor: (rank, tensor, kind): a `Spoiled` tensor is exported there.
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
    load_fails: tuple[tuple[int, int], ...] = ()
    bad_tensor: tuple[int, int, str] | None = None
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
        num_loads: buckets that reached the engine, refused ones included.
    """

    error: str | None = None
    exported: int = 0
    drained: bool = False
    loaded: list[dict[str, str]] = field(default_factory=list)
    num_loads: int = 0
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


class Unshareable(torch.Tensor):
    """Cannot be turned into a handle."""

    def detach(self):
        raise RuntimeError("this tensor cannot be shared")


class Unclonable(torch.Tensor):
    """Stands for a clone that runs out of memory."""

    def clone(self, *args, **kwargs):
        raise RuntimeError("out of memory while cloning")


SPOIL = {
    "without data": lambda tensor: tensor.to("meta"),
    "unshareable": lambda tensor: tensor.as_subclass(Unshareable),
    "unclonable": lambda tensor: torch.stack([tensor, tensor])[0].as_subclass(Unclonable),
}


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
        if case.bad_tensor and case.bad_tensor[:2] == (rank, index):
            tensor = SPOIL[case.bad_tensor[2]](tensor)
        outcome.exported += 1
        yield name_of(index), tensor
    outcome.drained = True


def _open(handle, load_format):
    """Map one TP rank's handles as the engine's process does."""
    from sglang.srt.utils import MultiprocessingSerializer

    from sglang_loader.bucket_loader import FLATTENED_LOADER, tensor_views
    from sglang_loader.manifest import decode

    named_tensors = MultiprocessingSerializer.deserialize(handle)
    if load_format != FLATTENED_LOADER:
        return named_tensors
    ((text, flat),) = named_tensors
    return tensor_views(decode(text), flat)


def sync(case):
    """Run one sync on this rank."""
    from verl_sglang_sync.packing import FlattenedPacker, NamedTensorPacker
    from verl_sglang_sync.report import SyncReport
    from verl_sglang_sync.weight_sync import WeightSyncError, run_sync

    group, is_leader = trainer_group(case.tp)
    export_group = None
    if case.export_timeout_s is not None:
        export_group = dist.new_group(timeout=timedelta(seconds=case.export_timeout_s))
    outcome = SyncOutcome()

    async def load(handles, parcel):
        assert is_leader
        assert len(handles) == case.tp
        outcome.num_loads += 1
        await asyncio.sleep(case.load_takes_s)
        if (dist.get_rank(), parcel.plan.index) in case.load_fails:
            raise RuntimeError(f"the engine refused bucket {parcel.plan.index}")
        outcome.loaded = outcome.loaded or [{} for _ in handles]
        for loaded, handle in zip(outcome.loaded, handles, strict=True):
            for name, tensor in _open(handle, parcel.load_format):
                assert name not in loaded
                loaded[name] = digest(tensor)

    report = SyncReport(mode=case.mode, replica=0)
    packer = FlattenedPacker if case.mode == "flattened" else NamedTensorPacker
    started = time.monotonic()
    try:
        asyncio.run(
            run_sync(
                _export(case, outcome, export_group),
                packer=packer(device=torch.device("cpu"), bucket_bytes=4 * 256, report=report),
                group=group,
                load=load,
                report=report,
            )
        )
    except WeightSyncError as error:
        outcome.error = str(error)
    outcome.seconds = time.monotonic() - started
    return outcome


class RecordingEngine:
    """An `Engine` that writes down what it is asked, and fails where told.

    Args:
        events: gets (operation, details).
        fails: operation that raises: "release", "resume weights", "resume kv_cache", "update".
    """

    def __init__(self, events, fails=None):
        self._events = events
        self.fails = fails
        self.verdict = ManifestVerdict()
        self.announced = []

    def _record(self, operation, *details):
        self._events.append((operation, *details))
        if self.fails == operation:
            raise RuntimeError(f"the engine cannot {operation}")

    async def release_memory(self, tags):
        self._record("release", *tags)
        return costs_of(tags)

    async def resume_memory(self, tags):
        self._record(" ".join(("resume", *tags)))
        return costs_of(tags)

    async def check_manifest(self, encoded):
        self.announced.append(decode_manifest(encoded))
        self._record("check")
        return [self.verdict]

    async def update_weights(self, handles, *, load_format, flush_cache, weight_version, key):
        self._record("update", load_format.rpartition(".")[2], flush_cache, weight_version)


def costs_of(tags):
    """What a stage costs in a `RecordingEngine` of two ranks."""
    return {tag: {"seconds": [1, 2], "gpu_bytes": [5, 5], "host_bytes": [0, 3]} for tag in tags}


@dataclass(frozen=True, kw_only=True)
class StageCase:
    """One pass through the sharding manager: wake, body, sleep.

    Attributes:
        fails: (leader's rank, operation) that its engine refuses.
        report_file: where every replica's leader writes its line.
    """

    tp: int = 2
    report_file: str | None = None
    mode: str = "flattened"
    multi_stage_wake_up: bool = True
    fails: tuple[int, str] | None = None


def stages(case):
    """Go through a sharding manager's stages on this rank; return (events, error)."""
    from verl_sglang_sync.config import WeightSyncConfig
    from verl_sglang_sync.sharding_manager import SGLangShardingManager
    from verl_sglang_sync.weight_sync import WeightSyncError

    group, is_leader = trainer_group(case.tp)
    events = []
    fails = case.fails[1] if case.fails and case.fails[0] == dist.get_rank() else None
    manager = SGLangShardingManager(
        engine=RecordingEngine(events, fails) if is_leader else None,
        settings=WeightSyncConfig(
            mode=case.mode,
            report_file=case.report_file,
            bucket_bytes=256,
            multi_stage_wake_up=case.multi_stage_wake_up,
            free_cache_engine=True,
        ),
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
