"""Draws GPU memory in use over one GRPO step, every arm of a committed result.

python benchmarks/plot_memory.py benchmarks/results/grpo_step-....json docs/memory.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot


def draw(result: Path, picture: Path) -> None:
    """One line per arm, from the end of the step before to the end of the last step."""
    document = json.loads(result.read_text())
    figure, axes = pyplot.subplots(figsize=(8, 3.2))
    for row in document["rows"]:
        memory = row["memory"]
        gigabytes = [value * 1e-3 for value in memory["megabytes"]]
        axes.step(memory["seconds"], gigabytes, where="post", label=row["arm"])
    axes.set_xlabel(f"seconds into the step, {document['hardware']}, {document['date']}")
    axes.set_ylabel("GPU memory in use, GB")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
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
