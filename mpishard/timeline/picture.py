"""A step as a picture: for each rank what was planned beside what it did, with its waits in red."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from mpishard.pictures import figure, save
from mpishard.timeline.perfetto import lanes
from mpishard.timeline.reading import RankTrace
from mpishard.timeline.spans import Span, communications, measured, planned, unit_of
from mpishard.timeline.summary import late_rank, summarise

__all__ = ["COLOURS", "MOST_RANKS", "draw"]

#: ranks that a picture shows; the late one is among them
MOST_RANKS = 16
#: of the palette of Okabe and Ito (2008), which colour-blind readers can tell apart; waits are red
COLOURS = {
    "Forward": "#56b4e9",
    "Recompute": "#66aad7",
    "Loss": "#cc79a7",
    "Backward": "#0072b2",
    "Update": "#e69f00",
    "in flight": "#009e73",
    "planned": "#bbbbbb",
    "waiting": "#e00000",
    "starting": "#888888",
}
#: a span has its name in it where it is longer than one in so many parts of the picture
_NAMED = 40
#: heights of a rank's rows: planned, computing and waiting, in flight
_ROW = 0.26


def draw(traces: Sequence[RankTrace], position: int, path: Path) -> None:
    """Write the picture of one step.

    Args:
        position: of the step among those that were timed.

    Raises:
        ConfigError: the file cannot be written.
    """
    late = late_rank(summarise(traces))
    shown = list(traces[:MOST_RANKS])
    if late is not None and late.rank >= MOST_RANKS:
        shown[-1] = traces[late.rank]
    zero = min(trace.steps[position].came for trace in traces)
    end = max(trace.steps[position].times[-1] for trace in traces)
    size = (14.0, 1.8 + 0.9 * len(shown))
    drawn = figure(*size)
    axes = drawn.subplots()
    in_order, beside = planned(traces, position)
    for row, trace in enumerate(shown):
        step = trace.steps[position]
        done = measured(trace, step)
        _bars(axes, row, in_order, zero, paler=True)
        _bars(axes, row + _ROW, [span for span in done if span.lane == "computing"], zero)
        _bars(axes, row + _ROW, [span for span in done if span.lane == "waiting"], zero, "waiting")
        for top, spans in ((row, in_order), (row + _ROW, done)):
            _names(axes, top, [span for span in spans if span.seconds > (end - zero) / _NAMED], zero)
        _thin(axes, row + 2 * _ROW, communications(trace, step), zero)
        _thin(axes, row - _ROW / 2, beside, zero)
    number = traces[0].steps[position].number
    title = f"step {number}, {len(traces)} ranks over {traces[0].transport}"
    if late is not None:
        steps = len(traces[0].steps)
        title += f": the others waited {1e3 * late.caused / steps:.2f} ms a step for rank {late.rank}"
    axes.set_title(title)
    names = [f"rank {trace.rank}{' (late)' if late and late.rank == trace.rank else ''}" for trace in shown]
    axes.set_yticks([row + _ROW for row in range(len(shown))], names)
    axes.set_ylim(len(shown) - 0.1, -0.3)
    axes.set_xlabel("ms since the first rank came to the step (above: as planned; below: as measured, and in flight)")
    patch = import_module("matplotlib.patches").Patch
    used = {_colour(span.name) for span in in_order} | {"planned", "in flight", "waiting"}
    legend = [patch(color=colour, label=name) for name, colour in COLOURS.items() if name in used]
    axes.legend(handles=legend, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    save(drawn, path, 130)


def _colour(name: str) -> str:
    kind = name.partition("(")[0]
    return kind if kind in COLOURS else "starting"


def _bars(axes: Any, top: float, spans: Sequence[Span], zero: float, colour: str = "", *, paler: bool = False) -> None:
    if spans:
        places = [(1e3 * (span.begin - zero), 1e3 * span.seconds) for span in spans]
        colours = [COLOURS[colour or _colour(span.name)] for span in spans]
        edge, alpha = ("white", 0.5) if paler else ("none", 1.0)
        axes.broken_barh(places, (top, _ROW * 0.9), facecolors=colours, edgecolor=edge, linewidth=0.3, alpha=alpha)


def _names(axes: Any, top: float, spans: Sequence[Span], zero: float) -> None:
    for span in spans:
        middle = 1e3 * ((span.begin + span.end) / 2 - zero)
        axes.text(middle, top + _ROW * 0.45, unit_of(span.name), ha="center", va="center", size=7, clip_on=True)


def _thin(axes: Any, top: float, spans: Sequence[Span], zero: float) -> None:
    """Draw what is in flight, one thin line above the other where it is so together."""
    found = lanes(spans)
    height = _ROW / 2 / max(1, 1 + max(found, default=0))
    for lane, span in zip(found, spans, strict=True):
        place = (1e3 * (span.begin - zero), 1e3 * span.seconds)
        colour = COLOURS["planned" if span.lane == "planned" else "in flight"]
        axes.broken_barh([place], (top + lane * height, height * 0.8), facecolors=colour)
