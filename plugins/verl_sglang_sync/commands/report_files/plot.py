"""Plots of runs: the stages of the median sync, and the seconds of every sync.

The module imports matplotlib, which is not a dependency of the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os.path import commonpath
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from verl_sglang_sync.commands.report_files.runs import Run, stage_position

LOG_FROM = 10
"""Ratio of the longest to the shortest sync from which the scale is logarithmic. The first sync of
`compiled` makes a load plan, and takes longer."""

VISIBLE = 0.004
"""Part of the longest bar from which a stage is named in the legend."""


def draw(runs: Sequence[Run]) -> Figure:
    """Draw one bar and one line for each run."""
    figure = Figure(figsize=(9, 4.4 + 0.6 * len(runs)), layout="constrained")
    heights = (0.8 + 0.6 * len(runs), 2.6)
    bars, lines = figure.subplots(2, height_ratios=heights)
    names = _names(runs)
    labels = [f"{name}\n{run.mode}" for name, run in zip(names, runs, strict=True)]
    stage_bars(bars, labels, [run.typical.shown for run in runs])
    bars.set_title("the median sync after the first", loc="left", fontsize="medium")
    bars.set_xlabel("seconds")
    totals = [[sync.total_seconds for sync in run.syncs] for run in runs]
    for name, seconds in zip(names, totals, strict=True):
        lines.plot(range(1, len(seconds) + 1), seconds, marker=".", label=name)
    shown = [spent for seconds in totals for spent in seconds]
    if max(shown) > LOG_FROM * min(shown):
        lines.set_yscale("log")
        lines.yaxis.set_major_formatter("{x:g}")
    else:
        lines.set_ylim(bottom=0)
    lines.xaxis.set_major_locator(MaxNLocator(integer=True))
    lines.set_title("every sync, with sleep and wake-up", loc="left", fontsize="medium")
    lines.set_xlabel("sync")
    lines.set_ylabel("seconds")
    lines.legend(frameon=False, fontsize="small")
    for axes in (bars, lines):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def stage_bars(axes: Axes, labels: Sequence[str], bars: Sequence[Mapping[str, float]]) -> None:
    """Draw a bar for each label, stacked from seconds by stage."""
    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
    lefts, longest = [0.0] * len(bars), max(sum(stages.values()) for stages in bars)
    for stage in sorted({name for stages in bars for name in stages}, key=stage_position):
        widths = [stages.get(stage, 0.0) for stages in bars]
        colour = colours[stage_position(stage) % len(colours)]
        label = stage.replace("_", " ") if max(widths) > VISIBLE * longest else None
        axes.barh(range(len(bars)), widths, height=0.6, left=lefts, color=colour, label=label)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for position, total in enumerate(lefts):
        axes.text(total, position, f" {total:.3g} s", va="center")
    axes.set_yticks(range(len(bars)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * longest)
    axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _names(runs: Sequence[Run]) -> list[str]:
    """Return the runs' paths without the folders that all of them share."""
    paths = [Path(run.name).absolute() for run in runs]
    shared = commonpath([path.parent for path in paths])
    return [str(path.relative_to(shared)) for path in paths]
