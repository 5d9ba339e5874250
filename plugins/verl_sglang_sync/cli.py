"""Command line: `verl-sglang-sync doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="Fast weight sync and staged wake-up for verl with SGLang rollouts.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def commands() -> None:
    """Keep subcommands named, even while there is only one."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Check versions, plugins, hooks, hardware and presets; exits with 1 if a check failed."""
    from verl_sglang_sync.doctor import diagnose, report

    with Console(stderr=True).status("importing verl and SGLang (about 20 s)"):
        checks = diagnose()
    if as_json:
        typer.echo(report.as_json(checks))
    else:
        console = Console()
        console.print(report.as_table(checks))
        console.print(report.summary(checks))
    raise typer.Exit(report.exit_status(checks))


@app.command()
def bench(
    model: Annotated[
        str | None, typer.Option(help="A shape; by default the largest that fits the GPU.")
    ] = None,
    arms: Annotated[
        str, typer.Option(help="Separated by commas; see verl_sglang_sync.bench.arms.")
    ] = "native,bucketed,flattened,compiled,compiled_packed,copy_limit",
    runs: Annotated[int, typer.Option(min=1, help="Cycles of each arm.")] = 5,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; by default a GPU if there is one.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="File for all figures.")] = None,
) -> None:
    """Measure sleep, wake-up and sync of a random model: verl's own, ours, and the copy limit."""
    from verl_sglang_sync.bench.command import BadChoice, run

    try:
        run(model, [arm.strip() for arm in arms.split(",")], runs, device, json, Console())
    except BadChoice as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
