"""Writer of benchmark results, all in one schema, to a file and as a table.

Seconds are medians of host time with the device synchronised. Sizes are bytes.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from verl_sglang_sync.commands.doctor.installation import installed_version, tested_beside


def medians(runs: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each key over all runs that have it."""
    columns: dict[str, list[float]] = {}
    for run in runs:
        for key, value in run.items():
            columns.setdefault(key, []).append(value)
    return {key: statistics.median(values) for key, values in columns.items()}


def hardware() -> str:
    """Name this machine's GPUs as in "1xH200", or "cpu"."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    name = torch.cuda.get_device_name().removeprefix("NVIDIA ").replace(" ", "-")
    return f"{torch.cuda.device_count()}x{name}"


def write_results(path: Path, bench: str, rows: list[dict[str, Any]]) -> None:
    """Write a benchmark's rows to a JSON file, with machine, date, commit and versions."""
    document = {
        "bench": bench,
        "hardware": hardware(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "versions": {
            name: installed_version(name) or "not installed" for name in tested_beside(None)
        },
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def print_table(rows: list[dict[str, Any]], columns: Iterable[str]) -> None:
    """Print one line for each row: arm, model, and the medians named by `columns`."""
    table = Table()
    for column in ("arm", "model", "gpus", "tp", *columns):
        table.add_column(column, justify="left" if column in ("arm", "model") else "right")
    for row in rows:
        seconds = (row["median_s"].get(column) for column in columns)
        cells = ("-" if value is None else f"{value:.4f} s" for value in seconds)
        table.add_row(row["arm"], row["model"], str(row["gpus"]), str(row["tp"]), *cells)
    Console(width=140).print(table)


def _commit() -> str:
    # A copy of the working tree may lack the repository.
    if commit := os.environ.get("GIT_COMMIT"):
        return commit
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
