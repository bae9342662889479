"""Times of instructions as spans: what a rank computed, waited for and had in flight, and what was planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from mpishard.timeline.reading import RankTrace, Step

__all__ = ["MEET", "Span", "communications", "measured", "pairs", "planned", "unit_of"]

#: what a rank does first in a step: it meets the others
MEET = "Meet"
_BEGINS = {"Await": "Gather", "Absorb": "Reduce"}


@dataclass(frozen=True)
class Span:
    """Something that took a rank's time, in seconds of rank 0's clock.

    Attributes:
        lane: ``computing``, ``waiting``, ``communicating`` or, where nobody measured it, ``planned``.
        index: of the instruction; -1 for the meeting before the first.
    """

    lane: str
    name: str
    begin: float
    end: float
    index: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


def unit_of(name: str) -> str:
    """Return the unit, or the stage, of an instruction: ``h.1`` of ``Backward(h.1, 2)``; its name where it has none."""
    kind, bracket, rest = name.partition("(")
    return rest.rstrip(")").partition(",")[0] if bracket else kind


def pairs(instructions: Sequence[str]) -> dict[int, int]:
    """Return index of an instruction that waits for a collective -> index of the one that starts it.

    What starts and waits in one (``Agree``, say) is its own.
    """
    begun: dict[tuple[str, str], int] = {}
    found = {}
    for index, name in enumerate(instructions):
        kind = name.partition("(")[0]
        if kind in _BEGINS.values():
            begun[kind, unit_of(name)] = index
        elif kind in _BEGINS:
            found[index] = begun.pop((_BEGINS[kind], unit_of(name)), index)
        elif kind in ("AllReduce", "Replicate", "Agree"):
            found[index] = index
    return found


def measured(trace: RankTrace, step: Step) -> list[Span]:
    """Return what a rank did in a step, in order: each instruction, and the meeting before the first."""
    spans = [Span("waiting", MEET, step.came, step.times[0], -1)]
    for index, (name, kind) in enumerate(zip(trace.instructions, trace.kinds, strict=True)):
        lane = "waiting" if kind == "wait" else "computing"
        spans.append(Span(lane, name, step.times[index], step.times[index + 1], index))
    return spans


def communications(trace: RankTrace, step: Step) -> list[Span]:
    """Return a rank's collectives of a step, from their start to their arrival."""
    spans = []
    for end, begin in pairs(trace.instructions).items():
        start = step.times[begin]
        last = step.times[end + 1] if begin == end else step.arrivals.get(end, step.times[end + 1])
        spans.append(Span("communicating", trace.instructions[begin], start, max(start, last), begin))
    return spans


def planned(traces: Sequence[RankTrace], position: int) -> tuple[list[Span], list[Span]]:
    """Return a step as the schedule has it: computations one after another, and each collective beside them.

    An instruction takes as long as the median over ranks and steps, and nobody waits. A collective may take from its
    start to where it is waited for.

    Args:
        position: of the step among those that were timed.
    """
    first = traces[0]
    begin = min(trace.steps[position].times[0] for trace in traces)
    times = [begin]
    spans = []
    for index, (name, kind) in enumerate(zip(first.instructions, first.kinds, strict=True)):
        taken = [step.times[index + 1] - step.times[index] for trace in traces for step in trace.steps]
        times.append(times[-1] + (0.0 if kind == "wait" else median(taken)))
        if kind != "wait":
            spans.append(Span("planned", name, times[-2], times[-1], index))
    beside = [
        Span("planned", first.instructions[start], times[start], times[end], start)
        for end, start in pairs(first.instructions).items()
        if start != end
    ]
    return spans, beside
