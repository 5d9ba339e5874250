"""Command line: `verl-sglang-sync doctor`, `bench`, `report` and `prove`."""

from __future__ import annotations

import json
import tempfile
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

app = typer.Typer(
    help="Fast weight sync and staged wake-up for verl with SGLang rollouts.",
    no_args_is_help=True,
    add_completion=False,
)

PICTURES, TRACES = (".png", ".svg"), (".json",)


@app.command()
def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="After `--`: your recipe's arguments of main_ppo."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Check installation, machine, and a recipe. The exit status is 1 if a check failed."""
    from verl_sglang_sync.commands.doctor import report
    from verl_sglang_sync.commands.doctor.check import Status

    with Console(stderr=True).status("importing verl and SGLang (about 20 s)"):
        checks = report.diagnose(overrides or ())
    typer.echo(report.as_json(checks) if as_json else report.as_text(checks))
    raise typer.Exit(int(any(check.status is Status.FAIL for check in checks)))


@app.command()
def bench(
    model: Annotated[
        str | None, typer.Option(help="Shape of the model. Default: the largest that fits the GPU.")
    ] = None,
    arms: Annotated[
        str, typer.Option(help="Ways to sync, separated by commas.")
    ] = "native,flattened,compiled,compiled_packed,copy_limit",
    runs: Annotated[int, typer.Option(min=1, help="Cycles of each arm.")] = 5,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu. Default: cuda if there is a GPU.")
    ] = None,
    results: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="File for all figures.")
    ] = None,
) -> None:
    """Measure sleep, wake-up and sync of a random model by several arms, verl's own among them."""
    import torch

    from verl_sglang_sync.commands.bench.arms import ARMS, COPY_LIMIT
    from verl_sglang_sync.commands.bench.colocated import STAGES, measure
    from verl_sglang_sync.commands.bench.model_shapes import FOR_A_CPU, MODELS, largest_that_fits
    from verl_sglang_sync.commands.bench.results_file import print_table, write_results

    has_gpu = torch.cuda.is_available()
    device, names = device or ("cuda" if has_gpu else "cpu"), [a.strip() for a in arms.split(",")]
    for option, chosen, allowed in (
        ("device", [device], ("cuda", "cpu") if has_gpu else ("cpu",)),
        ("model", [model or FOR_A_CPU], MODELS),
        ("arms", names, (*ARMS, COPY_LIMIT)),
    ):
        if wrong := [value for value in chosen if value not in allowed]:
            _refuse(f"--{option} {','.join(wrong)}: allowed: {', '.join(allowed)}")
    on = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    if model is None and device == "cuda":
        try:
            model = largest_that_fits(torch.cuda.get_device_properties(on).total_memory)
        except ValueError as error:
            _refuse(str(error))
    if results is not None:
        try:
            results.parent.mkdir(parents=True, exist_ok=True)
            results.touch()
        except OSError as error:  # found before the minutes that an arm takes
            _refuse(f"--json {results}: {error}")
    model, console = model or FOR_A_CPU, Console()
    rows: list[dict[str, object]] = []
    folder = Path(tempfile.mkdtemp(prefix="weight-sync-bench-"))
    console.print(f"{model} on {on}, logs of servers and trainers in {folder}")
    for arm in names:
        with console.status(f"{arm}: a server starts, {runs} cycles"):
            try:
                rows.append(measure(model, arm, on, runs, folder))
            except BrokenProcessPool:
                _refuse(
                    f"--arms {arm}: the process that measures {model} was killed, most likely for "
                    "lack of memory. Choose a smaller model with --model"
                )
        if results is not None:
            write_results(results, "colocated", rows)
    print_table(rows, STAGES)


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="Files of `report_file`, one for each run.")],
    plot: Annotated[Path | None, typer.Option(help="Draw a picture: .png or .svg.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto: .json.")] = None,
) -> None:
    """Show what the syncs of one run cost, or compare several runs side by side."""
    from verl_sglang_sync.commands.report_files.runs import ReportFileError, read_run, trace_of
    from verl_sglang_sync.commands.report_files.table import headings, table_of

    for option, path, allowed in (("plot", plot, PICTURES), ("trace", trace, TRACES)):
        if path is not None and path.suffix not in allowed:
            _refuse(f"--{option} {path}: allowed: {', '.join(allowed)}")
    if plot is not None:
        try:
            from verl_sglang_sync.commands.report_files.plot import draw
        except ImportError as error:
            _refuse(f"--plot needs matplotlib: pip install matplotlib ({error})")
    try:
        runs = [read_run(path) for path in files]
        if trace is not None:
            trace.write_text(json.dumps(trace_of(runs)))
        if plot is not None:
            draw(runs).savefig(plot, dpi=150)
    except (ReportFileError, OSError) as error:
        _refuse(str(error))
    # A terminal wraps lines that are too long. rich would cut them.
    console = Console(width=max(1000, Console().width))
    for line in headings(runs):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(table_of(runs))


@app.command()
def prove(
    url: Annotated[str, typer.Argument(help="A rollout server, as http://10.0.0.1:30000.")],
    api_key: Annotated[str | None, typer.Option(help="The server's api_key.")] = None,
    admin_api_key: Annotated[str | None, typer.Option(help="The server's admin_api_key.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0, help="Longest wait for a sync.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Prove the next sync bit for bit. Exit status: 0 proven, 1 different, 2 no answer."""
    from verl_sglang_sync.commands.prove import prove

    try:
        answer = prove(url, api_key=api_key, admin_api_key=admin_api_key, timeout_s=timeout_s)
    except ValueError as error:
        _refuse(str(error))
    proof = {"status": answer.status.name.lower(), "text": answer.text, **answer.proof}
    typer.echo(json.dumps(proof) if as_json else answer.text)
    raise typer.Exit(int(answer.status))


def _refuse(problem: str) -> NoReturn:
    """End with status 2, as typer does if an argument is wrong."""
    typer.echo(f"error: {problem}", err=True)
    raise typer.Exit(2)
