"""Times of some steps' instructions, written by each rank into the run directory for ``mpishard timeline``.

[Note: clocks]
Ranks on one kernel read one monotonic clock. For others the ranks look at their clocks around exchanges: nobody leaves
an exchange before everybody has come to it. So, with rank r's clock ahead of rank 0's by d, r's time of coming less
rank 0's of leaving is at most d, and r's time of leaving less rank 0's of coming at least d. The best of some rounds
bounds d from both sides; the middle is taken, and half the distance is the error.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from pathlib import Path

from mpishard.comm.base import Communicator
from mpishard.comm.record import kernel_identity
from mpishard.comm.together import on_rank_zero
from mpishard.shard.engine import Engine
from mpishard.shard.instructions import short
from mpishard.shard.running import Trace
from mpishard.shard.traced import FORMAT, traces

__all__ = ["Tracer", "clock_of", "offset"]

_ROUNDS = 16
_TIME = struct.Struct("<16sd")
_TIMES = struct.Struct(f"<{2 * _ROUNDS}d")


def clock_of(comm: Communicator) -> tuple[float, float]:
    """Return by how many seconds this rank's ``perf_counter`` is ahead of rank 0's, and the error. Collective."""
    came, left, seen = [], [], []
    for _ in range(_ROUNDS):
        came.append(time.perf_counter())
        seen = comm.exchange(_TIME.pack(kernel_identity(), came[-1]), "a look at the clocks")
        left.append(time.perf_counter())
    first = comm.exchange(_TIMES.pack(*came, *left), "times of the looks")[0]
    if _TIME.unpack(seen[comm.rank])[0] == _TIME.unpack(seen[0])[0]:
        return 0.0, 0.0
    return offset(came, left, *_halves(first))


def _halves(record: bytes) -> tuple[list[float], list[float]]:
    times = list(_TIMES.unpack(record))
    return times[:_ROUNDS], times[_ROUNDS:]


def offset(came: list[float], left: list[float], came0: list[float], left0: list[float]) -> tuple[float, float]:
    """Return the offset of a clock to another one's, and the error, from the times around meetings by each of them."""
    least = max(mine - theirs for mine, theirs in zip(came, left0, strict=True))
    most = min(mine - theirs for mine, theirs in zip(left, came0, strict=True))
    return (least + most) / 2, max(0.0, most - least) / 2


class Tracer:
    """Lets an engine time steps ``first`` to ``last``, and writes them when they are over. Made by all ranks together.

    Raises:
        ConfigError: on all ranks, where old traces cannot be removed.
    """

    def __init__(self, engine: Engine, run: Path, first: int, last: int) -> None:
        self.engine, self.path = engine, traces(run) / f"rank-{engine.comm.rank:05d}.json"
        self.trace = engine.trace = Trace(first, last)
        on_rank_zero(engine.comm, lambda: self._clean(traces(run)))
        self.clock = clock_of(engine.comm)
        self.written = False

    @staticmethod
    def _clean(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        for path in folder.glob("rank-*.json"):
            path.unlink()

    def at_step(self, step: int) -> None:
        """A step begins: write, where the last one that is timed is over."""
        if step > self.trace.last and self.trace.steps:
            self.finish()

    def finish(self) -> None:
        """Write what there is, once.

        Raises:
            OSError: it cannot be written.
        """
        if self.written or not self.trace.steps:
            return
        self.written = True
        engine = self.engine
        engine.trace = None
        record = {
            "format": FORMAT,
            "rank": engine.comm.rank,
            "ranks": engine.comm.size,
            "host": socket.gethostname(),
            "transport": engine.comm.transport,
            "progress": engine.comm.progress,
            "clock": list(self.clock),
            "instructions": [short(step) for step in engine.schedule],
            "kinds": [action.kind for action in engine.actions],
            "steps": [
                {"step": each.step, "came": each.came, "times": each.times, "arrivals": list(each.arrivals.items())}
                for each in self.trace.steps
                if len(each.times) == len(engine.schedule) + 1  # else it was left by an exception
            ],
        }
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(record) + "\n", encoding="utf-8")
        os.replace(new, self.path)
