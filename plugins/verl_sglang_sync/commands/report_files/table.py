"""Table of runs side by side: the first sync of each run, and the median of its later syncs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from verl_sglang_sync.commands.report_files.runs import ReplicaSync, Run, stage_position

BUCKETS = {
    "buckets": "num_buckets",
    "pulled": "num_pulled",
    "exchanged": "num_exchanged",
    "sent by all ranks": "num_sent",
    "exported in full": "num_exported",
    "by the load plan": "num_replayed",
    "by load_weights": "num_eager",
}


def table_of(runs: Sequence[Run]) -> Table:
    """Make the table, with two columns for every run under the run's number in `headings`."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("seconds", no_wrap=True)
    columns = []
    for number, run in enumerate(runs, 1):
        table.add_column(f"({number})\nfirst", justify="right", no_wrap=True)
        columns.append(run.syncs[0])
        if len(run.syncs) > 1:
            table.add_column(f"({number})\nmedian", justify="right", no_wrap=True)
            columns.append(run.typical)
    names = sorted({name for sync in columns for name in sync.shown}, key=stage_position)
    for name in names:
        cells = (_seconds(sync.shown.get(name)) for sync in columns)
        table.add_row(escape(name.replace("_", " ")), *cells)
    table.add_section()
    table.add_row("sleep, wake, sync", *(_seconds(sync.total_seconds) for sync in columns))
    table.add_row("sync alone", *(_seconds(sync.sync_seconds) for sync in columns))
    table.add_row("GB of weights", *(f"{sync.payload_bytes / 1e9:.3g}" for sync in columns))
    table.add_row("GB/s in the sync", *map(_rate, columns))
    table.add_section()
    for label, count in BUCKETS.items():
        style = "bold" if label == "buckets" else None
        table.add_row(label, *(str(getattr(sync, count) or "") for sync in columns), style=style)
    return table


def headings(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the file and mode of each run, and the reasons why buckets were not replayed."""
    for number, run in enumerate(runs, 1):
        num_replicas = len({line.replica for line in run.lines})
        replicas = f" of {num_replicas} replicas, each as the slowest" if num_replicas > 1 else ""
        yield f"({number}) {run.name}: {run.mode}, {len(run.syncs)} syncs{replicas}"
        for reason, num_lines in run.eager_reasons.items():
            yield f"    SGLang's load_weights in {num_lines} of {len(run.lines)} lines: {reason}"


def _seconds(spent: float | None) -> str:
    return "" if spent is None else f"{spent:.2f}" if spent >= 10 else f"{spent:.4f}"


def _rate(sync: ReplicaSync) -> str:
    if not sync.sync_seconds:
        return ""
    rate = sync.payload_bytes / 1e9 / sync.sync_seconds
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
