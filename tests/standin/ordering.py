"""Whether a run was ordered: every two accesses to the same bytes, one of them a write, by different agents.

Each agent has a vector clock: how many accesses of every agent come before what it does next (Lamport 1978; Mattern
1989). An access is compared with the earlier ones to its block that no other stands for. Nothing depends on when
things happened to run, so one run tells what any run could do.

[Note: which accesses are forgotten]
An access is dropped from the list when a later one that covers its bytes comes after it in every order, and is a write
or is, like it, a read: whatever conflicts with the earlier one then conflicts with the later one too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.standin.regions import Pieces, covers, first_common, overlap
from tests.standin.trace import Trace

__all__ = ["Conflict", "assert_ordered", "check"]


@dataclass(frozen=True)
class Conflict:
    """Two accesses that nothing orders."""

    buffer: str
    first: str
    second: str
    times: int = 1

    def __str__(self) -> str:
        more = f" ({self.times} times)" if self.times > 1 else ""
        return f"{self.buffer}: {self.first} and {self.second} are not ordered{more}"


class Seen(NamedTuple):
    """An access that later ones are compared with."""

    agent: int
    time: int
    item: int
    parts: Pieces
    written: bool


Clock = dict[int, int]


def walk(trace: Trace, keeps: Callable[[int], bool], visit: Callable[[int, int, int, Clock], bool | None]) -> None:
    """Go through a record with vector clocks.

    Args:
        trace: the record.
        keeps: whether an edge's site takes part; a dropped record of an event leaves the event where it was before.
        visit: called with item, agent, its time and its clock for each access; True ends the walk.
    """
    clocks: list[Clock] = [{} for _ in trace.agents]
    changes = [0] * len(trace.agents)
    taken: dict[tuple[int, int], int] = {}
    tokens: dict[int, Clock] = {}
    kept = [keeps(site) for site in range(len(trace.sites))]
    kept.append(True)  # of -1: no site, an order that cannot be dropped
    for number, (letter, agent, host, what, site) in enumerate(trace.items):
        clock = clocks[agent]
        if host >= 0 and taken.get((agent, host)) != changes[host]:
            taken[agent, host] = changes[host]
            _join(clock, clocks[host])
            changes[agent] += 1
        if letter == "A":
            time = clock[agent] = clock.get(agent, 0) + 1
            changes[agent] += 1
            if visit(number, agent, time, clock):
                return
        elif not kept[site]:
            continue
        elif letter == "R":
            tokens[what] = dict(clock)
        else:
            if letter == "F":
                agent, what = what, agent
                clock = clocks[agent]
            other = tokens.get(what) if letter == "W" else clocks[what]
            if other is not None:
                _join(clock, other)
                changes[agent] += 1


def check(trace: Trace) -> list[Conflict]:
    """Return what is not ordered: each pair of operations and places once, with how often it was found."""
    found: dict[tuple[str, ...], list[Any]] = {}
    seen: dict[int, list[Seen]] = {}

    def visit(number: int, agent: int, time: int, clock: Clock) -> None:
        for block, parts, written in trace.items[number][3][2]:
            earlier = seen.setdefault(block, [])
            for old in earlier:
                unordered = (old.written or written) and old.time > clock.get(old.agent, 0)
                if unordered and overlap(old.parts, parts):
                    first, second = describe(trace, old.item, old.written), describe(trace, number, written)
                    place = trace.describe(block, first_common(old.parts, parts))
                    entry = found.setdefault((first, second, place.split("+")[0]), [place, first, second, 0])
                    entry[3] += 1
            remember(earlier, Seen(agent, time, number, parts, written), clock)

    walk(trace, lambda site: True, visit)
    return [Conflict(*entry) for entry in found.values()]


def assert_ordered(*traces: Trace) -> None:
    """Raise an AssertionError that lists every conflict of the traces."""
    lines = [f"{trace.name and trace.name + ': '}{conflict}" for trace in traces for conflict in check(trace)]
    if lines:
        raise AssertionError("\n".join(lines))


def remember(earlier: list[Seen], new: Seen, clock: Clock) -> None:
    """Add an access to a list, and drop from it those that it stands for; ``clock`` says which come before it."""
    earlier[:] = [
        old
        for old in earlier
        if old.time > clock.get(old.agent, 0)
        or (old.written and not new.written)
        or not covers(new.parts, old.parts)
    ]
    earlier.append(new)


def describe(trace: Trace, number: int, written: bool) -> str:
    """Name an access: who, what, where."""
    _, agent, _, (name, where, _), _ = trace.items[number]
    return f"{trace.agents[agent]}: {name} ({'write' if written else 'read'}) at {where}"


def _join(clock: Clock, other: Clock) -> None:
    get = clock.get
    for agent, time in other.items():
        if time > get(agent, 0):
            clock[agent] = time
