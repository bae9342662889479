"""A plan as a picture: what a rank holds by category for each strategy, and its peak over numbers of ranks."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpishard.errors import ConfigError
from mpishard.plan.report import Plan

__all__ = ["COLOURS", "SUFFIXES", "check_picture", "draw"]

#: what a picture can be written as, by the end of the file's name
SUFFIXES = (".png", ".svg", ".pdf")
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


def check_picture(path: Path) -> None:
    """Check that a picture can be drawn, before there is one.

    Raises:
        ConfigError: the name's end is none of ``SUFFIXES``, there is no such folder, or matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot is {path}; its name must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: cannot be written, there is no folder {path.parent}; choose another with --plot")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed; pip install 'mpishard[plot]'")


def draw(plan: Plan, path: Path) -> None:
    """Write the picture.

    Raises:
        ConfigError: the file cannot be written.
    """
    # No pyplot: it chooses a window system and keeps every figure.
    figure = import_module("matplotlib.figure").Figure(figsize=(12.0, 5.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    _bars(left, plan)
    _curves(right, plan)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); choose another with --plot") from None


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
