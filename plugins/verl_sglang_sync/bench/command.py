"""`verl-sglang-sync bench`: all arms on this machine, with a table at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from verl_sglang_sync.bench.arms import ARMS, COPY_LIMIT
from verl_sglang_sync.bench.colocated import STAGES, Runs, measure
from verl_sglang_sync.bench.model_shapes import FOR_A_CPU, MODELS, largest_that_fits
from verl_sglang_sync.bench.results_file import print_table, write_results

ASLEEP_S = 0.5


class BadChoice(ValueError):
    """An option that cannot be; the text says what is allowed."""


def run(
    model: str | None,
    arms: Sequence[str],
    runs: int,
    device: str | None,
    json: Path | None,
    console: Console,
) -> None:
    """Measure the arms one after the other and print their medians; for the arguments see
    `cli.bench`.

    Raises:
        BadChoice: before anything is started.
    """
    on = _device(device)
    name = _model(model, on)
    allowed = [*ARMS, COPY_LIMIT]
    if wrong := [arm for arm in arms if arm not in allowed]:
        raise BadChoice(f"--arms {','.join(wrong)}: allowed: {', '.join(allowed)}")
    folder = Path(tempfile.mkdtemp(prefix="weight-sync-bench-"))
    console.print(f"{name} on {on}; logs of servers and trainers in {folder}")
    rows: list[dict[str, Any]] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for arm in arms:
            task = progress.add_task(f"{arm}: a server starts, {runs} cycles", total=1)
            rows += measure(name, [arm], on, Runs(runs, ASLEEP_S), folder)
            progress.update(task, completed=1, description=arm)
            if json is not None:
                write_results(json, "colocated", rows)
    print_table(rows, STAGES)


def _device(asked: str | None) -> torch.device:
    has_gpu = torch.cuda.is_available()
    kind = asked or ("cuda" if has_gpu else "cpu")
    if kind not in ("cuda", "cpu"):
        raise BadChoice(f"--device {kind}: allowed: cuda, cpu")
    if kind == "cuda" and not has_gpu:
        raise BadChoice("--device cuda: torch finds no GPU here; allowed: cpu")
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


def _model(asked: str | None, device: torch.device) -> str:
    if asked is not None and asked not in MODELS:
        raise BadChoice(f"--model {asked}: allowed: {', '.join(MODELS)}")
    if asked is not None:
        return asked
    if device.type == "cpu":
        return FOR_A_CPU
    try:
        return largest_that_fits(torch.cuda.get_device_properties(device).total_memory)
    except ValueError as error:
        raise BadChoice(str(error)) from None
