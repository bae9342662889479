"""A rank of scripts/measure_overlap, in a host whose link it shapes: python -m two_hosts.overlap_rank TASK.

[Note: three runs of a schedule]
Each repetition runs a step as it is; a step whose collectives carry nothing; and the step's communication by itself:
its collectives one at a time, each begun by all ranks at once. Back to back they would take longer under Open MPI over
a slow link, up to twice as long, and all the more would seem to be hidden. All three runs in turn, so that what else
the machine does meets all of them.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI

import mpishard
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.choice import connect
from mpishard.comm.mpi import library
from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.optim import AdamW
from mpishard.shard.instructions import Absorb, Agree, Await, Gather, Reduce
from two_hosts.link import set_rate
from two_hosts.paper import Event, ceiling, on_paper
from two_hosts.silence import Switch

__all__ = ["Bench", "main"]

WORLD = MPI.COMM_WORLD
_RECORD = bytes(256)  # of about the size that ranks exchange when they agree
_PAUSE = 2e-3  # seconds between two collectives that are timed alone, as computation parts them in a step


class Bench:
    """One model with one prefetch, and its three runs."""

    def __init__(self, task: dict[str, Any], prefetch: int) -> None:
        sizes = Gpt2(**task["sizes"])
        samples = task["micro_batch"]
        self.comm = connect(WORLD, NumpyOps(), task["transport"])
        self.switch = Switch(self.comm)
        self.engine = mpishard.full_shard(
            gpt2(sizes),
            AdamW(),
            self.comm,
            global_batch=samples * WORLD.size,
            micro_batch=samples,
            prefetch=prefetch,
        )
        tokens = np.random.default_rng(1).integers(0, sizes.vocabulary, (samples * WORLD.size, sizes.sequence + 1))
        self.feed = mpishard.batch(tokens[:, :-1].copy(), tokens[:, 1:].copy())
        self.actions = list(self.engine._train)
        self.times = np.zeros((0, len(self.actions)))

    def whole(self) -> float:
        """Seconds of a step as it is."""
        return self._step()

    def silent(self) -> float:
        """Seconds of a step that sends nothing; the time of each instruction is kept."""
        self.switch.silent, self.switch.seconds = True, 0.0
        moments: list[float] = []
        self.engine.note = lambda name: moments.append(time.perf_counter())
        try:
            seconds = self._step()
        finally:
            self.switch.silent, self.engine.note = False, None
        moments.append(time.perf_counter())
        self.times = np.concatenate([self.times, np.diff(moments)[None]])
        return seconds - self.switch.seconds

    def alone(self) -> float:
        """Seconds of the step's communication by itself, one after another as the schedule starts them."""
        seconds = self._met(lambda: self.comm.exchange(_RECORD, "a step"))
        for action in self.actions:
            if isinstance(action.instruction, Agree):
                seconds += self._met(lambda: self.comm.exchange(_RECORD, "the agreement"))
            elif action.kind == "start":
                seconds += self._met(lambda run=action.run: (run(), self.switch.last.wait_inputs()))  # type: ignore
            elif action.kind == "wait":
                action.run()  # it has arrived
        return seconds

    @staticmethod
    def _met(call: Callable[[], object]) -> float:
        """Seconds of a call that every rank begins at once, on a link where nothing is left of another."""
        WORLD.Barrier()
        time.sleep(_PAUSE)
        WORLD.Barrier()
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def _step(self) -> float:
        WORLD.Barrier()
        begin = time.perf_counter()
        self.engine.step(self.feed, lr=0.0)  # parameters stay as they are
        return time.perf_counter() - begin

    def carried(self) -> int:
        """Bytes that this rank gives to others in a step."""
        before = sum(tally.bytes for tally in self.comm.tallies.values())
        self.alone()
        return sum(tally.bytes for tally in self.comm.tallies.values()) - before

    def events(self, communicating: float) -> list[Event]:
        """The schedule with the seconds measured for what it computes, and those of its bytes for what it sends."""
        nbytes = [self._bytes(action.mark) for action in self.actions]
        each = communicating / max(1, sum(nbytes))
        events = []
        for action, size, seconds in zip(self.actions, nbytes, np.median(self.times, axis=0)):
            step = action.instruction
            if isinstance(step, Gather | Reduce):
                events.append(Event("start", size * each, f"{type(step).__name__ == 'Reduce'} {step.unit}"))
            elif isinstance(step, Await | Absorb):
                events.append(Event("wait", name=f"{isinstance(step, Absorb)} {step.unit}"))
            else:
                events.append(Event("compute", float(seconds)))
        return events

    @staticmethod
    def _bytes(mark: bytes) -> int:
        words = mark.decode().split()
        return int(words[2]) if words else 0

    def close(self) -> None:
        self.engine.close()
        self.comm.close()


def main(arguments: Sequence[str]) -> None:
    task = json.loads(arguments[0])
    found = [_measure(task, prefetch) for prefetch in task["prefetch"]]
    if WORLD.rank == 0:
        print(json.dumps({"library": library(), "rows": found}), flush=True)


def _measure(task: dict[str, Any], prefetch: int) -> dict[str, Any]:
    _limit(None)
    bench = Bench(task, prefetch)
    for _ in range(2):
        bench.whole()
    computing = _slowest([bench.silent() for _ in range(3)])
    carried = WORLD.allreduce(bench.carried(), MPI.MAX)
    rate = 8 * carried / (task["share"] * computing)
    for _ in range(3):  # headers, and what the ends do, take time too
        _limit(rate)
        bench.alone()
        rate *= _slowest([bench.alone() for _ in range(2)]) / (task["share"] * computing)
    _limit(rate)
    bench.whole()
    whole, silent, alone, work = [], [], [], []
    for _ in range(task["repetitions"]):
        begin = _processor()
        whole.append(bench.whole())
        between = _processor()
        silent.append(bench.silent())
        work.append((between - begin) - (_processor() - between))
        alone.append(bench.alone())
    step, computing, communicating = (_slowest(one) for one in (whole, silent, alone))
    events = bench.events(communicating)
    paper = on_paper(events)
    waits = sorted(((w, str(bench.actions[at].name, "ascii")) for at, w in paper.waits.items()), reverse=True)
    tallies = bench.comm.tallies.values()
    row = {
        "prefetch": prefetch,
        "rate": round(rate),
        "bytes": carried,
        "step": step,
        "computing": computing,
        "communicating": communicating,
        "hidden": 1 - (step - computing) / communicating,
        "ceiling": ceiling(events),
        "paper": [[name, wait / communicating] for wait, name in waits[:4]],
        "processor": WORLD.allreduce(median(work), MPI.MAX) / communicating,
        "each": [_largest(one).tolist() for one in (whole, silent, alone)],
        "root": bench.engine.layouts["root"].total / sum(one.total for one in bench.engine.layouts.values()),
        "tallied": 1 - sum(one.waited for one in tallies) / max(1e-9, sum(one.busy for one in tallies)),
    }
    bench.close()
    return row


def _slowest(seconds: Sequence[float]) -> float:
    """Return the median of what the slowest rank took."""
    return float(np.median(_largest(seconds)))


def _largest(seconds: Sequence[float]) -> np.ndarray:
    everywhere = np.empty(len(seconds))
    WORLD.Allreduce(np.array(seconds), everywhere, MPI.MAX)
    return everywhere


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _limit(rate: float | None) -> None:
    """Give every host's link a rate; the first rank of each does it."""
    WORLD.Barrier()
    local = WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    if local.rank == 0:
        set_rate(None if rate is None else round(rate))
    local.Free()
    WORLD.Barrier()


if __name__ == "__main__":
    main(sys.argv[1:])
