"""Shows runs side by side: of each its first sync, and the median of the later ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from verl_sglang_sync.report_files.runs import ReplicaSync, Run, stage_position

Row = tuple[str, Callable[[ReplicaSync], str]]

TOTALS: tuple[Row, ...] = (
    ("sleep, wake, sync", lambda sync: _seconds(sync.total_seconds)),
    ("sync alone", lambda sync: _seconds(sync.sync_seconds)),
    ("GB of weights", lambda sync: f"{sync.payload_bytes / 1e9:.3g}"),
    ("GB/s in the sync", lambda sync: _rate(sync)),
)
BUCKETS: tuple[Row, ...] = (
    ("read in place", lambda sync: _count(sync.num_pulled)),
    ("exchanged", lambda sync: _count(sync.num_exchanged)),
    ("sent by all ranks", lambda sync: _count(sync.num_sent)),
    ("exported in full", lambda sync: _count(sync.num_exported)),
    ("by the load plan", lambda sync: _count(sync.num_replayed)),
    ("by load_weights", lambda sync: _count(sync.num_eager)),
)


def table_of(runs: Sequence[Run]) -> Table:
    """Two columns for every run, under its number in `headings`."""
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
    for label, show in TOTALS:
        table.add_row(label, *map(show, columns))
    table.add_section()
    table.add_row("buckets", *(str(sync.num_buckets) for sync in columns), style="bold")
    for label, show in BUCKETS:
        table.add_row(label, *map(show, columns))
    return table


def headings(runs: Sequence[Run]) -> Iterator[str]:
    """What each number in the table stands for, and why buckets of that run were not replayed."""
    for number, run in enumerate(runs, 1):
        num_replicas = len({line.replica for line in run.lines})
        each = f" of {num_replicas} replicas, each as the slowest" if num_replicas > 1 else ""
        yield f"({number}) {run.name}: {run.syncs[0].mode}, {len(run.syncs)} syncs{each}"
        for reason, num_lines in run.eager_reasons.items():
            yield f"    SGLang's load_weights in {num_lines} of {len(run.lines)} lines: {reason}"


def _seconds(spent: float | None) -> str:
    return "" if spent is None else f"{spent:.2f}" if spent >= 10 else f"{spent:.4f}"


def _rate(sync: ReplicaSync) -> str:
    if not sync.sync_seconds:
        return ""
    rate = sync.payload_bytes / 1e9 / sync.sync_seconds
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _count(number: int) -> str:
    return str(number) if number else ""
