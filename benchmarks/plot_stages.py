"""Draws where the seconds of one sleep, wake and sync go, from a committed result.

python benchmarks/plot_stages.py benchmarks/results/grpo_step-....json docs/stages.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

STAGES = {
    "release": "release",
    "resume_weights": "resume weights",
    "export": "export",
    "pack": "pack",
    "load": "load",
    "sync": "sync",
    "resume_kv": "resume kv",
    "resume_kv_cache": "resume kv",
}


def draw(result: Path, picture: Path) -> None:
    """One stacked bar per arm that has its stages, in the order of the result."""
    document = json.loads(result.read_text())
    rows = [row for row in document["rows"] if "release" in row["median_s"]]
    figure, axes = pyplot.subplots(figsize=(8, 0.7 * len(rows) + 1.2))
    colours = dict(zip(dict.fromkeys(STAGES.values()), pyplot.cm.tab10.colors, strict=False))
    labelled: set[str] = set()
    for position, row in enumerate(rows):
        left = 0.0
        for key, label in STAGES.items():
            seconds = row["median_s"].get(key, 0.0)
            name = None if label in labelled or not seconds else label
            axes.barh(position, seconds, left=left, color=colours[label], label=name)
            labelled |= {label} if name else set()
            left += seconds
        axes.text(left, position, f" {left:.2f} s", va="center")
    axes.set_yticks(range(len(rows)), [f"{row['arm']}\n{row['model']}" for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds per step, {document['hardware']}, {document['date']}")
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        ncols=6, frameon=False, fontsize="small", loc="lower center", bbox_to_anchor=(0.45, 1)
    )
    figure.tight_layout()
    figure.savefig(picture)


def main() -> None:
    """Command line: see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    draw(args.result, args.picture)


if __name__ == "__main__":
    main()
