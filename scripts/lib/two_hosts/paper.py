"""How much of its communication a schedule can hide at best: the schedule run on paper, with a network that does one
thing after another, in the order in which it was asked, while the processor computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Event", "Paper", "ceiling", "on_paper"]


class Event(NamedTuple):
    """What an instruction does: ``compute`` takes ``seconds``; ``start`` and ``wait`` name what is on its way.

    ``start`` takes ``seconds`` of the network; ``meet`` starts and waits at once.
    """

    kind: str
    seconds: float = 0.0
    name: str = ""


class Paper(NamedTuple):
    """The whole step, and the seconds for which it waits at each instruction where it does."""

    seconds: float
    waits: Mapping[int, float]


def on_paper(events: Sequence[Event]) -> Paper:
    """Run a schedule on paper."""
    now = network = 0.0
    arrives: dict[str, float] = {}
    waits: dict[int, float] = {}
    for position, event in enumerate(events):
        if event.kind == "compute":
            now += event.seconds
            continue
        if event.kind in ("start", "meet"):
            network = arrives[event.name] = max(network, now) + event.seconds
        if event.kind in ("wait", "meet") and arrives[event.name] > now:
            waits[position] = arrives[event.name] - now
            now = arrives[event.name]
    return Paper(now, waits)


def ceiling(events: Sequence[Event]) -> float:
    """Return the largest share of the communication that the schedule can hide; 1 where there is none."""
    carried = sum(event.seconds for event in events if event.kind in ("start", "meet"))
    return max(0.0, 1 - sum(on_paper(events).waits.values()) / carried) if carried else 1.0
