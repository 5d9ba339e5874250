"""Trainer ranks that live for many syncs, and that a driver commands, kills and replaces.

with TrainerFactory(folder, environment) as factory:
    world = factory.start(model_folders, url=..., proxy=..., tp=2)
    world.begin({"preset": "bucketed", "label": 7})     # every rank starts the sync
    replies = world.replies(limit_s=20)                 # by rank; None: died, or still busy
    world.end()
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.broadcast_steps import Sender
from support.engine_steps import in_storages_of_their_own, kept_export, weights_of, write_values
from support.forks import Fork
from support.trainer import NamedTensors, TrainerRank
from verl_sglang_sync.engine.server_client import SGLangServerClient
from verl_sglang_sync.sources.reexport import Reexport

TIMEOUT_S = 3.0
"""The trainer's limit of one request, and of the silence in a session."""

COLLECTIVE_TIMEOUT_S = 30.0
START_S = 120.0
PRESETS = ("bucketed", "flattened", "packed", "in_place", "broadcast", "broadcast_compiled")
BUCKET_BYTES = 32 << 10
NUM_VERSIONS = 3
VICTIM = "model.norm.weight"  # the tensor that a bad export spoils

Reply = dict[str, Any]
"""`error`: what the rank raised, or None; `seconds`: how long its sync took; `is_published`: the
weights were published before that."""


def slot_of(label: int | str) -> int:
    """Which of the few weight sets a published version has."""
    return int(label) % NUM_VERSIONS


class World:
    """The ranks of one trainer, seen from the driver."""

    def __init__(self, links: Sequence[socket.socket], pids: Sequence[int]) -> None:
        self.pids = list(pids)
        self._links = list(links)
        self._files = [link.makefile("rw") for link in links]
        self._busy: set[int] = set()
        self._dead: set[int] = set()

    @property
    def is_usable(self) -> bool:
        """True if every rank lives and waits for a command."""
        return not self._dead and not self._busy

    def begin(self, command: dict[str, Any]) -> None:
        """Have every rank start a sync; see `_Rank.sync` for what a command says."""
        for rank, file in enumerate(self._files):
            self._busy.add(rank)
            with suppress(OSError):
                file.write(json.dumps(command) + "\n")
                file.flush()

    def replies(self, limit_s: float) -> list[Reply | None]:
        """Wait for all ranks, at most so long; None for one that died or is still busy."""
        deadline = time.monotonic() + limit_s
        found: list[Reply | None] = [None] * len(self._links)
        while self._busy and (left := deadline - time.monotonic()) > 0:
            waiting = {self._links[rank]: rank for rank in self._busy}
            for link in select.select(list(waiting), [], [], left)[0]:
                rank = waiting[link]
                line = ""
                with suppress(OSError):
                    line = self._files[rank].readline()
                self._busy.discard(rank)
                if line:
                    found[rank] = json.loads(line)
                else:
                    self._dead.add(rank)
        return found

    def hung(self) -> list[int]:
        """Ranks that live and have not answered."""
        return sorted(self._busy - self._dead)

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank's process, if there still is one."""
        if number == signal.SIGKILL:
            self._dead.add(rank)
        with suppress(ProcessLookupError):
            os.kill(self.pids[rank], number)

    def end(self) -> None:
        """End all ranks, at once."""
        for rank in range(len(self.pids)):
            self.send_signal(rank, signal.SIGKILL)
        for link, file in zip(self._links, self._files, strict=True):
            with suppress(OSError):
                file.close()
            link.close()


class TrainerFactory:
    """Starts trainers whose ranks connect to it. A context manager."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = {**os.environ, **environment}
        self._num_worlds = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(START_S)

    def start(self, models: Sequence[Path], *, url: str, proxy: str, tp: int) -> World:
        """Start the ranks of a trainer; `models` are the checkpoints of the versions."""
        self._num_worlds += 1
        store = self._folder / f"store-{self._num_worlds}"
        launch = {
            "address": self._listener.getsockname(),
            "store": str(store),
            "models": [str(model) for model in models],
            "urls": {"direct": url, "proxy": proxy},
            "tp": tp,
        }
        for rank in range(tp):
            log = Path(f"{store}-{rank}.log")
            Fork(_serve, {**launch, "rank": rank}, environment=self._environment, log=log)
        joined: dict[int, tuple[socket.socket, int]] = {}
        while len(joined) < tp:
            link, _ = self._listener.accept()
            hello = json.loads(link.recv(4096))
            joined[hello["rank"]] = link, hello["pid"]
        links, pids = zip(*(joined[rank] for rank in range(tp)), strict=True)
        return World(links, pids)

    def __enter__(self) -> TrainerFactory:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()


class _Rank:
    """In a rank's process: syncs by any preset, through the server's own address or a proxy."""

    def __init__(self, launch: dict[str, Any]) -> None:
        rank, self._tp = launch["rank"], launch["tp"]
        dist.init_process_group(
            "gloo",
            init_method=f"file://{launch['store']}",
            rank=rank,
            world_size=self._tp,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        self._urls: dict[str, str] = launch["urls"]
        urls = [self._urls["direct"]]
        self._trainer = TrainerRank(rank, self._tp, self._tp, urls, torch.device("cpu"))
        self._versions = [weights_of(Path(m), torch.device("cpu")) for m in launch["models"]]
        self._kept = kept_export(in_storages_of_their_own(self._versions[0]))
        self._managers: dict[tuple[str, str], Any] = {}
        self._senders: dict[str, Sender] = {}
        self._is_published = False

    def sync(self, command: dict[str, Any]) -> Reply:
        """One sync.

        `preset`; `label`: the version; `via`: "direct" or "proxy"; `slow_s`: sleep before each
        tensor; `bad`, `at` (which tensor), `once`: see `_spoilt`; `on`: the rank that fails alone.
        """
        started, error = time.monotonic(), None
        self._is_published = False
        try:
            self._sync(**command)
        except Exception:
            error = traceback.format_exc()[-6000:]
        seconds = time.monotonic() - started
        return {"error": error, "seconds": seconds, "is_published": self._is_published}

    def _sync(
        self,
        preset: str,
        label: int,
        via: str = "direct",
        slow_s: float = 0.0,
        bad: str | None = None,
        at: int = 0,
        once: bool = False,
        on: int | None = None,
    ) -> None:
        named = self._versions[slot_of(label)]
        if preset == "in_place":
            state = self._kept.sources()
            for name, tensor in named:
                write_values(state[name], tensor)
            named = list(state.items())
        if bad is not None and on in (None, self._trainer.rank):
            values: Any = _spoilt(named, bad, at % len(named), once)
        elif preset == "in_place" and bad is None and not slow_s:
            values = self._kept
        else:
            values = Reexport(lambda: _slowly(named, slow_s))
        if preset.startswith("broadcast"):
            mode = "compiled" if preset.endswith("compiled") else "flattened"
            self._sender(via).sync(values, mode, (0,), version=str(label))
            return
        asyncio.run(self._cycle(self._manager(preset, via), values, str(label)))

    async def _cycle(self, manager: Any, values: Any, label: str) -> None:
        await manager.resume(("weights",))
        await manager.sync(values, version=label)
        self._is_published = True
        await manager.resume(("kv_cache",))

    def _sender(self, via: str) -> Sender:
        if via not in self._senders:
            target = [(self._urls[via], self._tp)]
            self._senders[via] = Sender(self._trainer, target, timeout_s=TIMEOUT_S)
        return self._senders[via]

    def _manager(self, preset: str, via: str) -> Any:
        if (preset, via) not in self._managers:
            trainer = self._trainer
            trainer.client = SGLangServerClient(
                self._urls[via], timeout_s=TIMEOUT_S, rank=trainer.rank, replica=0
            )
            mode, settings = preset, {}
            if preset in ("packed", "in_place"):
                mode, settings = "compiled", {"read_in_place": preset == "in_place"}
            self._managers[preset, via] = trainer.manager(
                mode, bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S, **settings
            )
        return self._managers[preset, via]


BAD_EXPORTS = ("raises", "doubled", "missing", "extra", "empty", "meta")


def _spoilt(named: NamedTensors, kind: str, at: int, once: bool) -> Iterable[Any]:
    """The export with one fault in it; `once`: it cannot be iterated over twice."""
    name, tensor = named[at]

    def export() -> Iterator[Any]:
        if kind == "empty":
            return
        for i, pair in enumerate(_slowly(named, 0)):
            if i != at:
                yield pair
            elif kind == "raises":
                raise RuntimeError(f"the export fails at tensor {at}, on purpose")
            elif kind == "doubled":
                yield name, torch.cat([tensor, tensor])
            elif kind == "meta":
                yield name, tensor.to("meta")
            elif kind == "extra":
                yield pair
                yield f"{name}_of_another", tensor

    return export() if once else Reexport(export)


def _slowly(named: NamedTensors, seconds: float) -> Iterator[Any]:
    """Tensors of its own in every export, as verl's are, each after so many seconds."""
    for name, tensor in named:
        time.sleep(seconds)
        yield name, tensor.clone()


def _serve(launch: dict[str, Any]) -> None:
    """A rank's process."""
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy("file_system")
    rank = _Rank(launch)
    with socket.create_connection(launch["address"]) as link, link.makefile("rw") as file:
        link.sendall(json.dumps({"rank": launch["rank"], "pid": os.getpid()}).encode())
        for line in file:
            file.write(json.dumps(rank.sync(json.loads(line))) + "\n")
            file.flush()
