"""A trace of runs for Perfetto and chrome://tracing: a process per file, a thread per replica.

Source: the Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

A report has the seconds of a stage and when it first began, not each of its parts: a stage is drawn
in one piece, from when it began or from the end of the one before, whichever is later. A stage
without a beginning, the sleep in the server's process, is drawn right before the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from verl_sglang_sync.report_files.runs import ReplicaSync, ReportFileError, Run


def trace_of(runs: Sequence[Run]) -> dict[str, Any]:
    """The JSON object of a trace; times are Unix time, in microseconds.

    Raises:
        ReportFileError: a line does not say when its stages began.
    """
    events = [event for number, run in enumerate(runs) for event in _events(number, run)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(process: int, run: Run) -> Iterator[dict[str, Any]]:
    yield _named("process_name", run.name, pid=process)
    for replica in dict.fromkeys(line.replica for line in run.lines):
        name = "all replicas" if replica is None else f"replica {replica}"
        yield _named("thread_name", name, pid=process, tid=replica or 0)
    for number, line in enumerate(run.lines, 1):
        if not line.started_at:
            raise ReportFileError(f"{run.name}, line {number}: started_at is empty: no trace")
        for stage, start, seconds in spans(line):
            yield {
                "name": stage,
                "ph": "X",
                "ts": start * 1e6,
                "dur": seconds * 1e6,
                "pid": process,
                "tid": line.replica or 0,
                "args": {"weight_version": line.weight_version, "mode": line.mode},
            }


def _named(kind: str, name: str, **ids: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "args": {"name": name}, **ids}


def spans(line: ReplicaSync) -> Iterator[tuple[str, float, float]]:
    """(stage, Unix seconds of its beginning, seconds), in the order of the report."""
    known = line.started_at
    if "sync" in line.seconds:  # around its parts
        yield "sync", known["sync"], line.seconds["sync"]
    stages = [(name, spent) for name, spent in line.seconds.items() if name != "sync"]
    first = next(i for i, (name, _) in enumerate(stages) if name in known)
    end = known[stages[first][0]] - sum(spent for _, spent in stages[:first])
    for name, spent in stages:
        start = max(end, known.get(name, end))
        end = start + spent
        yield name, start, spent
