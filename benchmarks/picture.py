"""What the programs that draw a committed result have in common."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

Draw = Callable[[dict[str, Any]], tuple[Any, Any]]
"""Draws a result's document; returns figure and axes."""


def command(description: str, draw: Draw) -> None:
    """Command line: RESULT PICTURE [--commit COMMIT]."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--commit", help="draw only the rows measured at this commit")
    args = parser.parse_args()
    document = json.loads(args.result.read_text())
    if args.commit:
        document["rows"] = [row for row in document["rows"] if row.get("commit") == args.commit]
    figure, axes = draw(document)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(args.picture)
    pyplot.close(figure)
