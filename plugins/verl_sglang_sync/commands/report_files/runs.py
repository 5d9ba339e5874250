"""Reader of report files: a file is a run, a line is one sync of one replica.

    run = read_run(Path("syncs.jsonl"))
    run.syncs[0].shown             # the first sync: seconds by stage
    run.typical.shown              # the median of the later syncs

All replicas sync at the same time, so the slowest replica stands for a sync. The median is one real
sync, so that its stages add up to its seconds.

`trace_of` makes a trace for Perfetto and chrome://tracing: a process for each file, a thread for
each replica. Source: the Trace Event Format,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from verl_sglang_sync.report import SyncReport

STAGES = (
    *("release", "resume_weights", "resume_weights_and_kv_cache", "open", "export", "plan"),
    *(
        "pack",
        "gather",
        "send",
        "confirm",
        "load",
        "publish",
        "reply",
        "learn",
        "prove",
        "other",
    ),
    "resume_kv_cache",
)
"""Stages in the order of display. "other" is the part of "sync" outside of its stages."""

MEMORY = ("release", "resume_")
"""Prefixes of the stages that are not part of "sync"."""


class ReportFileError(ValueError):
    """A file that is no report file. The message names the file and the line."""


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
        """Seconds of the sync, with sleep and wake-up."""
        return sum(self.shown.values())

    @property
    def sync_seconds(self) -> float:
        """Seconds without sleep and wake-up."""
        return sum(spent for name, spent in self.shown.items() if not name.startswith(MEMORY))

    @property
    def num_exported(self) -> int:
        """Number of buckets that were packed from the full export."""
        # A bucket may be pulled by one replica and sent to another, and counts twice then.
        num_routed = self.num_pulled + self.num_exchanged + self.num_sent
        return max(0, self.num_buckets - num_routed)


@dataclass(frozen=True)
class Run:
    """All lines of one file, at least one."""

    name: str
    lines: tuple[ReplicaSync, ...]

    @property
    def mode(self) -> str:
        """The modes of all lines. There are two if only some rollouts share the trainer's GPUs."""
        return ", ".join(dict.fromkeys(line.mode for line in self.lines))

    @cached_property
    def syncs(self) -> list[ReplicaSync]:
        """All syncs in order, each as its slowest replica has reported it."""
        # The lines of one weight version are of one sync. After a restart a replica may have
        # several lines of a version: the n-th lines of all replicas are of one sync.
        num_lines: Counter[tuple[int | None, str | None]] = Counter()
        together: dict[tuple[str | None, int], list[ReplicaSync]] = defaultdict(list)
        for line in self.lines:
            num_lines[line.replica, line.weight_version] += 1
            number = num_lines[line.replica, line.weight_version]
            together[line.weight_version, number].append(line)
        return [max(lines, key=_total_seconds) for lines in together.values()]

    @property
    def typical(self) -> ReplicaSync:
        """The median of the syncs after the first, or the only sync."""
        later = sorted(self.syncs[1:] or self.syncs, key=_total_seconds)
        return later[(len(later) - 1) // 2]

    @property
    def eager_reasons(self) -> Counter[str]:
        """The reasons why buckets were not replayed, with the number of lines of each."""
        return Counter(line.eager_reason for line in self.lines if line.eager_reason is not None)


_total_seconds = attrgetter("total_seconds")


def read_run(path: Path) -> Run:
    """Read one file.

    Raises:
        ReportFileError: the file has no line, or a line that is no report.
    """
    lines = []
    try:
        for text in path.read_bytes().rstrip().splitlines():
            lines.append(msgspec.json.decode(text, type=ReplicaSync))
    except OSError as error:
        raise ReportFileError(f"{path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        number = len(lines) + 1
        problem = f"{path}, line {number}: not a line of a report file: {error}"
        raise ReportFileError(problem) from None
    if not lines:
        raise ReportFileError(f"{path}: holds no sync")
    return Run(str(path), tuple(lines))


def stage_position(name: str) -> int:
    """Return the position of a stage in `STAGES`. Unknown stages come last."""
    return STAGES.index(name) if name in STAGES else len(STAGES)


def trace_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Make the JSON object of a trace. Its times are Unix time in microseconds.

    Raises:
        ReportFileError: a line lacks the times at which its stages began.
    """
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
                raise ReportFileError(
                    f"{run.name}, line {number}: started_at lacks its stages: no trace"
                )
            ids = {"pid": process, "tid": line.replica or 0}
            args = {"weight_version": line.weight_version, "mode": line.mode}
            for stage, start, spent in spans(line):
                times = {"ts": start * 1e6, "dur": spent * 1e6}
                events.append({"name": stage, "ph": "X", **times, **ids, "args": args})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def spans(line: ReplicaSync) -> Iterator[tuple[str, float, float]]:
    """Yield `(stage, Unix seconds of its beginning, seconds)`, in the order of the report."""
    begun = line.started_at
    if "sync" in line.seconds:  # around its stages
        yield "sync", begun["sync"], line.seconds["sync"]
    stages = [(name, spent) for name, spent in line.seconds.items() if name != "sync"]
    # The beginning of a sleep is not recorded. Draw it right before the first stage that has one.
    first = next(i for i, (name, _) in enumerate(stages) if name in begun)
    end = begun[stages[first][0]] - sum(spent for _, spent in stages[:first])
    for name, spent in stages:
        # Stages alternate, as export and pack, and their seconds are sums. Draw each as one span.
        start = max(end, begun.get(name, end))
        end = start + spent
        yield name, start, spent
