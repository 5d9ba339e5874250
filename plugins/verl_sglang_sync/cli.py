"""Command line: `verl-sglang-sync doctor`."""

from __future__ import annotations

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


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
