"""A plan as a picture: what a rank holds by category for each strategy, and its peak over numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpishard.pictures import figure, save
from mpishard.plan.report import Plan

__all__ = ["COLOURS", "draw"]

#: of the palette of Okabe and Ito (2008), which colour-blind readers can tell apart, and its paler tones
COLOURS = {
    "parameters": "#0072b2",
    "masters": "#66aad7",
    "gradients": "#d55e00",
    "optimizer": "#e69f00",
    "gathered": "#009e73",
    "unreduced": "#66c5ab",
    "saved": "#cc79a7",
    "workspace": "#999999",
    "staging": "#cccccc",
}


def draw(plan: Plan, path: Path) -> None:
    """Write the picture.

    Raises:
        ConfigError: the file cannot be written.
    """
    drawn = figure(12.0, 5.0)
    left, right = drawn.subplots(1, 2)
    _bars(left, plan)
    _curves(right, plan)
    save(drawn, path)


def _bars(axes: Any, plan: Plan) -> None:
    first = plan.by_ranks[0]
    names = list(first.per_rank)
    bottom = [0.0] * len(names)
    for category, colour in COLOURS.items():
        heights = [first.per_rank[name].get(category, 0) / 1e9 for name in names]
        if any(heights):
            axes.bar(names, heights, bottom=bottom, label=category, color=colour)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axes.set_title(f"a rank of {first.ranks:,}")
    axes.set_ylabel("GB")
    axes.tick_params(axis="x", labelrotation=25)
    axes.legend(fontsize="small")


def _curves(axes: Any, plan: Plan) -> None:
    for name, points in plan.curves.items():
        axes.plot([ranks for ranks, _ in points], [peak / 1e9 for _, peak in points], marker=".", label=name)
    for memory in sorted({device.memory for device in plan.devices.values()}):
        names = ", ".join(name for name, device in plan.devices.items() if device.memory == memory)
        axes.axhline(memory / 1e9, color="black", linewidth=0.6, linestyle=":")
        axes.annotate(names, (1.0, memory / 1e9), xycoords=("axes fraction", "data"), ha="right", va="bottom", size=7)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title("peak of a rank")
    axes.set_xlabel("ranks")
    axes.set_ylabel("GB")
    axes.legend(fontsize="small")
