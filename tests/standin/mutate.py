"""Which ordering edges are needed: each site is left out in turn, over records of runs, without running again.

A site whose edges can go without a conflict in any record is a *survivor*: either the program orders more than it needs
there, or the runs do not show why it is needed. Both want a look.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.standin.ordering import Clock, Conflict, Seen, check, describe, remember, walk
from tests.standin.regions import Pieces, first_common, overlap
from tests.standin.trace import Item, Trace

__all__ = ["QUEUES", "Row", "print_table", "survivors", "table"]


#: Kinds of edges that are the order of queues between threads: no sites, but told where they are needed.
QUEUES = (
    "hand-over to the communication thread",
    "hand-over from the communication thread",
    "thread start",
    "thread join",
)


class Row(NamedTuple):
    """A site of edges, how many it made, and the first conflict that is there without them, "" for none.

    ``site`` is a place, or places from the innermost call outwards.
    """

    site: str
    kind: str
    instances: int
    exposes: str


class _Pair(NamedTuple):
    """The last access of another agent that conflicts with an access unless it is ordered before it."""

    agent: int
    time: int
    item: int
    block: int
    mine: Pieces
    theirs: Pieces
    written: tuple[bool, bool]


def table(traces: Sequence[Trace], paths: bool = False) -> list[Row]:
    """Return a row for each site and kind of edge, sorted by site.

    Args:
        traces: records of runs of one program.
        paths: tell sites apart by the calls in mpishard/ that led there, too: whether each *use* of a wait is needed.

    Raises:
        ValueError: a record has conflicts as it stands.
    """
    pairs = []
    for trace in traces:
        conflicts = check(trace)
        if conflicts:
            raise ValueError(f"{trace.name or 'a record'} is not ordered as it stands: {conflicts[0]}")
        pairs.append(_pairs(trace))
    names = [[(" < ".join(path if paths else path[:1]), kind) for path, kind in trace.sites] for trace in traces]
    instances = Counter(own[item[4]] for own, trace in zip(names, traces) for item in _edges(trace))
    rows = []
    for key, count in sorted(instances.items()):
        exposed = ""
        # Short records first: most sites are exposed by any.
        for trace, needed, own in sorted(zip(traces, pairs, names), key=lambda one: len(one[0].items)):
            if key in own:
                exposed = _first(trace, needed, {number for number, name in enumerate(own) if name == key})
            if exposed:
                break
        if exposed or key[1] not in QUEUES:
            rows.append(Row(*key, count, exposed))
    return rows


def _edges(trace: Trace) -> Iterator[Item]:
    """Yield what makes an order: an event that is recorded to tell the time, and not waited for, makes none."""
    waited = {item[3] for item in trace.items if item[0] == "W"}
    return (item for item in trace.items if item[4] >= 0 and (item[0] != "R" or item[3] in waited))


def survivors(traces: Sequence[Trace], paths: bool = False) -> list[Row]:
    """Return the rows of sites that can go without a conflict."""
    return [row for row in table(traces, paths) if not row.exposes]


def print_table(rows: Sequence[Row], file: object = None) -> None:
    """Print one line a site, and what is exposed without it."""
    for row in rows:
        print(f"{row.site}  {row.kind}, {row.instances} edges", file=file or sys.stdout)  # type: ignore[call-overload]
        print(f"    {row.exposes or 'SURVIVES: nothing needs it in these runs'}", file=file or sys.stdout)  # type: ignore[call-overload]


def _pairs(trace: Trace) -> dict[int, list[_Pair]]:
    """Return for each access those before it that edges must order: what program and queue order leaves open."""
    seen: dict[int, list[Seen]] = {}
    pairs: dict[int, list[_Pair]] = {}

    def visit(number: int, agent: int, time: int, clock: Clock) -> None:
        last: dict[int, _Pair] = {}
        for block, parts, written in trace.items[number][3][2]:
            earlier = seen.setdefault(block, [])
            for old in earlier:
                if (old.written or written) and old.time > clock.get(old.agent, 0):
                    known = last.get(old.agent)
                    if (known is None or known.time < old.time) and overlap(old.parts, parts):
                        last[old.agent] = _Pair(
                            old.agent, old.time, old.item, block, parts, old.parts, (old.written, written)
                        )
            remember(earlier, Seen(agent, time, number, parts, written), clock)
        if last:
            pairs[number] = list(last.values())

    walk(trace, lambda site: False, visit)
    return pairs


def _first(trace: Trace, pairs: dict[int, list[_Pair]], dropped: set[int]) -> str:
    """Return the first conflict without some sites, "" for none."""
    found: list[str] = []

    def visit(number: int, agent: int, time: int, clock: Clock) -> bool:
        for pair in pairs.get(number, ()):
            if pair.time > clock.get(pair.agent, 0):
                place = trace.describe(pair.block, first_common(pair.mine, pair.theirs))
                before, now = pair.written
                found.append(
                    str(Conflict(place, describe(trace, pair.item, before), describe(trace, number, now)))
                )
                return True
        return False

    walk(trace, lambda site: site not in dropped, visit)
    return found[0] if found else ""
