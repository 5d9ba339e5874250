"""A storm: random faults on a real engine and its trainers, one per round, and what came of each.

    with Storm(folder, tp=2, seed=7) as storm:
        storm.run(60, FAULTS, deadline=...)
    storm.rows       # by kind of fault; storm.findings: every broken invariant

A round injects one fault (`storm_faults`), checks what is served (`storm_checks`), has the trainer
sync once more (`storm_trainer`), which must succeed, and checks again.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file, save_file
from tiny_assets import make_assets

from sglang_loader.common.engine_settings import STALE_REQUESTS_VARIABLE
from support.engine_loaders import COUNT_LOADER, FAIL_LOADER
from support.fault_proxy import FaultProxy
from support.served import served
from support.storm_checks import PROMPTS, StormEngine, Stream, Violation, shared_memory, strays
from support.storm_trainer import (
    NUM_VERSIONS,
    PATIENT_S,
    PRESETS,
    TIMEOUT_S,
    PublishedError,
    sync,
)
from support.storm_wire import Wire
from support.trainer import Ranks
from verl_sglang_sync.sync.sessions import MAY_SERVE

LEAVE_S = 10.0
"""All ranks have left a failed sync by then, and by three attempts of one request."""

RECOVERY_S = 3 * PATIENT_S + LEAVE_S
STRAYS_S = 20.0
DEATH_S = 20.0
GATES = {1: "0", 2: "600"}
VERBOSE = bool(os.environ.get("STORM_VERBOSE"))
BOUNDS = {"fds": 60, "threads": 35}
"""How much more of each a TP rank may have after a storm than after its start. Of these 48 and 24
are the groups of dead trainers: `MAX_GROUPS` at most, with 6 open files and 3 threads each.
"""
MAX_GROWN_MB = 300
"""Of the resident memory of all the server's processes."""


@dataclass
class Row:
    """What came of one kind of fault; `seconds`: from each injection to the end of its recovery."""

    injected: int = 0
    detected: int = 0
    recovered: int = 0
    seconds: list[float] = field(default_factory=list)


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
        self.rows: dict[str, Row] = defaultdict(Row)
        self.row = Row()  # of this round's fault
        self.findings: list[dict[str, Any]] = []
        self.resources: list[dict[str, int]] = []
        self.batch = 1  # how many bodies a round of fuzzing posts
        self._round, self._fault, self._context = 0, "start", ""
        self.label = NUM_VERSIONS  # the references have the labels below
        self._begun: dict[int, tuple[int, float]] = {}  # labels and limits, by trainer
        self._allowed: set[str] = set()  # what may be served now
        self._given_up: set[str] = set()
        self._trainers: dict[int, Ranks] = {}  # 0, and a rival
        self._pids: set[int] = set()
        self._num_engines = 0
        self._stack = ExitStack()

    def __enter__(self) -> Storm:
        self.temporary.mkdir()
        self._older_files = shared_memory().keys()  # of processes whose numbers may come again
        self._models = [_version(self.folder, slot) for slot in range(NUM_VERSIONS)]
        self._environment = {"TMPDIR": str(self.temporary)}
        self.start_engine()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_engine()
        deadline = time.monotonic() + STRAYS_S
        while (left := self._left_behind()) and time.monotonic() < deadline:
            time.sleep(0.5)
        if left:
            self._find(Violation("leak", f"left behind: {left[:20]}"))

    def _left_behind(self) -> list[str]:
        made = {str(path) for path, pid in shared_memory().items() if pid in self._pids}
        return [*strays(self.folder), *(made - {str(path) for path in self._older_files})]

    def start_engine(self) -> None:
        """Start the server, or another one in its place."""
        self._stop_engine()
        self._stack, self._num_engines = ExitStack(), self._num_engines + 1
        variables = {**self._environment, STALE_REQUESTS_VARIABLE: GATES[self.tp]}
        own = self.folder / f"engine{self._num_engines}"
        engine = self._stack.enter_context(
            served(
                own,
                model=self._models[0],
                tp=self.tp,
                variables=variables,
                loaders=(COUNT_LOADER, FAIL_LOADER),
            )
        )
        self.wire = Wire(self.temporary)
        self.proxy = self._stack.enter_context(FaultProxy(engine.url, self.wire))
        self.urls = {"direct": engine.url, "proxy": self.proxy.url}
        self.engine = StormEngine(engine, self._models)
        self._pids |= {process.pid for process in self.engine.processes()}
        self._allowed = {str(NUM_VERSIONS - 1)}
        self.resources.clear()

    def _stop_engine(self) -> None:
        self._end_trainers()
        self._stack.close()

    def _end_trainers(self) -> list[int]:
        """Kill them all; their processes."""
        trainers, self._trainers = self._trainers.values(), {}
        for trainer in trainers:
            trainer.kill(*range(self.tp))
            trainer.end()
        return [each.process.pid for trainer in trainers for each in trainer.processes]

    # What faults are made of.

    def trainer(self, number: int = 0) -> Ranks:
        """A trainer whose ranks all wait for a command; a new one in place of a broken one."""
        if number in self._trainers and not self._trainers[number].is_usable:
            self._trainers.pop(number).end()
        if number not in self._trainers:
            made = Ranks(self.folder, [self.engine.url], tp=self.tp, environment=self._environment)
            self._trainers[number] = made
            self._pids |= {each.process.pid for each in made.processes}
        return self._trainers[number]

    def begin(
        self,
        *,
        number: int = 0,
        preset: str | None = None,
        limit_s: float = TIMEOUT_S,
        **command: Any,
    ) -> Ranks:
        """Have a trainer start a sync of the next version; see `storm_trainer.sync`."""
        self.label += 1
        preset = preset or self.rng.choice(PRESETS)
        self._begun[number] = self.label, limit_s
        self._context += f" [trainer {number}: {preset} {self.label} {command or ''}]"
        trainer = self.trainer(number)
        command = {"preset": preset, "label": self.label, "limit_s": limit_s, **command}
        trainer.begin(sync, self._models, self.urls, command)
        return trainer

    def finish(
        self, *, number: int = 0, more_s: float = 0.0, must_fail: bool = False
    ) -> list[str | None]:
        """Wait until all ranks have left the sync that `begin` started: the errors of those that
        live.

        Args:
            number: of the trainer.
            more_s: for how long the fault itself stops a process.
            must_fail: what is exported cannot be loaded.

        Raises:
            Violation: a rank does not leave, not all raise, or a bad sync was accepted.
        """
        begun, limit_s = self._begun[number]
        trainer, label = self._trainers[number], str(begun)
        leave_s = 3 * limit_s + LEAVE_S + more_s
        outcomes = trainer.finish(leave_s)
        alive = zip(outcomes, trainer.processes, strict=True)
        errors = [outcome.error for outcome, rank in alive if outcome and not rank.is_dead]
        if errors and all(errors):
            # what fails after the sync, such as the resume of the KV cache, takes nothing back
            served = (MAY_SERVE, PublishedError.__name__)
            may_serve = any(text in error for error in errors if error for text in served)
            (self._allowed if may_serve else self._given_up).add(label)
            self.row.detected += 1
        elif errors or not trainer.hung():  # where there is no answer, nobody lives who knows
            self._allowed.add(label)
        if hung := trainer.hung():
            self._given_up.add(label)
            after = f"{leave_s:.0f} s"
            raise Violation("hang", f"ranks {hung} not left after {after}: {_brief(outcomes)}")
        if any(errors) and not all(errors):
            raise Violation("split ranks", _brief(outcomes))
        if must_fail and not any(errors):
            raise Violation("bad sync accepted", f"version {label}")
        return errors

    def a_while(self, longest_s: float) -> None:
        """Sleep for a random time."""
        time.sleep(self.rng.uniform(0, longest_s))

    def note(self, text: str) -> None:
        """Add to what findings of this round show."""
        self._context += f" [{text}]"

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
            injected += self._run_round(self.rng.choices(faults, weights)[0])
            if self._round % 25 == 5:
                self.resources.append(self.engine.resources())
        self.resources.append(self.engine.resources())
        self._check_leaks()
        return injected

    def _run_round(self, fault: Any) -> int:
        """Inject one fault, check, recover, check; returns how many faults that were."""
        self._fault, self._context, self.row = fault.name, "", self.rows[fault.name]
        num_findings, started, engine = len(self.findings), time.monotonic(), self.engine
        streams, count = [self._stream()], [1]
        self._guarded(lambda: count.append(fault.inject(self) or 1))
        self.row.injected += count[-1]
        self._guarded(self.check_served)
        streams.append(self._stream())
        self.row.recovered += count[-1] if self._recover() else 0
        for stream in filter(None, streams):
            is_cut = self.engine is not engine
            self._guarded(partial(stream.check, engine.tokens, may_be_cut=is_cut))
        self.row.seconds.append(time.monotonic() - started)
        if VERBOSE or len(self.findings) > num_findings:
            seconds = f"{self.row.seconds[-1]:.1f} s"
            print(f"round {self._round}, {seconds}: {fault.name}{self._context}", flush=True)
        return count[-1]

    def _stream(self) -> Stream | None:
        """A user's request that runs meanwhile, in half of the rounds."""
        if self.rng.random() < 0.5:
            return None
        stream = Stream(self.engine.url, self.rng.choice(PROMPTS), self.rng.randrange(8, 64))
        stream.start()
        time.sleep(self.rng.choice((0, 0.02)))
        return stream

    def check_served(self) -> None:
        """One version that may be, and nothing else; or nothing."""
        label = self.engine.served()
        if label in self._given_up:
            raise Violation("given up, yet served", f"version {label}")
        if label is not None and label not in self._allowed:
            raise Violation("wrong weights", f"serves {label}, expected one of {self._allowed}")

    def _recover(self, presets: Sequence[str] = PRESETS) -> bool:
        """Sync once more; True if its version is served, else there is another engine."""
        if self._guarded(partial(self.good_sync, presets)):
            return True
        self.start_engine()
        return False

    def good_sync(self, presets: Sequence[str] = PRESETS, *, number: int = 0) -> None:
        """A sync that must succeed, and is served."""
        preset = self.rng.choice(presets)
        is_broadcast = preset.startswith("broadcast")
        if is_broadcast:
            self.engine.post("resume_memory_occupation", b'{"tags": ["weights"]}')
        via = self.rng.choice(("direct", "direct", "proxy"))
        trainer = self.begin(number=number, preset=preset, via=via, limit_s=PATIENT_S)
        label, outcomes = str(self.label), trainer.finish(RECOVERY_S)
        if any(outcome is None or outcome.error for outcome in outcomes):
            self._given_up.add(label)
            raise Violation("not recovered", f"hung {trainer.hung()}: {_brief(outcomes)}")
        if is_broadcast:
            self.engine.post("resume_memory_occupation", b"{}")
        self._allowed, self._given_up = {label}, set()
        if (served := self.engine.served(limit_s=PATIENT_S)) != label:
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
        where = {"seed": self.seed, "tp": self.tp, "round": self._round, "fault": self._fault}
        detail = f"{violation.detail}{self._context}"[:3000]
        if not self.engine.server.lives:
            log = self.engine.server.log
            cause = log[log.rfind("Traceback (most recent call last)") :]
            detail += f" [the engine died: {self.engine.server.log_file}: {cause[:2000]}]"
        self.findings.append({**where, "kind": violation.kind, "detail": detail})
        print(f"FOUND {where}: {violation.kind}: {detail[:1200]}", flush=True)

    def _check_leaks(self) -> None:
        """Nothing is left of processes that are gone, once another trainer has synced."""
        self._fault, self._context, self.row = "end of the storm", "", Row()
        _wait_until_dead(self._end_trainers())
        before = set(self.temporary.glob("weight-sync-*"))
        self._recover([preset for preset in PRESETS if not preset.startswith("broadcast")])
        if left := sorted(before & set(self.temporary.glob("weight-sync-*"))):
            self._find(Violation("leak", f"{len(left)} folders of dead trainers: {left[:3]}"))
        bounds = {key: bound * self.tp for key, bound in BOUNDS.items()} | {"rss_mb": MAX_GROWN_MB}
        grown = {key: self.resources[-1][key] - self.resources[0][key] for key in bounds}
        if any(grown[key] > bounds[key] for key in bounds):
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
    make_assets(folder / f"version{slot}", seed=slot)
    file = folder / f"version{slot}" / "model" / "model.safetensors"
    scaled = {name: tensor * (1 + slot / 8) for name, tensor in load_file(file).items()}
    save_file(scaled, file, {"format": "pt"})  # the norms, too, are others
    return file.parent


def _brief(outcomes: Sequence[Any]) -> str:
    """What each rank said, as its last lines."""
    errors = ["no answer" if each is None else each.error or "no error" for each in outcomes]
    return " | ".join(error.strip()[-400:] for error in errors)


HEADER = "| fault | injected | detected | recovered | broken | median s | max s |"


def write_report(file: Path, storms: list[Storm], about: dict[str, Any]) -> str:
    """Write `file`.json and `file`.md; returns the table, in which `broken` counts findings."""
    findings = [finding for storm in storms for finding in storm.findings]
    lines = [HEADER, "|---" + "|---:" * 6 + "|"]
    for name in sorted({name for storm in storms for name in storm.rows}):
        rows = [storm.rows[name] for storm in storms]
        seconds = [each for row in rows for each in row.seconds] or [0.0]
        counts = [
            *(sum(row.injected for row in rows), sum(row.detected for row in rows)),
            *(sum(row.recovered for row in rows), sum(f["fault"] == name for f in findings)),
        ]
        times = f"{statistics.median(seconds):.1f} | {max(seconds):.1f}"
        lines.append(f"| {name} | {' | '.join(map(str, counts))} | {times} |")
    content = {
        **about,
        "findings": findings,
        **{f"tp{storm.tp}": [storm.rows, storm.resources] for storm in storms},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".md").write_text("\n".join([*lines, ""]))
    file.with_suffix(".json").write_text(json.dumps(content, indent=1, default=vars))
    return "\n".join(lines)
