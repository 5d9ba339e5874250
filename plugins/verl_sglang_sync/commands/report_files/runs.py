"""Reads report files back: one run per file, one sync per line and replica.

    run = read_run(Path("syncs.jsonl"))
    run.syncs[0].shown             # of the first sync: seconds by stage
    run.typical.shown              # of the median one of the later syncs

All replicas sync at the same time, so a sync is shown as its slowest replica went through it: the
lines of one weight version are of one sync, and where a replica has several of a version, as after
a restart, the n-th ones are. The median is one real sync, so that its stages add up to its seconds.

`trace_of` is for Perfetto and chrome://tracing: a process per file, a thread per replica. A stage
is drawn in one piece, from its beginning or the end of the last stage, whichever is later; the
sleep, whose beginning is not recorded, right before the next stage. Source: the Trace Event Format,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from verl_sglang_sync.report import SyncReport

STAGES = (
    *("release", "resume_weights", "resume_weights_and_kv_cache", "open", "export", "pack"),
    *("gather", "send", "confirm", "load", "commit", "publish", "reply", "learn", "prove", "other"),
    "resume_kv_cache",
)
"""Stages in the order of display; "other" is the part of "sync" that is in none of its stages."""

MEMORY = ("release", "resume_")
"""Prefixes of the stages that are not part of "sync"."""


class ReportFileError(ValueError):
    """A file is not a report file; the message names the file and the line."""


class ReplicaSync(SyncReport):
    """One line of a report file."""

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ValueError("seconds is empty")

    @property
    def shown(self) -> dict[str, float]:
        """Seconds by stage, in the order of `STAGES`, with "other" instead of "sync"."""
        stages = {name: spent for name, spent in self.seconds.items() if name != "sync"}
        if "sync" in self.seconds:
            parts = sum(spent for name, spent in stages.items() if not name.startswith(MEMORY))
            stages["other"] = max(0.0, self.seconds["sync"] - parts)
        return {name: stages[name] for name in sorted(stages, key=stage_position)}

    @property
    def total_seconds(self) -> float:
        return sum(self.shown.values())

    @property
    def sync_seconds(self) -> float:
        """Seconds without sleep and wake-up."""
        return sum(spent for name, spent in self.shown.items() if not name.startswith(MEMORY))

    @property
    def num_exported(self) -> int:
        """Number of buckets that were packed from the full export."""
        others = self.num_pulled + self.num_exchanged + self.num_sent  # one may count twice
        return max(0, self.num_buckets - others)


@dataclass(frozen=True)
class Run:
    """All lines of one file, at least one."""

    name: str
    lines: tuple[ReplicaSync, ...]

    @property
    def mode(self) -> str:
        """The modes of all lines: two if only some rollouts share the trainer's GPUs."""
        return ", ".join(dict.fromkeys(line.mode for line in self.lines))

    @cached_property
    def syncs(self) -> list[ReplicaSync]:
        """One after the other, each as the slowest replica went through it."""
        num_lines: Counter[tuple[int | None, str | None]] = Counter()
        together: dict[tuple[str | None, int], list[ReplicaSync]] = defaultdict(list)
        for line in self.lines:
            num_lines[line.replica, line.weight_version] += 1
            number = num_lines[line.replica, line.weight_version]
            together[line.weight_version, number].append(line)
        return [max(lines, key=lambda line: line.total_seconds) for lines in together.values()]

    @property
    def typical(self) -> ReplicaSync:
        """The median of the syncs after the first, or the only one."""
        later = sorted(self.syncs[1:] or self.syncs, key=lambda line: line.total_seconds)
        return later[(len(later) - 1) // 2]

    @property
    def eager_reasons(self) -> Counter[str]:
        """The reasons why buckets were not replayed, with their numbers of lines."""
        return Counter(line.eager_reason for line in self.lines if line.eager_reason is not None)


def read_run(path: Path) -> Run:
    """Read one file; `ReportFileError` if it has no line, or one that is not a report."""
    lines = []
    try:
        for text in path.read_bytes().rstrip().splitlines():
            lines.append(msgspec.json.decode(text, type=ReplicaSync))
    except OSError as error:
        raise ReportFileError(f"{path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        where = f"{path}, line {len(lines) + 1}"
        raise ReportFileError(f"{where}: not a line of a report file: {error}") from None
    if not lines:
        raise ReportFileError(f"{path}: holds no sync")
    return Run(str(path), tuple(lines))


def stage_position(name: str) -> int:
    """Position of a stage in `STAGES`; others come last."""
    return STAGES.index(name) if name in STAGES else len(STAGES)


def trace_of(runs: Sequence[Run]) -> dict[str, Any]:
    """The JSON object of a trace; times are Unix time, in microseconds."""
    events: list[dict[str, Any]] = []
    for process, run in enumerate(runs):
        named = [("process_name", run.name, 0)]
        for replica in dict.fromkeys(line.replica for line in run.lines):
            name = "all replicas" if replica is None else f"replica {replica}"
            named.append(("thread_name", name, replica or 0))
        for kind, name, thread in named:
            ids = {"pid": process, "tid": thread}
            events.append({"name": kind, "ph": "M", "args": {"name": name}, **ids})
        for number, line in enumerate(run.lines, 1):
            begun = line.seconds.keys() & line.started_at.keys()
            if "sync" in line.seconds.keys() - begun or not begun - {"sync"}:
                where = f"{run.name}, line {number}"
                raise ReportFileError(f"{where}: started_at lacks its stages: no trace")
            ids = {"pid": process, "tid": line.replica or 0}
            args = {"weight_version": line.weight_version, "mode": line.mode}
            for stage, start, spent in spans(line):
                times = {"ts": start * 1e6, "dur": spent * 1e6}
                events.append({"name": stage, "ph": "X", **times, **ids, "args": args})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def spans(line: ReplicaSync) -> Iterator[tuple[str, float, float]]:
    """`(stage, Unix seconds of its beginning, seconds)`, in the order of the report."""
    begun = line.started_at
    if "sync" in line.seconds:  # around its stages
        yield "sync", begun["sync"], line.seconds["sync"]
    stages = [(name, spent) for name, spent in line.seconds.items() if name != "sync"]
    first = next(i for i, (name, _) in enumerate(stages) if name in begun)
    end = begun[stages[first][0]] - sum(spent for _, spent in stages[:first])
    for name, spent in stages:
        start = max(end, begun.get(name, end))
        end = start + spent
        yield name, start, spent
