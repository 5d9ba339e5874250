"""Draws GPU memory in use over one GRPO step, every arm of a committed result.

python benchmarks/plot_memory.py benchmarks/results/grpo_step-....json docs/memory.svg --commit ...
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib import pyplot

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.picture import command


def draw(document: dict[str, Any]) -> tuple[Any, Any]:
    """One line per arm, from the end of the step before to the end of the last step."""
    figure, axes = pyplot.subplots(figsize=(8, 3.2))
    for row in document["rows"]:
        memory = row["memory"]
        gigabytes = [value * 1e-3 for value in memory["megabytes"]]
        axes.step(memory["seconds"], gigabytes, where="post", label=row["arm"])
    axes.set_xlabel(f"seconds into the step, {document['hardware']}, {document['date']}")
    axes.set_ylabel("GPU memory in use, GB")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure, axes


if __name__ == "__main__":
    command(__doc__, draw)
