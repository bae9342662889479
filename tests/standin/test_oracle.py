"""The check against the definition: every pair of accesses, and whether a path of edges leads from one to the other."""

from __future__ import annotations

import random

import pytest

from tests.standin import Trace, mutate, ordering
from tests.standin.regions import one, overlap


def some_record(seed):
    """A record of streams (0 to 2) and threads (3, 4) that do and order this and that."""
    draw = random.Random(seed)
    trace = Trace()
    trace.agents = [f"agent {i}" for i in range(5)]
    trace.sites = [((f"site {i}",), "edge") for i in range(6)]
    trace.blocks = {1: (1000, 100, "device", "here")}
    events = []
    for _ in range(draw.randint(5, 40)):
        agent = draw.randrange(5)
        host = draw.choice([3, 4]) if agent < 3 else -1
        site = draw.randrange(-1, 6)
        letter = draw.choices("ARWJ", [5, 3, 4, 1])[0]
        if letter == "A":
            start = 1000 + draw.randrange(90)
            touched = [(1, one(start, draw.randint(1, 30)), draw.random() < 0.5) for _ in range(draw.randint(1, 2))]
            trace.items.append(("A", agent, host, ("touch", "here", touched), -1))
        elif letter == "R":
            events.append(draw.randrange(4))
            trace.items.append(("R", agent, host, events[-1], site))
        elif letter == "W" and events:
            trace.items.append(("W", agent, host, draw.choice(events), site))
        elif letter == "J":
            trace.items.append(("J", agent, -1 if agent > 2 else host, draw.randrange(5), site))
    return trace


def before_each(trace, dropped=None):
    """For each item the set of items that come before it, by the definition of each letter."""
    last, token, result = {}, {}, []
    for i, (letter, agent, host, what, site) in enumerate(trace.items):
        past = {i} | last.get(agent, set()) | (last.get(host, set()) if host >= 0 else set())
        if site < 0 or site != dropped:
            if letter == "R":
                token[what] = past
            elif letter == "W":
                past = past | token.get(what, set())
            elif letter == "J":
                past = past | last.get(what, set())
        last[agent] = past
        result.append(past)
    return result


def pairs(trace, dropped=None):
    """The accesses that conflict and that nothing orders, by their numbers."""
    past = before_each(trace, dropped)
    found = set()
    for j, (letter, agent, _, what, _) in enumerate(trace.items):
        for i in range(j):
            if letter == trace.items[i][0] == "A" and trace.items[i][1] != agent and i not in past[j]:
                for _, parts, written in what[2]:
                    for _, others, also in trace.items[i][3][2]:
                        if (written or also) and overlap(parts, others):
                            found.add((i, j))
    return found


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_conflicts_are_those_of_the_definition(first):
    for seed in range(first, first + 100):
        compare_conflicts(some_record(seed))


def compare_conflicts(trace):
    expected = pairs(trace)
    # Every access gets a name of its own, so that each conflict tells which two they are.
    for i, (letter, agent, host, what, site) in enumerate(trace.items):
        if letter == "A":
            trace.items[i] = (letter, agent, host, (f"access-{i}", *what[1:]), site)
    found = set()
    for conflict in ordering.check(trace):
        i, j = (int(text.split("access-")[1].split()[0]) for text in (conflict.first, conflict.second))
        found.add((i, j))
    assert found <= expected
    # Some accesses stand for earlier ones, so not each pair is told; but each access that conflicts with some is.
    assert {j for _, j in found} == {j for _, j in expected}


def test_sites_that_can_go_are_those_of_the_definition():
    needed = idle = 0
    for seed in range(1000):
        trace = some_record(seed)
        # What conflicts is taken out, so that what is left is ordered.
        unordered = {number for pair in pairs(trace) for number in pair[1:]}
        trace.items = [item for number, item in enumerate(trace.items) if number not in unordered]
        if pairs(trace):
            with pytest.raises(ValueError, match="not ordered"):
                mutate.table([trace])
            continue
        found = {row.site: bool(row.exposes) for row in mutate.table([trace])}
        sites = {item[4] for item in mutate._edges(trace)}
        assert found == {f"site {site}": bool(pairs(trace, site)) for site in sites}
        needed, idle = needed + sum(found.values()), idle + len(found) - sum(found.values())
    assert needed > 200 < idle
