"""Trainer ranks that live for many syncs, and that a driver commands, kills and replaces.

world = World(folder, environment, models, url=..., proxy=..., tp=2)
world.begin({"preset": "bucketed", "label": 7})     # every rank starts the sync
replies = world.replies(limit_s=20)                 # by rank; None: died, or still busy
world.end()
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.broadcast_steps import Sender
from support.exports import KeptExport, calling_at, doubled, on_meta, weights_of
from support.forks import Fork
from support.trainer import CPU, NamedTensors, TrainerRank
from verl_sglang_sync.sources.export import Reexport

TIMEOUT_S = 3.0
"""The trainer's limit of one request, and of the silence in a session."""

COLLECTIVE_TIMEOUT_S = 30.0
START_S = 120.0
PRESETS = ("bucketed", "flattened", "packed", "in_place", "broadcast", "broadcast_compiled")
BUCKET_BYTES = 32 << 10
NUM_VERSIONS = 3

Reply = dict[str, Any]
"""`error`: what the rank raised, or None; `is_published`: it had published the weights."""


def slot_of(label: int | str) -> int:
    """Which of the few weight sets a published version has."""
    return int(label) % NUM_VERSIONS


class World:
    """The ranks of one trainer, seen from the driver.

    Args:
        folder: for their logs.
        environment: of their processes, beside this one's.
        models: the checkpoints of the versions.
        url: of the engine.
        proxy: another address of the engine.
        tp: number of ranks.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        models: Sequence[Path],
        *,
        url: str,
        proxy: str,
        tp: int,
    ) -> None:
        store = folder / f"store-{os.urandom(4).hex()}"
        launch = {"store": str(store), "models": models, "urls": {"direct": url, "proxy": proxy}}
        self.pids: list[int] = []
        self._links: list[Connection] = []
        for rank in range(tp):
            ours, theirs = Pipe()
            log, variables = Path(f"{store}-{rank}.log"), {**os.environ, **environment}
            fork = Fork(_serve, rank, tp, launch, theirs, environment=variables, log=log)
            theirs.close()
            self.pids.append(fork.pid)
            self._links.append(ours)
        self._busy, self._dead = set(range(tp)), set[int]()
        self.replies(START_S)
        if not self.is_usable:
            self.end()
            raise RuntimeError(f"a trainer did not start: {store}-*.log")

    @property
    def is_usable(self) -> bool:
        """True if every rank lives and waits for a command."""
        return not self._dead and not self._busy

    def begin(self, command: dict[str, Any]) -> None:
        """Have every rank start a sync; see `_Rank.sync` for what a command says."""
        for rank, link in enumerate(self._links):
            self._busy.add(rank)
            with suppress(OSError):
                link.send(command)

    def replies(self, limit_s: float) -> list[Reply | None]:
        """Wait for all ranks, at most so long; None for one that died or is still busy."""
        deadline = time.monotonic() + limit_s
        found: list[Reply | None] = [None] * len(self._links)
        while self._busy and (left := deadline - time.monotonic()) > 0:
            waiting = {self._links[rank]: rank for rank in self._busy}
            for link in wait(list(waiting), left):
                rank = waiting[link]  # type: ignore[index]
                self._busy.discard(rank)
                try:
                    found[rank] = self._links[rank].recv()
                except (EOFError, OSError):
                    self._dead.add(rank)
        return found

    def hung(self) -> list[int]:
        """Ranks that live and have not answered."""
        return sorted(self._busy - self._dead)

    def kill(self, *ranks: int) -> None:
        """End some ranks, if they still live."""
        for rank in ranks:
            self._dead.add(rank)
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGKILL)

    def end(self) -> None:
        """End all ranks, at once."""
        self.kill(*range(len(self.pids)))
        for link in self._links:
            link.close()


class _Rank:
    """In a rank's process: syncs by any preset, through the server's own address or a proxy."""

    def __init__(self, rank: int, tp: int, launch: dict[str, Any]) -> None:
        store = Path(launch["store"])
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=tp,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        self._urls: dict[str, str] = launch["urls"]
        urls = [self._urls["direct"]]
        self._trainer = TrainerRank(rank, tp, tp, urls, CPU, store.parent)
        self._versions = [weights_of(model, CPU) for model in launch["models"]]
        self._kept = KeptExport(self._versions[0])
        self._managers: dict[tuple[str, str], Any] = {}
        self._senders: dict[str, Sender] = {}
        self._is_published = False

    def sync(self, command: dict[str, Any]) -> Reply:
        """One sync.

        `preset`; `label`: the version; `via`: "direct" or "proxy"; `slow_s`: sleep before each
        tensor; `bad`, `at` (which tensor), `once`: see `_spoilt`; `on`: the rank that fails alone.
        """
        error, self._is_published = None, False
        try:
            self._sync(**command)
        except Exception:
            error = traceback.format_exc()[-6000:]
        return {"error": error, "is_published": self._is_published}

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
            self._kept.write(named)
            named = list(self._kept.state.items())
        if bad is not None and on in (None, self._trainer.rank):
            values: Any = _spoilt(named, bad, at % len(named), once)
        elif preset == "in_place" and bad is None and not slow_s:
            values = self._kept.reexport()
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
            target = [(self._urls[via], self._trainer.tp)]
            self._senders[via] = Sender(self._trainer, target, timeout_s=TIMEOUT_S)
        return self._senders[via]

    def _manager(self, preset: str, via: str) -> Any:
        if (preset, via) not in self._managers:
            self._trainer.use_client(self._urls[via], timeout_s=TIMEOUT_S)
            mode, settings = preset, {}
            if preset in ("packed", "in_place"):
                mode, settings = "compiled", {"read_in_place": preset == "in_place"}
            self._managers[preset, via] = self._trainer.manager(
                mode, bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S, **settings
            )
        return self._managers[preset, via]


BAD_EXPORTS = ("raises", "doubled", "missing", "extra", "empty", "meta")


def _spoilt(named: NamedTensors, kind: str, at: int, once: bool) -> Iterable[Any]:
    """The export with one fault in it; `once`: it cannot be iterated over twice."""
    name, tensor = named[at]

    def fail() -> None:
        raise RuntimeError(f"the export fails at tensor {at}, on purpose")

    def export() -> Iterator[Any]:
        copies = list(_slowly(named, 0))
        if kind == "raises":
            return calling_at(copies, at, fail)
        others = {
            "doubled": doubled(copies, name),
            "meta": on_meta(copies, name),
            "missing": copies[:at] + copies[at + 1 :],
            "extra": [*copies[: at + 1], (f"{name}_of_another", tensor), *copies[at + 1 :]],
            "empty": [],
        }
        return iter(others[kind])

    return export() if once else Reexport(export)


def _slowly(named: NamedTensors, seconds: float) -> Iterator[Any]:
    """Tensors of its own in every export, as verl's are, each after so many seconds."""
    for name, tensor in named:
        time.sleep(seconds)
        yield name, tensor.clone()


def _serve(rank: int, tp: int, launch: dict[str, Any], driver: Connection) -> None:
    """A rank's process."""
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy("file_system")
    served = _Rank(rank, tp, launch)
    driver.send("ready")
    with suppress(EOFError):
        while True:
            driver.send(served.sync(driver.recv()))
