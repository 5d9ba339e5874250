"""Draws where the seconds of one sleep, wake and sync go, from a committed result.

python benchmarks/plot_stages.py benchmarks/results/colocated-....json docs/stages.svg --commit ...
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib import pyplot

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.picture import command

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


def draw(document: dict[str, Any]) -> tuple[Any, Any]:
    """One stacked bar per arm that has its stages, in the order of the result."""
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
    axes.legend(
        ncols=6, frameon=False, fontsize="small", loc="lower center", bbox_to_anchor=(0.45, 1)
    )
    return figure, axes


if __name__ == "__main__":
    command(__doc__, draw)
