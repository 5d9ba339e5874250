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
    """Command line: RESULT PICTURE."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    figure, axes = draw(json.loads(args.result.read_text()))
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(args.picture)
    pyplot.close(figure)
