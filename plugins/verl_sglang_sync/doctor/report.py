"""The doctor's report, as a table for people or JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.markup import escape
from rich.table import Table

from verl_sglang_sync.doctor.check import Check, Status, worst

STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def as_json(checks: Sequence[Check]) -> str:
    """`{"status": worst, "checks": [{"name", "status", "detail", "advice"}, ...]}`."""
    report = {"status": worst(checks), "checks": [asdict(check) for check in checks]}
    return json.dumps(report, indent=2)


def as_table(checks: Sequence[Check]) -> Table:
    """A row per check; advice stands below the detail it belongs to."""
    table = Table(title="verl-sglang-sync doctor", title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in checks:
        style = STYLES[check.status]
        detail = escape(check.detail)
        if check.advice:
            detail += f"\n[dim]{escape(check.advice)}[/]"
        table.add_row(escape(check.name), f"[{style}]{check.status}[/]", detail)
    return table


def summary(checks: Sequence[Check]) -> str:
    """One line: how many checks came out how, as rich markup."""
    counts = {status: sum(check.status is status for check in checks) for status in Status}
    parts = [f"[{STYLES[status]}]{count} {status}[/]" for status, count in counts.items() if count]
    return ", ".join(parts)


def exit_status(checks: Sequence[Check]) -> int:
    """0 if nothing failed, 1 otherwise."""
    return 1 if worst(checks) is Status.FAIL else 0
