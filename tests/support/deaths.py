"""Deaths in the middle of a sync, on any device, and what must hold of all that lives on.

A trainer dies while engines read its memory, an engine while it maps the trainer's memory, and a
trainer frees memory that engines read.
"""

import gc
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from tiny_assets import make_assets

from sglang_loader.common.copies.strided import synchronize
from sglang_loader.common.engine_settings import STALE_REQUESTS_VARIABLE
from support.engine_loaders import PAUSE_LOADER
from support.enlarged import enlarge
from support.exports import KeptExport, ShardedExport, mappable
from support.http_requests import status_of_request
from support.served import Served, served
from support.storm_checks import shared_memory
from support.trainer import ON_GPUS, NamedTensors, Ranks, TrainerRank, report_of_cycle
from verl_sglang_sync.engine.engine_ranks import wait_for

MIB = 1 << 20
SCALES = (0.5, 2.0, 1.0)
"""Weights of the good syncs before a death."""
AFTER = (2.0, 0.5, 1.0)
"""Weights of the good syncs after it, by a trainer or with an engine that is new."""
DYING = 4.0
PAUSED_AT = 2
"""Bucket before which the engine pauses."""
LIMIT_S = 20.0
SETTLES_WITHIN_S = 10.0
GARBAGE = 7.0
BACKENDS = {"cpu": {}, "cuda": {"backend": "cpu:gloo,cuda:nccl", **ON_GPUS}}
QUICK_START = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
    "--disable-prefill-cuda-graph",
)
"""On a GPU: no test starts as many engines, and what they compute with plays no part here."""
BUCKET_BYTES = {"cpu": 32 << 10, "cuda": 64 * MIB}
SPARE_BYTES = {
    "cpu": {"allocated": 0},
    "cuda": {"allocated": 48 * MIB, "reserved": 512 * MIB},
}
"""By how much the trainer's memory may grow. Each dead engine has mapped more than this."""


def make_model(folder: Path, device: str) -> Path:
    """Write a config and a tokenizer to `folder/model`; a GPU's model is larger. No weights."""
    make_assets(folder)
    if device != "cpu":
        enlarge(folder / "model")
        (folder / "model" / "model.safetensors").unlink()
    return folder / "model"


@contextmanager
def engine_of(folder: Path, model: Path, device: str, **options: Any) -> Iterator[Served]:
    """Serve random weights; requests that come at a bad time are refused."""
    extra = ("--load-format", "dummy", *(QUICK_START if device != "cpu" else ()))
    with served(
        folder,
        model=model,
        device=device,
        loaders=(PAUSE_LOADER,),
        extra=extra,
        host_backup="auto",
        variables={STALE_REQUESTS_VARIABLE: "0"},
        **options,
    ) as engine:
        yield engine


# Steps of a trainer rank.


def random_weights(rank: TrainerRank) -> NamedTensors:
    """The same on all ranks, by names of the checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(rank.folder / "model")
    dtype = torch.float32 if rank.device.type == "cpu" else torch.bfloat16
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config, dtype=dtype).state_dict()
    generator = torch.Generator(rank.device).manual_seed(0)
    return [
        (
            name,
            torch.empty(t.shape, dtype=dtype, device=rank.device).normal_(
                0, 0.1, generator=generator
            ),
        )
        for name, t in state.items()
    ]


def prepare(rank: TrainerRank, sharded: bool, settings: dict[str, Any]) -> None:
    """Make new weights in place of those before, and the manager of all syncs."""
    if rank.device.type != "cpu" and "export" in rank.kept:
        free_memory(rank.kept["export"])
    weights = random_weights(rank)
    kept = ShardedExport(weights, is_mappable=True) if sharded else KeptExport(weights)
    # SGLang keeps the errors of imports that fail, and an error the frames below it: this one, too.
    weights.clear()
    bucket_bytes = BUCKET_BYTES[rank.device.type]
    manager = rank.manager("compiled", timeout_s=LIMIT_S, bucket_bytes=bucket_bytes, **settings)
    rank.kept.update(export=kept, manager=manager, scale=1.0)


def free_memory(kept: KeptExport) -> None:
    """Free the memory of a GPU's weights, even if something still refers to the tensors."""
    for tensor in local_tensors(kept):
        tensor.untyped_storage().resize_(0)


def local_tensors(kept: KeptExport) -> list[torch.Tensor]:
    """Return the tensors of an export, of sharded ones this rank's parts."""
    return [t.to_local() if hasattr(t, "to_local") else t for t in kept.state.values()]


def scale_to(rank: TrainerRank, scale: float) -> None:
    """Multiply all weights, by a power of 2."""
    by, rank.kept["scale"] = scale / rank.kept["scale"], scale
    for tensor in local_tensors(rank.kept["export"]):
        tensor.mul_(by)


def sync(rank: TrainerRank, scale: float) -> dict[str, Any]:
    scale_to(rank, scale)
    weights = rank.kept["export"].reexport()
    return report_of_cycle(rank.kept["manager"], weights, str(scale))


def failing_sync(rank: TrainerRank, scale: float) -> str | None:
    """A sync from release to wake-up; its error."""
    from verl_sglang_sync import WeightSyncError

    try:
        sync(rank, scale)
    except WeightSyncError as error:
        return str(error)
    return None


def sync_and_die(rank: TrainerRank, scale: float, victim: int) -> str | None:
    """The victim is killed as soon as its engine has read a bucket."""
    from verl_sglang_sync.engine.session import TrainerSession

    poll = TrainerSession.poll

    def poll_and_die(self: TrainerSession) -> None:
        poll(self)
        if self.num_done:
            os.kill(os.getpid(), signal.SIGKILL)

    if rank.rank == victim:
        TrainerSession.poll = poll_and_die  # type: ignore[method-assign]
    return failing_sync(rank, scale)


def held_memory(rank: TrainerRank) -> dict[str, int]:
    """Bytes that this trainer process holds when it has collected its garbage."""
    gc.collect()
    if rank.device.type == "cpu":
        files = [path for path, pid in shared_memory().items() if pid == os.getpid()]
        return {"allocated": sum(path.stat().st_size for path in files if path.exists())}
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}


def use_server(rank: TrainerRank, url: str) -> None:
    """Have the rank's manager talk to another server from now on."""
    rank.client.base_url = url


def _has_read_all(session: Any) -> bool:
    return bool(session.num_done == session.num_loads)


def sync_with_reuse(rank: TrainerRank, scale: float, how: str) -> dict[str, Any]:
    """A sync during which some parameters lose their memory to garbage; see `check_reuse`."""
    from verl_sglang_sync.routes.table.table_source import TableSource
    from verl_sglang_sync.sources.snapshot import SourcesSnapshot

    state = rank.kept["export"].state
    names = list(state)[len(state) // 2 :: 2]
    right: dict[str, torch.Tensor] = {}
    rubbish: list[torch.Tensor] = []
    engine_ranks: list[Any] = []
    seen: dict[str, Any] = {"num": len(names), "reused": 0, "same": 0}
    send, confirm = TableSource.send, TableSource.confirm

    def send_garbage(self: TableSource, sessions: Any) -> None:
        if not right:
            engine_ranks.extend(sessions.engine_ranks)
            seen["places"] = {name: state[name].data_ptr() for name in names}
            right.update((name, state[name].clone()) for name in names)
            for name in names:
                state[name].fill_(GARBAGE)
            if how != "same address":
                _free(state, names)
                rubbish[:] = [torch.full_like(right[name], GARBAGE) for name in names]
                seen["reused"] = sum(each.data_ptr() in seen["places"].values() for each in rubbish)
                for name in names:
                    state[name].data = mappable(right[name].clone())
            synchronize(rank.device)
        send(self, sessions)

    def confirm_when_read(self: TableSource) -> None:
        if "attempts" not in seen:
            wait_for(engine_ranks, _has_read_all, LIMIT_S)
            if how == "same address":
                for name in names:
                    _free(state, [name])
                    place = seen["places"][name]
                    state[name].data = _at(place, right[name], rank.device)
                    seen["same"] += state[name].data_ptr() == place
        seen["attempts"] = seen.get("attempts", 0) + 1
        confirm(self)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(TableSource, "send", send_garbage))
        stack.enter_context(mock.patch.object(TableSource, "confirm", confirm_when_read))
        if how == "not confirmed":
            stack.enter_context(
                mock.patch.object(SourcesSnapshot, "require_unchanged", lambda *_: None)
            )
        seen["report"] = sync(rank, scale)
    return seen


_kept_alive: list[torch.Tensor] = []


def _free(state: dict[str, torch.Tensor], names: Sequence[str]) -> None:
    """Free the memory of some tensors. On a CPU it stays, since the next check needs its place."""
    for name in names:
        if state[name].device.type == "cpu":
            _kept_alive.append(state[name].detach())
        state[name].data = torch.empty(0, dtype=state[name].dtype, device=state[name].device)


def _at(place: int, values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor in a new storage, at this address where that can be had."""
    if device.type != "cpu":
        return values.clone()  # torch gives the block again that was freed last
    (old,) = (each for each in _kept_alive if each.data_ptr() == place)
    made = torch.from_numpy(old.numpy())
    return made.copy_(values)


# What is looked at from outside.


def pause_next_sync(engine: Served) -> Path:
    """Have the engine pause before bucket `PAUSED_AT`; returns the folder of the pause's files."""
    folder = engine.log_file.parent
    for file in (*folder.glob("paused*"), folder / "go"):
        file.unlink(missing_ok=True)
    engine.ask(PAUSE_LOADER, json.dumps({"folder": str(folder), "index": PAUSED_AT}))
    return folder


def wait_until(holds: Callable[[], Any], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(0.02)


def used_bytes(device: str, num: int) -> list[int]:
    """Return the bytes in use of each GPU, without those of processes of other tests."""
    if device == "cpu":
        return []
    return [_used_bytes_of(gpu) for gpu in range(num)]


def _used_bytes_of(gpu: int) -> int:
    while True:
        others = _bytes_of_others(gpu)
        used = torch.cuda.device_memory_used(gpu)
        if others == _bytes_of_others(gpu):
            return used - sum(others.values())


def _bytes_of_others(gpu: int) -> dict[int, int]:
    """Return the bytes by process of all processes but this one and those that it has started.

    Memory of a dead process that an engine still maps is no process's, and is in no entry.
    """
    import pynvml

    handle = torch.cuda._get_pynvml_handler(gpu)
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    users = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return {user.pid: user.usedGpuMemory or 0 for user in users if user.pid not in own}


def mapped_of(pids: Sequence[int], engine: Served) -> int:
    """Number of mappings in the engine's processes of CPU memory that the processes `pids` made."""
    made = tuple(f"/dev/shm/torch_{pid}_" for pid in pids)
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in engine.schedulers]
    return sum(name in line for text in maps for line in text.splitlines() for name in made)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def require_freed(device: str, alive: Sequence[int], held: Sequence[int]) -> None:
    """The GPUs' memory in use falls by what dead trainer ranks held, within some seconds.

    Args:
        alive: bytes in use, by GPU, when the ranks lived.
        held: bytes that each rank held.
    """
    now = used_bytes(device, len(alive))
    deadline = time.monotonic() + SETTLES_WITHIN_S
    while any(n > a - h for n, a, h in zip(now, alive, held, strict=False)):
        text = f"in use with the trainer {alive}, of which it held {held}; now {now}"
        assert time.monotonic() < deadline, f"memory of a dead trainer is not free: {text}"
        time.sleep(0.2)
        now = used_bytes(device, len(alive))
    print(f"GPUs with the trainer {alive}, of which it held {held}, after its death {now}")


def serves(engine: Served, scale: float, known: dict[float, Any]) -> None:
    """Assert that the engine serves the weights of that scale, and is asked for tokens."""
    assert engine.lives
    assert engine.version == str(scale)
    hashes = engine.hashes()
    assert hashes == known.setdefault(scale, hashes)
    assert status_of_request(engine.url) == 200
    assert len({str(hashes) for hashes in known.values()}) == len(known), "control"


# The deaths.


def check_trainer_dies(folder: Path, *, device: str, tp: int, moment: str) -> None:
    """A trainer rank is killed while engine ranks read its memory in place.

    Args:
        moment: "first read": the trainer is killed when it hears of the first bucket that was
            read; "paused": all engine ranks pause, and read on when the trainer is dead.
    """
    model, victim = make_model(folder, device), tp - 1
    known: dict[float, Any] = {}
    with engine_of(folder / "engine", model, device, tp=tp) as engine:
        schedulers = engine.schedulers
        print(f"{moment}: GPUs before any trainer {used_bytes(device, tp)}")
        dying = Ranks(folder, [engine.url], tp=tp, **BACKENDS[device])
        pids = [process.process.pid for process in dying.processes]
        try:
            dying.run(prepare, tp > 1, {})
            for scale in SCALES:
                reports = dying.run(sync, scale)
                serves(engine, scale, known)
            assert all(r["num_pulled"] == r["num_buckets"] > PAUSED_AT + 2 for r in reports)
            assert device != "cpu" or mapped_of(pids, engine), "control"
            held = [each["allocated"] for each in dying.run(held_memory)]
            alive = used_bytes(device, tp)
            good = SCALES[-1]
            if moment == "paused":
                pause = pause_next_sync(engine)
                dying.begin(failing_sync, DYING)
                paused = [pause / f"paused{rank}" for rank in range(tp)]
                wait_until(lambda: all(p.exists() for p in paused), LIMIT_S, "the engine pauses")
                dying.kill(victim)
                dying.processes[victim].process.wait(30)
                print(f"GPUs after the kill, still mapped: {used_bytes(device, tp)}")
                (pause / "go").touch()
            else:
                dying.begin(sync_and_die, DYING, victim)
            outcomes = dying.finish(3 * LIMIT_S)
            assert dying.processes[victim].is_dead
            for rank, outcome in enumerate(outcomes):
                if rank != victim:
                    assert outcome is not None and outcome.error is None
                    assert f"rank {victim}" in outcome.result, outcome
        finally:
            dying.end()
        wait_until(
            lambda: status_of_request(engine.url) == 503, SETTLES_WITHIN_S, "requests are refused"
        )
        assert engine.lives
        assert engine.schedulers == schedulers, "the engine's processes survive"
        assert engine.version == str(good), "nothing is published"
        assert engine.hashes() not in known.values(), "control: it died in the middle"
        assert mapped_of(pids, engine) == 0, "memory of a dead trainer stays mapped"
        require_freed(device, alive, held)
        with Ranks(folder, [engine.url], tp=tp, **BACKENDS[device]) as ranks:
            ranks.run(prepare, tp > 1, {})
            for scale in AFTER:
                reports = ranks.run(sync, scale)
                serves(engine, scale, known)
            assert all(report["num_pulled"] == report["num_buckets"] for report in reports)
        assert engine.schedulers == schedulers


@contextmanager
def servers(
    folder: Path, model: Path, device: str, *, num: int, ahead: int
) -> Iterator[Iterator[Served]]:
    """Yield `num` servers one after the other; up to `ahead` start beside those that are used."""

    def start(number: int) -> Served:
        return stack.enter_context(engine_of(folder / f"engine{number}", model, device))

    def started() -> Iterator[Served]:
        numbers, begun = iter(range(num)), deque[Future[Served]]()
        for number in numbers:
            begun.append(pool.submit(start, number))
            if len(begun) > ahead:
                yield begun.popleft().result()
        for future in begun:
            yield future.result()

    # A server ends with the thread that started it: the pool's threads live as long as the block.
    with ExitStack() as stack, ThreadPoolExecutor(ahead + 1) as pool:
        yield started()


def check_engine_dies(
    folder: Path, *, device: str, in_place: bool, num: int, ahead: int = 0
) -> None:
    """An engine is killed while it maps the trainer's memory, `num` times, and replaced each time.
    What the trainer process holds does not grow, and it can free its weights.

    Args:
        in_place: the engine maps the parameters; False: the staging buffers.
        ahead: see `servers`.
    """
    model = make_model(folder, device)
    settings = {} if in_place else {"routes": ["exchange"]}
    known: dict[float, Any] = {}
    held: list[dict[str, int]] = []
    with servers(folder, model, device, num=num + 1, ahead=ahead) as engines:
        engine = next(engines)
        with Ranks(folder, [engine.url], **BACKENDS[device]) as ranks:
            ranks.run(prepare, False, settings)
            for number in range(num):
                for scale in SCALES if in_place else SCALES[:1]:
                    [report] = ranks.run(sync, scale)
                    serves(engine, scale, known)
                assert (report["num_pulled"] > 0) == in_place
                outcome = kill_paused(engine, ranks)
                assert "gone" in outcome or "ReplyLost" in outcome, outcome
                held += ranks.run(held_memory)
                print(f"kill {number + 1}: trainer {held[-1]}, GPU {used_bytes(device, 1)}")
                engine = next(engines)
                ranks.run(use_server, engine.url)
            for scale in AFTER:
                ranks.run(sync, scale)
                serves(engine, scale, known)
            # An engine unmaps what it kept when another sync brings something else.
            ranks.run(prepare, False, {"routes": ["exchange"]})
            for scale in AFTER:
                ranks.run(sync, scale)
                serves(engine, scale, known)
            held += ranks.run(held_memory)
            print(f"at the end: trainer {held[-1]}, GPU {used_bytes(device, 1)}")
            for what, spare in SPARE_BYTES[device].items():
                grown = [each[what] - held[0][what] for each in held]
                assert max(grown) <= spare, f"{what} memory of the trainer grows: {held}"


def kill_paused(engine: Served, ranks: Ranks) -> str:
    """Kill all processes of an engine in the middle of a sync; returns the trainer's error."""
    pids, pause = engine.schedulers, pause_next_sync(engine)
    ranks.begin(failing_sync, DYING)
    wait_until((pause / "paused0").exists, LIMIT_S, "the engine pauses")
    os.killpg(engine.process.pid, signal.SIGKILL)
    engine.process.wait(10)
    wait_until(lambda: all(map(has_ended, pids)), LIMIT_S, "the engine's processes end")
    [outcome] = ranks.finish(3 * LIMIT_S)
    assert outcome is not None and outcome.error is None, outcome
    return str(outcome.result)


def check_reuse(folder: Path, *, device: str, how: str) -> None:
    """While engines read, the trainer frees some parameters, and garbage lies in their memory.

    Args:
        how: "elsewhere": the parameters are in other memory when the sync is confirmed, with the
            right bytes; "same address": they are where they were, in other storages; "not
            confirmed": the first, in a sync that is not confirmed, as a control.
    """
    model = make_model(folder, device)
    known: dict[float, Any] = {}
    with (
        engine_of(folder / "engine", model, device) as engine,
        Ranks(folder, [engine.url], **BACKENDS[device]) as ranks,
    ):
        ranks.run(prepare, False, {})
        for scale in (*SCALES, DYING):
            [report] = ranks.run(sync, scale)
            serves(engine, scale, known)
        assert report["num_pulled"] == report["num_buckets"] > PAUSED_AT
        [seen] = ranks.run(sync_with_reuse, AFTER[0], how)
        print(how, {key: value for key, value in seen.items() if key not in ("places", "report")})
        if how == "not confirmed":
            assert engine.hashes() not in known.values(), "control: the engine has read garbage"
        else:
            serves(engine, AFTER[0], known)
        if how == "same address" and device == "cpu":  # elsewhere that is torch's choice
            assert seen["same"] == seen["num"], "control"
        for scale in AFTER[1:]:
            ranks.run(sync, scale)
            serves(engine, scale, known)
