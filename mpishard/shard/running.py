"""Running a step: its actions in order, told to whoever wants to know, and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from mpishard.shard.ledger import Ledger
from mpishard.shard.program import Action

__all__ = ["Digest", "Trace", "Traced", "run"]


class Digest(Protocol):
    """A running digest."""

    def update(self, data: bytes, /) -> None:
        """Take in what was run."""


@dataclass
class Traced:
    """When the instructions of one step ran on this rank, in seconds of ``time.perf_counter``.

    Attributes:
        came: when the rank came to the step, before it met the others.
        times: the begin of the first instruction, and the end of each.
        arrivals: index of an instruction that waits for a collective -> when its result was there. On a device, when
            the host had queued what waits for it.
    """

    step: int
    came: float
    times: list[float] = field(default_factory=list)
    arrivals: dict[int, float] = field(default_factory=dict)


class Trace:
    """Notes when the instructions of some training steps run.

    Args:
        first, last: the steps, counted from 0, both included.
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.steps: list[Traced] = []

    def begin(self, step: int) -> Traced | None:
        """Return where to note a step that now begins; None where it is none of those."""
        if not self.first <= step <= self.last:
            return None
        traced = Traced(step, time.perf_counter())
        self.steps.append(traced)
        return traced


def run(
    program: Sequence[Action],
    *,
    note: Callable[[bytes], None] | None,
    running: Digest,
    ledger: Ledger | None = None,
    traced: Traced | None = None,
    arrival: Callable[[], float],
) -> dict[str, float]:
    """Run the actions in order; return seconds by kind, starting collectives among computing.

    Args:
        note: told the name of each before it runs.
        running: takes in the collectives.
        arrival: returns when the collective arrived that was waited for last.
    """
    times = {"compute": 0.0, "start": 0.0, "wait": 0.0}
    clock = time.perf_counter
    begin = last = clock()
    if traced is not None:
        traced.times.append(begin)
    # Overflow is no warning here: the agreed norm says whether the step is finite, and for all ranks alike.
    with np.errstate(all="ignore"):
        for index, action in enumerate(program):
            if note is not None:
                note(action.name)
            if action.mark:
                running.update(action.mark)
            if ledger is not None:
                ledger.before(action)
            action.run()
            if ledger is not None:
                ledger.after(action)
            now = clock()
            times[action.kind] += now - last
            last = now
            if traced is not None:
                traced.times.append(now)
                if action.kind == "wait":
                    traced.arrivals[index] = min(arrival(), now)
    return {"computing": times["compute"] + times["start"], "waiting": times["wait"], "total": last - begin}
