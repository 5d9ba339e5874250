"""A storm: random faults on a real engine and its trainers, one per round, and what came of each.

    with Storm(folder, tp=2, seed=7) as storm:
        storm.run(num_faults=60)
    storm.report        # by kind of fault; storm.findings: every broken invariant

A round injects one fault (`storm_faults`), checks what is served (`storm_checks`), has the trainer
sync once more, which must succeed, and checks again.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file
from tiny_assets import make_assets

from sglang_loader.common.engine_settings import STALE_REQUESTS_VARIABLE
from support.fault_proxy import fault_proxy
from support.served import Served
from support.sglang_server import sglang_server
from support.storm_checks import PROMPTS, StormEngine, Stream, Violation, shared_memory, strays
from support.storm_trainer import NUM_VERSIONS, PRESETS, TIMEOUT_S, World
from support.storm_wire import Wire
from verl_sglang_sync.sync.ranks_in_step import MAY_SERVE

LEAVE_S = 3 * TIMEOUT_S + 10
"""All ranks have left a failed sync by then: three attempts of one request, and a margin."""

RECOVERY_TRIES = 3
RECOVERY_S = 60.0
STRAYS_S = 20.0
DEATH_S = 20.0
GATES = {1: "refuse 600", 2: "wait 600"}
VERBOSE = bool(os.environ.get("STORM_VERBOSE"))
BOUNDS = {"fds": 60, "threads": 40, "rss_mb": 300}
"""How much more of each the server's processes may have after a storm than after its start."""


@dataclass
class Row:
    """What came of one kind of fault; `seconds`: from each injection to the end of its recovery."""

    injected: int = 0
    detected: int = 0
    recovered: int = 0
    wrong_weights: int = 0
    hangs: int = 0
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """A broken invariant, and where in which storm."""

    seed: int
    tp: int
    round: int
    fault: str
    kind: str
    detail: str


class Storm:
    """One engine, its trainers, and the faults. A context manager.

    Args:
        folder: for the models, logs and `TMPDIR`.
        tp: of the engine and of each trainer.
        seed: of all random choices.
    """

    def __init__(self, folder: Path, *, tp: int, seed: int) -> None:
        self.folder, self.tp, self.seed = folder, tp, seed
        self.rng = random.Random(seed)  # another one in each round
        self.temporary = folder / "t"
        self.report: dict[str, Row] = {}
        self.findings: list[Finding] = []
        self.resources: list[dict[str, int]] = []
        self._row = Row()
        self.batch = 1  # how many bodies a round of fuzzing posts
        self._round, self._fault, self._context = 0, "start", ""
        self._label = NUM_VERSIONS  # the references have the labels below
        self._current: dict[int, World] = {}  # by trainer: 0, and a rival
        self._pids: set[int] = set()
        self._num_engines = 0
        self._labels_begun: dict[int, int] = {}
        self._allowed: set[str] = set()  # what may be served now
        self._given_up: set[str] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Storm:
        torch.multiprocessing.set_sharing_strategy("file_system")  # as the engine's, for hashes
        self.temporary.mkdir()
        self._older_files = shared_memory().keys()  # of processes whose numbers may come again
        self._models = [_version(self.folder, slot) for slot in range(NUM_VERSIONS)]
        self._environment = {"TMPDIR": str(self.temporary)}
        self.start_engine()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_engine()
        deadline = time.monotonic() + STRAYS_S
        while time.monotonic() < deadline:
            files = [
                str(path)
                for path, pid in shared_memory().items()
                if pid in self._pids and path not in self._older_files
            ]
            if not (left := [*strays(self.folder), *files]):
                return
            time.sleep(0.5)
        self._find(Violation("leak", f"left behind: {left[:20]}"))

    def start_engine(self) -> None:
        """Start the server, or another one in its place."""
        self._stop_engine()
        self._stack = ExitStack()
        self._num_engines += 1
        own = self.folder / f"engine{self._num_engines}"
        own.mkdir()
        server = self._stack.enter_context(
            sglang_server(
                self._models[0],
                own,
                tp=self.tp,
                variables={**self._environment, STALE_REQUESTS_VARIABLE: GATES[self.tp]},
            )
        )
        self.wire = Wire(self.temporary)
        self.proxy = self._stack.enter_context(fault_proxy(server.url, self.wire))
        self.engine = StormEngine(Served(server, self.folder, self.tp), self._models)
        self._pids |= {process.pid for process in self.engine.processes()}
        self._allowed = {str(NUM_VERSIONS - 1)}
        self.resources.clear()

    def _stop_engine(self) -> None:
        for world in self._current.values():
            world.end()
        self._current.clear()
        self._stack.close()

    # What faults are made of.

    def world(self, trainer: int = 0) -> World:
        """A trainer whose ranks all wait for a command; a new one in place of a broken one."""
        if trainer in self._current and not self._current[trainer].is_usable:
            self._current.pop(trainer).end()
        if trainer not in self._current:
            addresses = {"url": self.engine.url, "proxy": self.proxy}
            world = World(self.folder, self._environment, self._models, **addresses, tp=self.tp)
            self._current[trainer] = world
            self._pids.update(world.pids)
        return self._current[trainer]

    def begin(self, *, trainer: int = 0, preset: str | None = None, **command: Any) -> World:
        """Have a trainer start a sync of the next version; see `storm_trainer`."""
        self._label += 1
        preset = preset or self.rng.choice(PRESETS)
        self._labels_begun[trainer] = self._label
        self._context += f" [trainer {trainer}: {preset} {self._label} {command or ''}]"
        world = self.world(trainer)
        world.begin({"preset": preset, "label": self._label, **command})
        return world

    def finish(self, *, trainer: int = 0, more_s: float = 0.0, must_fail: bool = False) -> None:
        """Wait until all ranks have left the sync that `begin` started.

        Args:
            trainer: whose.
            more_s: for how long the fault itself stops a process.
            must_fail: what is exported cannot be loaded.

        Raises:
            Violation: a rank does not leave, not all raise, or a bad sync was accepted.
        """
        world, label = self._current[trainer], str(self._labels_begun[trainer])
        replies = world.replies(LEAVE_S + more_s)
        answers = [reply for reply in replies if reply is not None]
        errors = [answer["error"] for answer in answers]
        if errors and all(errors):
            # what fails after the sync, such as the resume of the KV cache, takes nothing back
            may_serve = any(a["is_published"] or MAY_SERVE in a["error"] for a in answers)
            (self._allowed if may_serve else self._given_up).add(label)
            self._row.detected += 1
        elif any(error is None for error in errors):
            self._allowed.add(label)
        elif not world.hung():
            self._allowed.add(label)  # nobody lives who knows better
        if hung := world.hung():
            self._given_up.add(label)
            raise Violation(
                "hang",
                f"ranks {hung} have not left after {LEAVE_S + more_s:.0f} s: {_brief(replies)}",
            )
        if any(errors) and not all(errors):
            raise Violation("split ranks", _brief(replies))
        if must_fail and not any(errors):
            raise Violation("bad sync accepted", f"version {label}")

    def a_while(self, longest_s: float) -> None:
        """Sleep for a random time."""
        time.sleep(self.rng.uniform(0, longest_s))

    def note(self, text: str) -> None:
        """Add to what findings of this round show."""
        self._context += f" [{text}]"

    def detected(self, number: int = 1) -> None:
        """Count faults that a reply named."""
        self._row.detected += number

    # Rounds.

    def run(
        self, num_faults: int, faults: Iterable[Any], deadline: float, first_round: int = 1
    ) -> int:
        """Rounds until so many faults were injected, or `time.monotonic()` is past `deadline`.

        A round's choices depend on the seed, the TP size and its number alone.
        """
        self._round = first_round - 1
        faults, injected, self.batch = list(faults), 0, 24 if num_faults > 100 else 4
        while injected < num_faults and time.monotonic() < deadline:
            self._round += 1
            self.rng = random.Random(f"{self.seed} {self.tp} {self._round}")
            weights = [fault.weight for fault in faults]
            injected += self.round(self.rng.choices(faults, weights)[0])
            if self._round % 25 == 5:
                self.resources.append(self.engine.resources())
        self.resources.append(self.engine.resources())
        self._check_leaks()
        return injected

    def round(self, fault: Any) -> int:
        """Inject one fault, check, recover, check; returns how many faults that were."""
        self._fault, self._context = fault.name, ""
        self._row = row = self.report.setdefault(fault.name, Row())
        num_findings, started = len(self.findings), time.monotonic()
        engine = self.engine
        streams = [self._stream()]
        count: list[int | None] = []
        self._guarded(lambda: count.append(fault.inject(self)))
        injected = (count and count[0]) or 1
        row.injected += injected
        self._guarded(self._check_served)
        streams.append(self._stream())
        row.recovered += injected if self._recover() else 0
        is_killed = self.engine is not engine
        for stream in filter(None, streams):
            self._guarded(partial(stream.check, self.engine.references, may_be_cut=is_killed))
        row.seconds.append(time.monotonic() - started)
        if VERBOSE or len(self.findings) > num_findings:
            print(
                f"round {self._round}, {row.seconds[-1]:.1f} s: {fault.name}{self._context}",
                flush=True,
            )
        return injected

    def _stream(self) -> Stream | None:
        """A user's request that runs meanwhile, in half of the rounds."""
        if self.rng.random() < 0.5:
            return None
        stream = Stream(self.engine.url, self.rng.choice(PROMPTS), self.rng.randrange(8, 64))
        stream.start()
        time.sleep(self.rng.choice((0, 0.02)))
        return stream

    def _check_served(self) -> None:
        label = self.engine.served()
        if label in self._given_up:
            raise Violation("given up, yet served", f"version {label}")
        if label is not None and label not in self._allowed:
            raise Violation("wrong weights", f"serves {label}, expected one of {self._allowed}")

    def _recover(self, presets: Sequence[str] = PRESETS) -> bool:
        """Sync once more; True if the first attempt succeeded and its version is served."""
        for attempt in range(RECOVERY_TRIES):
            if self._guarded(partial(self._good_sync, presets)):
                return attempt == 0
            if not self._guarded(self.engine.must_live):
                break
            time.sleep(1.0)  # a request that runs and is in the way ends meanwhile
        self.start_engine()
        return False

    def _good_sync(self, presets: Sequence[str]) -> None:
        preset = self.rng.choice(presets)
        is_broadcast = preset.startswith("broadcast")
        if is_broadcast:
            self.engine.post("resume_memory_occupation", b'{"tags": ["weights"]}')
        world = self.begin(preset=preset, via=self.rng.choice(("direct", "direct", "proxy")))
        label = str(self._labels_begun[0])
        replies = world.replies(RECOVERY_S)
        if world.hung() or any(reply is None or reply["error"] for reply in replies):
            self._given_up.add(label)
            raise Violation("not recovered", f"hung {world.hung()}: {_brief(replies)}")
        if is_broadcast:
            self.engine.post("resume_memory_occupation", b"{}")
        self._allowed, self._given_up = {label}, set()
        if (served := self.engine.served()) != label:
            raise Violation("not recovered", f"serves {served} after a good sync of {label}")

    def _guarded(self, step: Callable[[], Any]) -> bool:
        """Run a step; keep what it finds broken. A fault of the harness does not end the storm."""
        try:
            step()
        except Violation as violation:
            self._find(violation)
        except Exception:
            self._find(Violation("harness", traceback.format_exc()[-1500:]))
        else:
            return True
        return False

    def _find(self, violation: Violation) -> None:
        """Keep a finding, and print it as it comes."""
        detail = f"{violation.detail}{self._context}"
        finding = Finding(
            self.seed, self.tp, self._round, self._fault, violation.kind, detail[:3000]
        )
        self.findings.append(finding)
        self._row.wrong_weights += violation.kind in ("wrong weights", "mixed stream")
        self._row.hangs += violation.kind == "hang"
        print(f"FOUND seed={self.seed} tp={self.tp} round={self._round} {self._fault!r}: ", end="")
        print(f"{violation.kind}: {detail[:1200]}", flush=True)

    def _check_leaks(self) -> None:
        """Nothing is left of processes that are gone, once another trainer has synced."""
        self._fault, self._context, self._row = "end of the storm", "", Row()
        for world in self._current.values():
            world.end()
        _wait_until_dead(pid for world in self._current.values() for pid in world.pids)
        self._current.clear()
        before = set(self.temporary.glob("weight-sync-*"))
        self._recover([preset for preset in PRESETS if not preset.startswith("broadcast")])
        if left := sorted(before & set(self.temporary.glob("weight-sync-*"))):
            self._find(Violation("leak", f"{len(left)} folders of dead trainers: {left[:3]}"))
        grown = {key: self.resources[-1][key] - self.resources[0][key] for key in BOUNDS}
        if any(grown[key] > BOUNDS[key] for key in BOUNDS):
            self._find(Violation("leak", f"the server's processes grew by {grown}"))


def _wait_until_dead(pids: Iterable[int]) -> None:
    """What dies holds its folder's lock until its last thread has ended, for seconds at times."""
    deadline = time.monotonic() + DEATH_S
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            while process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1:
                assert time.monotonic() < deadline, f"{pid} was killed and still lives"
                time.sleep(0.05)


def _version(folder: Path, slot: int) -> Path:
    """A checkpoint of the tiny model with weights of its own."""
    made = folder / f"version{slot}"
    make_assets(made, seed=slot)
    file = made / "model" / "model.safetensors"
    scaled = {name: tensor * (1 + slot / 8) for name, tensor in load_file(file).items()}
    save_file(scaled, file, {"format": "pt"})  # the norms, too, are others
    return made / "model"


def _brief(replies: list[Any]) -> str:
    """What each rank said, as its last lines."""
    texts = []
    for reply in replies:
        error = reply["error"] if isinstance(reply, dict) else reply or "no answer"
        texts.append("no error" if error is None else "..." + error.strip()[-400:])
    return " | ".join(texts)


HEADER = "| fault | injected | detected | recovered | wrong weights | hangs | median s | max s |"


def write_report(file: Path, storms: list[Storm], about: dict[str, Any]) -> str:
    """Write `file`.json and `file`.md; returns the table."""
    merged: dict[str, Row] = {}
    for storm in storms:
        for name, row in storm.report.items():
            into = merged.setdefault(name, Row())
            for key, value in vars(row).items():
                setattr(into, key, getattr(into, key) + value)
    lines = [HEADER, "|---" + "|---:" * 7 + "|"]
    for name, row in sorted(merged.items()):
        *counts, seconds = vars(row).values()
        times = [f"{of(seconds):.1f}" if seconds else "-" for of in (statistics.median, max)]
        lines.append(f"| {' | '.join([name, *map(str, counts), *times])} |")
    table = "\n".join(lines)
    content = {
        **about,
        "rows": {name: asdict(row) for name, row in merged.items()},
        "findings": [asdict(finding) for storm in storms for finding in storm.findings],
        "resources": {f"tp{storm.tp}": storm.resources for storm in storms},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".md").write_text(table + "\n")
    file.with_suffix(".json").write_text(json.dumps(content, indent=1))
    return table
