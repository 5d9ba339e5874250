"""What the trainer ranks of `test_never_a_wrong_weight` do: syncs that break off in bad moments.

An engine is stopped and continued by signals to its scheduler processes, whose ids the test
passes on.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import signal
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import zmq

from sglang_loader.common.session.messages import SESSION_FORMAT
from support.engine_steps import in_storages_of_their_own, weights_of, write_values
from support.engine_stop import STOP_LOADER
from support.http_requests import get, post, running_generation
from support.sglang_server import free_port
from support.trainer import NamedTensors, TrainerRank, engine_hashes
from verl_sglang_sync.engine.server_client import operations

GIVEN_UP_AFTER_S = 5.0
"""Limit of a request, and of a session's silence, where the engine is stopped."""

JOINS_WITHIN_S = 2.0
"""In which an engine joins a session on a busy machine; less than `GIVEN_UP_AFTER_S`."""

SETTLES_WITHIN_S = 5.0
"""In which a continued engine works off what had been sent to it."""

GARBAGE = 7.0


def use_limits(rank: TrainerRank, timeout_s: float) -> None:
    """Have the rank's requests end after `timeout_s`, in up to three attempts."""
    from verl_sglang_sync.engine.server_client import SGLangServerClient

    rank.client = SGLangServerClient(
        rank.url, timeout_s=timeout_s, rank=rank.rank, replica=rank.replica
    )


def error_of_sync(manager: Any, weights: Any, version: str) -> str | None:
    """One sync up to the last word of the engine; the `WeightSyncError` that it raised, or None."""
    from verl_sglang_sync import WeightSyncError

    try:
        asyncio.run(manager.sync(weights, version=version))
        asyncio.run(manager.resume(("kv_cache",)))  # it is resident
    except WeightSyncError as error:
        return str(error)
    return None


def version_of(url: str) -> str:
    """The version that the engine publishes."""
    status, text = get(url, "model_info")
    assert status == 200, text
    version: str = json.loads(text)["weight_version"]
    return version


# 1. The trainer gives up while the engine is stopped.


class KeptExport:
    """Full tensors that the trainer keeps and exports as they are, with a hook.

    `before_reading` is called once, when the trainer next asks for the tensors: before the last
    one is exported, or when the trainer looks where they are instead of exporting.
    """

    def __init__(self, weights: NamedTensors) -> None:
        self.state = dict(in_storages_of_their_own(weights))
        self.before_reading: Callable[[], None] | None = None

    def reexport(self) -> Any:
        """What a manager gets."""
        from verl_sglang_sync.sources.reexport import Reexport

        return Reexport(self._export, sources=self._sources)

    def write(self, weights: NamedTensors) -> None:
        """Other values in the same memory."""
        for name, tensor in weights:
            write_values(self.state[name], tensor)

    def fill(self, value: float) -> None:
        """The same number everywhere."""
        for tensor in self.state.values():
            tensor.fill_(value)

    def _export(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, pair in enumerate(self.state.items()):
            if i == len(self.state) - 1:
                self._call_hook()
            yield pair

    def _sources(self) -> dict[str, torch.Tensor]:
        self._call_hook()
        return self.state

    def _call_hook(self) -> None:
        hook, self.before_reading = self.before_reading, None
        if hook is not None:
            hook()


def given_up_sync(
    rank: TrainerRank,
    model: str,
    folder: str,
    pids: list[int],
    mode: str,
    settings: dict[str, Any],
    stops_in_load: bool,
) -> dict[str, Any]:
    """Good syncs, one that is given up, what the engine does then, and a good one.

    Args:
        rank: the only one.
        model: the checkpoint.
        folder: for hashes.
        pids: the scheduler processes.
        mode: of the syncs.
        settings: of the preset.
        stops_in_load: the engine stops in the model's `load_weights`, which the third sync must
            come to; else when the fourth one reads the tensors, and the engine has joined.
    """
    use_limits(rank, GIVEN_UP_AFTER_S)
    manager = rank.manager(mode, timeout_s=GIVEN_UP_AFTER_S, bucket_bytes=1 << 20, **settings)
    export = KeptExport(weights_of(Path(model), rank.device))
    weights = export.reexport()
    seen: dict[str, Any] = {"good": [], "hashes": {}}

    def write(scale: float) -> None:
        export.write(weights_of(Path(model), rank.device, scale=scale))

    def stop() -> None:
        time.sleep(JOINS_WITHIN_S)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

    for scale in (0.5, 1.0) if stops_in_load else (0.5, 2.0, 1.0):
        write(scale)
        seen["good"].append(error_of_sync(manager, weights, "good"))
        seen["hashes"][str(scale)] = engine_hashes(rank, Path(folder))
    write(0.25)
    if stops_in_load:
        call_loader(rank, STOP_LOADER)
    else:
        export.before_reading = stop
    started = time.monotonic()
    try:
        seen["error"] = error_of_sync(manager, weights, "given up")
        seen["seconds"] = time.monotonic() - started
        seen["were stopped"] = [psutil.Process(pid).status() == "stopped" for pid in pids]
        export.fill(GARBAGE)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    seen["then"] = {
        "versions": sorted(_versions_for(rank.url, SETTLES_WITHIN_S)),
        "status": status_of_request(rank.url),
        "hashes": engine_hashes(rank, Path(folder)),
    }
    write(0.5)
    seen["next"] = {
        "error": error_of_sync(manager, weights, "next"),
        "version": version_of(rank.url),
        "status": status_of_request(rank.url),
        "hashes": engine_hashes(rank, Path(folder)),
    }
    return seen


def call_loader(rank: TrainerRank, loader: str) -> None:
    """Have every TP rank of the engine run a custom loader that loads nothing."""
    from support.ipc import serialize_handles

    if rank.is_leader:
        tensors = [torch.zeros(1) for _ in range(rank.tp)]
        handles = [serialize_handles([("", tensor)]) for tensor in tensors]
        rank.client.run(operations.update_weights(handles, load_format=loader))


def _versions_for(url: str, seconds: float) -> set[str]:
    """The versions that the engine publishes meanwhile."""
    seen, deadline = set(), time.monotonic() + seconds
    while time.monotonic() < deadline:
        seen.add(version_of(url))
        time.sleep(0.1)
    return seen


def status_of_request(url: str) -> int:
    """HTTP status of a short request for tokens: 200 where the engine serves."""
    sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    return post(url, "generate", {"text": "What", "sampling_params": sampling})[0]


# 2. Updates that are refused, and syncs while requests are streamed.

STREAMED_TOKENS = 120
STREAMS_START_WITHIN_S = 0.5
PROMPTS = ("One", "It was a night of two moons", "def main():", "7 8 9 10 11 12 13 14 15 16 17 18")
SCALES = (0.5, 1.0)


def post_rubbish(url: str, tp: int = 1) -> tuple[int, str]:
    """A session that the engine refuses before it touches anything."""
    rubbish = {"serialized_named_tensors": ["AAAA"] * tp, "load_format": SESSION_FORMAT}
    return post(url, "update_weights_from_tensor", rubbish)


def syncs_while_streaming(
    rank: TrainerRank, model: str, mode: str, refusal: str, num_syncs: int
) -> dict[str, Any]:
    """Refused updates and syncs of two weight sets in turn, under four streams of requests.

    Args:
        rank: the only one.
        model: the checkpoint.
        mode: of the syncs.
        refusal: "rubbish", or "running": a compiled session that comes while a request runs.
        num_syncs: under load; with "rubbish", each after a refused update.
    """
    manager = rank.manager(mode)
    weights = {scale: weights_of(Path(model), rank.device, scale=scale) for scale in SCALES}
    seen: dict[str, Any] = {"references": {}, "refused": [], "errors": []}
    for scale in SCALES:
        assert error_of_sync(manager, weights[scale], str(scale)) is None
        seen["references"][str(scale)] = [streamed_ids(rank.url, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        seen["unsynced"] = list(pool.map(lambda prompt: streamed_ids(rank.url, prompt), PROMPTS))
    if refusal == "running":
        seen["refused"].append(_refused_because_requests_run(rank, weights[1.0]))
    with _streams(rank.url) as answers:
        for i in range(num_syncs):
            if refusal == "rubbish":
                seen["refused"].append(post_rubbish(rank.url)[0])
            time.sleep(STREAMS_START_WITHIN_S)
            seen["errors"].append(error_of_sync(manager, weights[SCALES[i % 2]], f"{i}"))
    seen["answers"] = answers
    return seen


def _refused_because_requests_run(rank: TrainerRank, weights: NamedTensors) -> int:
    """A session for which the running requests cannot be waited: they are paused; 400."""
    with running_generation(rank.url, 300):
        assert post(rank.url, "pause_generation", {"mode": "in_place"})[0] == 200
        error = error_of_sync(rank.manager("compiled"), weights, "refused")
        assert post(rank.url, "continue_generation", {})[0] == 200
    assert error is not None and "requests" in error, error
    return 400


@contextlib.contextmanager
def _streams(url: str) -> Iterator[list[Any]]:
    """One stream after the other for each prompt; `[prompt, token ids or what came instead]`."""
    answers: list[Any] = []
    is_over = threading.Event()

    def run(number: int) -> None:
        while not is_over.is_set():
            answers.append([number, streamed_ids(url, PROMPTS[number])])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def streamed_ids(url: str, prompt: str) -> list[int] | str:
    """Greedy token ids of a streamed answer; a text that says what came instead."""
    sampling = {"temperature": 0, "max_new_tokens": STREAMED_TOKENS, "ignore_eos": True}
    body = {"text": prompt, "sampling_params": sampling, "stream": True}
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=180) as reply:
            lines = [line for line in reply.read().decode().split("\n") if line]
    except OSError as error:
        return repr(error)
    if len(lines) < 2 or lines[-1] != "data: [DONE]":
        return f"a stream that ends with {lines[-1:]}"
    last = json.loads(lines[-2].removeprefix("data: "))
    ids: list[int] = last.get("output_ids", [])
    return ids if len(ids) == STREAMED_TOKENS else f"{len(ids)} ids: {lines[-2]}"


# 3. Parts of the weights after a sync that broke off.

PARTS: dict[str, int] = {"nothing": 0, "two tensors": 2}
BREAKS_AT = 10


def broken_export(weights: NamedTensors, how: str) -> Iterator[tuple[str, torch.Tensor]]:
    """An export that ends, or has one tensor of twice its size, after `BREAKS_AT` tensors."""
    for i, (name, tensor) in enumerate(weights):
        if i == BREAKS_AT and how == "raises":
            raise RuntimeError("the export broke off")
        yield name, torch.cat([tensor, tensor]) if i == BREAKS_AT else tensor


def parts_after_a_broken_sync(
    rank: TrainerRank, model: str, folder: str, mode: str, how: str
) -> dict[str, Any]:
    """By part: a sync that breaks off, one of that part alone, one of everything."""
    manager = rank.manager(mode, manifest_check="off", bucket_bytes=1 << 12)
    whole = weights_of(Path(model), rank.device)
    others = weights_of(Path(model), rank.device, scale=0.5)

    def sync(weights: Iterable[tuple[str, torch.Tensor]], version: str) -> dict[str, Any]:
        return {
            "error": error_of_sync(manager, weights, version),
            "status": status_of_request(rank.url),
            "version": version_of(rank.url),
            "hashes": engine_hashes(rank, Path(folder)),
        }

    return {
        part: {
            "before": sync(iter(whole), "before"),
            "broken": sync(broken_export(others, how), "broken"),
            "part": sync(iter(others[:number]), "part"),
            "whole": sync(iter(whole), "whole"),
        }
        for part, number in PARTS.items()
    }


# 5. Peers that are dead, and endpoints that are none.

DEAD_PEER_LIMIT_S = 5.0
HANGS_AFTER_S = 60.0
DIES_AT = 6


def outlive_a_rank(
    rank: TrainerRank, model: str, folder: str, mode: str, victim: int, file: str
) -> None:
    """One rank is killed in its export; the other writes to `file` what it raised, and when.

    It writes and exits instead of returning: no process group can be left in order any more.
    """
    from verl_sglang_sync import WeightSyncError

    weights = weights_of(Path(model), rank.device)
    assert error_of_sync(rank.manager(mode), weights, "good") is None
    use_limits(rank, DEAD_PEER_LIMIT_S)
    manager = rank.manager(mode, timeout_s=DEAD_PEER_LIMIT_S, bucket_bytes=1 << 12)
    died = Path(folder, f"{file}.died")

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for i, pair in enumerate(weights):
            if i == DIES_AT and rank.rank == victim:
                died.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            yield pair

    def tell(kind: str, text: str) -> None:
        seen = {"kind": kind, "text": text, "seconds": time.time() - float(died.read_text())}
        Path(folder, file).write_text(json.dumps(seen))
        os._exit(1)

    def watch() -> None:
        while not died.exists():
            time.sleep(0.1)
        time.sleep(HANGS_AFTER_S)
        tell("nothing", "the sync was still waiting")

    if rank.rank != victim:
        threading.Thread(target=watch, daemon=True).start()
    try:
        asyncio.run(manager.sync(export(), version="dead"))
    except WeightSyncError as error:
        tell("WeightSyncError", str(error))
    except Exception as error:
        tell(type(error).__name__, str(error))
    tell("nothing", "the sync returned")


def good_syncs_of(rank: TrainerRank, model: str, folder: str, mode: str) -> Any:
    """By scale of the weights, a `good_sync`."""
    return {str(scale): good_sync(rank, model, folder, mode, scale) for scale in SCALES}


def good_sync(rank: TrainerRank, model: str, folder: str, mode: str, scale: float) -> Any:
    """One sync: the error, the seconds, and the engine's hashes."""
    weights, started = weights_of(Path(model), rank.device, scale=scale), time.monotonic()
    return {
        "error": error_of_sync(rank.manager(mode), weights, f"{mode} {scale}"),
        "seconds": time.monotonic() - started,
        "version": version_of(rank.url),
        "hashes": engine_hashes(rank, Path(folder)),
    }


FORGED_TIMEOUT_S = 20.0


class ForgedInvitations:
    """A client whose sessions name another endpoint than the one on which the trainer listens.

    Args:
        client: which sends them.
        forge: makes the other endpoint of the real one.
    """

    def __init__(self, client: Any, forge: Callable[[str], str]) -> None:
        self._client = client
        self._forge = forge
        self.num_forged = 0

    def submit(self, call: Any) -> Any:
        """As the client's, but for the endpoint of an update."""
        fields = dict(call.payload or {})
        if handles := fields.get("serialized_named_tensors"):
            forged = (self._forged(base64.b64decode(item)) for item in handles)
            fields["serialized_named_tensors"] = [base64.b64encode(f).decode() for f in forged]
            call = replace(call, payload=fields)
        return self._client.submit(call)

    def run(self, call: Any) -> Any:
        """As the client's."""
        return self.submit(call).result()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def _forged(self, invitation: bytes) -> bytes:
        forged, number = re.subn(
            rb"ipc://[^\"]*", lambda found: self._forge(found[0].decode()).encode(), invitation
        )
        self.num_forged += number
        return forged


def forged_endpoints(rank: TrainerRank, model: str, folder: str) -> dict[str, Any]:
    """By endpoint: how a session that names it ends, and what the engine does after it."""
    weights = weights_of(Path(model), rank.device)
    assert error_of_sync(rank.manager("compiled"), weights, "before") is None
    seen: dict[str, Any] = {"before": engine_hashes(rank, Path(folder))}
    client, foreign = rank.client, Path(folder, "foreign")
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        zmq.Context() as context,
        context.socket(zmq.PAIR) as other,
    ):
        other.bind(f"ipc://{foreign}")
        silent.settimeout(0.5)
        for name, forge in (
            ("a TCP port that is closed", lambda _: f"tcp://127.0.0.1:{free_port()}"),
            ("a TCP port", lambda _: f"tcp://127.0.0.1:{silent.getsockname()[1]}"),
            ("a name that is looked up", lambda _: "tcp://localhost:1"),
            ("another process's socket", lambda _: f"ipc://{foreign}"),
            ("nobody in our folder", lambda real: f"{real.rpartition('/')[0]}/999"),
        ):
            forged = ForgedInvitations(client, forge)
            rank.client = forged
            manager = rank.manager(
                "compiled", timeout_s=FORGED_TIMEOUT_S, read_in_place=False, manifest_check="off"
            )
            started = time.monotonic()
            error = error_of_sync(manager, weights, "forged")
            seconds = time.monotonic() - started
            rank.client = client
            seen[name] = {
                "num_forged": forged.num_forged,
                "error": error,
                "seconds": seconds,
                "status": status_of_request(rank.url),
                "served_s": time.monotonic() - started,
                "version": version_of(rank.url),
                "hashes": engine_hashes(rank, Path(folder)),
            }
        seen["was connected"] = _was_connected(silent)
    seen["next"] = error_of_sync(rank.manager("compiled"), weights, "next")
    return seen


def _was_connected(server: socket.socket) -> bool:
    try:
        server.accept()[0].close()
    except TimeoutError:
        return False
    return True


# 6. Tensors that are dropped, and what dead trainers leave.

EMBEDDING = "model.embed_tokens.weight"


def repeated_embeddings(rank: TrainerRank, model: str, folder: str, mode: str) -> dict[str, Any]:
    """The embedding comes twice: as a copy, with other values, with one other value; as a copy."""
    weights = weights_of(Path(model), rank.device)
    first = dict(weights)[EMBEDDING]
    last = first.clone()
    last[-1, -1] += 1
    seen = {}
    for name, again in (
        ("a copy", first.clone()),
        ("other values", first * 2),
        ("one other value", last),
        ("a copy again", first.clone()),
    ):
        manager = rank.manager(mode)
        seen[name] = {
            "error": error_of_sync(manager, [*weights, (EMBEDDING, again)], name),
            "version": version_of(rank.url),
            "hashes": engine_hashes(rank, Path(folder)),
        }
    return seen


SHARED_MEMORY = Path("/dev/shm")


def live_on(rank: TrainerRank, model: str, folder: str) -> dict[str, Any]:
    """Sync, tell what this process shares, and sync again when told to.

    `folder/live` gets the paths; the step goes on when `folder/go` is there.
    """
    export = KeptExport(weights_of(Path(model), rank.device))
    manager = rank.manager("compiled", keep_staging_buffers=True)
    errors = [error_of_sync(manager, export.reexport(), "live") for _ in range(3)]
    _tell_what_is_shared(Path(folder, "live"))
    deadline = time.monotonic() + 240
    while not Path(folder, "go").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    export.write(weights_of(Path(model), rank.device, scale=0.5))
    errors.append(error_of_sync(manager, export.reexport(), "live, again"))
    return {"errors": errors, "hashes": engine_hashes(rank, Path(folder))}


def die_with_shared_memory(rank: TrainerRank, model: str, folder: str) -> None:
    """Good syncs, then SIGKILL in the middle of one; `folder/dead` gets what was shared then."""
    weights = weights_of(Path(model), rank.device)
    staged = rank.manager("compiled", keep_staging_buffers=True, read_in_place=False)
    kept = KeptExport(weights)
    in_place = rank.manager("compiled")
    # A plan may take two syncs to hold.
    for manager, export_of in ((in_place, kept.reexport), (staged, lambda: weights)):
        for _ in range(4):
            assert error_of_sync(manager, export_of(), "dying") is None

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for i, pair in enumerate(weights):
            if i == DIES_AT:
                _tell_what_is_shared(Path(folder, "dead"))
                os.kill(os.getpid(), signal.SIGKILL)
            yield pair

    asyncio.run(staged.sync(export(), version="dead"))


def _tell_what_is_shared(file: Path) -> None:
    """Write the paths of all trainers' sockets, and of the memory that they handed to engines."""
    folders = list(Path(tempfile.gettempdir()).glob("weight-sync-*"))
    names = (folder / "shared-memory" for folder in folders)
    memory = (SHARED_MEMORY / name.lstrip("/") for n in names for name in n.read_text().split())
    paths = [*folders, *(path for path in memory if path.exists())]
    file.with_suffix(".new").write_text(json.dumps(sorted(map(str, paths))))
    file.with_suffix(".new").rename(file)


def growing_export(rank: TrainerRank, model: str, folder: str) -> dict[str, Any]:
    """An export of two tensors between whole ones, again and again; the hashes of the whole ones.

    A refusal of the small ones is as good as a sync.
    """
    manager = rank.manager("compiled", manifest_check="off", bucket_bytes=1 << 12)
    seen: dict[str, Any] = {"errors": [], "hashes": {"0.5": [], "1.0": []}}
    weights = {scale: weights_of(Path(model), rank.device, scale=scale) for scale in SCALES}
    for scale in SCALES:
        fresh = rank.manager("flattened", manifest_check="off")
        seen["errors"].append(error_of_sync(fresh, iter(weights[scale]), "fresh"))
        seen["hashes"][str(scale)].append(engine_hashes(rank, Path(folder)))
    for i in range(6):
        scale, other = SCALES[i % 2], SCALES[1 - i % 2]
        error_of_sync(manager, iter(weights[other][:2]), "two tensors")
        seen["errors"].append(error_of_sync(manager, iter(weights[scale]), "whole"))
        seen["hashes"][str(scale)].append(engine_hashes(rank, Path(folder)))
    return seen
