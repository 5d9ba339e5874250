"""Draws a committed result: where the seconds of a cycle go, or GPU memory over a GRPO step.

python benchmarks/plot.py benchmarks/results/colocated-....json docs/stages.svg --model ...
python benchmarks/plot.py benchmarks/results/grpo_step-....json docs/memory.svg --commit ...
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

STAGES = ("release", "resume_weights", "sync", "resume_kv")
Rows = list[dict[str, Any]]


def draw_stages(axes: Axes, rows: Rows) -> str:
    """A stacked bar for each arm that sleeps, in the order of the result; the axis' label."""
    medians = [row["median_s"] for row in rows]
    lefts = [0.0] * len(rows)
    for stage in STAGES:
        widths = [seconds[stage] for seconds in medians]
        axes.barh(range(len(rows)), widths, left=lefts, label=stage.replace("_", " "))
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for position, (left, seconds) in enumerate(zip(lefts, medians, strict=True)):
        axes.text(left, position, f" {seconds['cycle']:.3g} s", va="center")
    axes.set_yticks(range(len(rows)), [f"{row['arm']}\n{row['model']}" for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.legend(
        ncols=6, frameon=False, fontsize="small", loc="lower center", bbox_to_anchor=(0.45, 1)
    )
    return "seconds per step"


def draw_memory(axes: Axes, rows: Rows) -> str:
    """A line for each arm, over its last step; the axis' label."""
    for row in rows:
        memory = row["memory"]
        gigabytes = [value * 1e-3 for value in memory["megabytes"]]
        axes.step(memory["seconds"], gigabytes, where="post", label=row["arm"])
    axes.set_ylabel("GPU memory in use, GB")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return "seconds into the step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--commit", help="draw only the rows measured at this commit")
    parser.add_argument("--model", help="draw only the rows of this model")
    args = parser.parse_args()
    document = json.loads(args.result.read_text())
    rows = [row for row in document["rows"] if args.commit in (None, row.get("commit"))]
    rows = [row for row in rows if args.model in (None, row["model"])]
    if document["bench"] == "colocated":
        rows = [row for row in rows if row["median_s"].keys() >= set(STAGES)]
        figure, draw = Figure(figsize=(8, 0.7 * len(rows) + 1.2)), draw_stages
    else:
        figure, draw = Figure(figsize=(8, 3.2)), draw_memory
    axes = figure.subplots()
    label = draw(axes, rows)
    axes.set_xlabel(f"{label}, {document['hardware']}, {document['date']}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(args.picture)


if __name__ == "__main__":
    main()
