"""Whole training steps over several transports, in turn, in one job.

[Note: method]
Every transport has an engine of its own, of one configuration, with the same initial weights. Steps take turns
(A B A B) over the same batches, each after a barrier; a step counts as the slowest rank's. The step without
communication (:mod:`mpishard.bench.silent`) takes its turn among them. After them, in turn too, is each transport's
communication alone: the collectives of the step's schedule, started and waited for in its order with nothing computed
in between, and two exchanges of records.

The share of communication that is hidden is ``1 - (step - without) / alone``: 1 where a step takes no longer than
without communication, 0 where all of it is added. The difference is the median over rounds of that within one, since a
machine may be slower in one round than in another. It is no quotient of what a rank notes of itself
(:class:`~mpishard.comm.work.Tally`): that shows waiting for other ranks as communication, and sums that slow
computation down as hidden.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mpishard.array.dtypes import Array
from mpishard.bench.collectives import Together
from mpishard.bench.statistics import Summary, summary
from mpishard.shard.engine import Engine
from mpishard.shard.instructions import Agree
from mpishard.shard.runner import Feed

__all__ = ["KINDS", "WARM_UPS", "StepRow", "Steps", "document", "hidden", "tokens"]

#: steps of each transport before those that count
WARM_UPS = 2
KINDS = ("all_gather", "reduce_scatter", "exchange")
#: bytes of the records that ranks exchange at the end of a step, about
_RECORD = 1024


def tokens(seed: int, step: int, vocabulary: int) -> Feed:
    """Return a feed of random tokens, the same for every transport and number of ranks."""

    def feed(micro: int, inputs: Array, targets: Array) -> None:
        rng = np.random.default_rng((seed, step, micro))
        inputs[...] = rng.integers(0, vocabulary, inputs.shape)
        targets[...] = rng.integers(0, vocabulary, targets.shape)

    return feed


def hidden(steps: Array, without: Array, alone: float) -> float | None:
    """Return the share of communication that is hidden behind computation; None where there is none.

    Args:
        steps, without: seconds (rounds,) with and without communication.
        alone: seconds of communication alone.
    """
    return 1 - float(np.median(steps - without)) / alone if alone > 0 else None


@dataclass(frozen=True)
class StepRow:
    """What a step is on one transport; seconds are of the slowest rank, medians over steps.

    Attributes:
        alone: seconds of its communication with nothing else going on.
        hidden: see the module's note; noise of the machine takes it beyond 0 .. 1.
        busy, waited: seconds a step of each kind of collective, as rank 0 counts them: from start to arrival, and in
            which its computation stood still.
        losses: of each step, in order.
        checksum: of parameters and optimiser states at the end.
        same_bits: losses and checksum are those of the first transport, bit by bit.
    """

    transport: str
    algorithm: str
    seconds: float
    p10: float
    p90: float
    alone: float
    hidden: float | None
    busy: dict[str, float]
    waited: dict[str, float]
    losses: list[float]
    checksum: str
    same_bits: bool


@dataclass
class Steps:
    """Steps in turn; made and run alike by all ranks.

    Attributes:
        engines: one for each transport, by (transport, algorithm).
        silent: the one without communication.
        seed, vocabulary: of the tokens.
    """

    engines: Mapping[tuple[str, str], Engine]
    silent: Engine
    together: Together
    steps: int
    seed: int
    vocabulary: int
    lr: float = 1e-3
    _losses: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def run(self) -> tuple[Summary, list[StepRow]]:
        """Return the step without communication, and each transport's."""
        names = list(self.engines)
        for step in range(WARM_UPS):
            self._turn(step)
            for engine in self.engines.values():
                self._alone(engine)
        before = {name: _tallies(engine) for name, engine in self.engines.items()}
        times = np.empty((2 * len(names) + 1, self.steps))
        for step in range(self.steps):
            times[: len(names) + 1, step] = self._turn(WARM_UPS + step)
        after = {name: _tallies(engine) for name, engine in self.engines.items()}
        # Apart from the steps, since what is counted of them is theirs alone.
        for step in range(self.steps):
            times[len(names) + 1 :, step] = [self._alone(engine) for engine in self.engines.values()]
        slowest: Array = self.together.largest(times.ravel()).reshape(times.shape)
        found = [summary(row) for row in slowest]
        without = found[len(names)]
        sums = {name: engine.checksum() for name, engine in self.engines.items()}
        first = names[0]
        rows = []
        for i, name in enumerate(names):
            one, alone = found[i], found[len(names) + 1 + i].seconds
            same = self._losses[name] == self._losses[first] and sums[name] == sums[first]
            busy, waited = _between(before[name], after[name], self.steps)
            share = hidden(slowest[i], slowest[len(names)], alone)
            three = (one.seconds, one.p10, one.p90)
            rows.append(StepRow(*name, *three, alone, share, busy, waited, self._losses[name], sums[name], same))
        return without, rows

    def _turn(self, step: int) -> list[float]:
        """Return the seconds of a step on each transport, and without communication."""
        seconds = []
        for name, engine in [*self.engines.items(), (("none", ""), self.silent)]:
            feed = tokens(self.seed, step, self.vocabulary)
            self.together.barrier()
            begin = time.perf_counter()
            result = engine.step(feed, lr=self.lr)
            _settle(engine)
            seconds.append(time.perf_counter() - begin)
            self._losses.setdefault(name, []).append(result.loss)
        return seconds

    def _alone(self, engine: Engine) -> float:
        """Return the seconds of a step's communication alone; the next step replaces what it leaves in gradients."""
        actions = [
            action
            for action in engine._train  # its schedule, bound
            if action.kind in ("start", "wait") and not isinstance(action.instruction, Agree)
        ]
        comm = engine.comm
        self.together.barrier()
        begin = time.perf_counter()
        comm.meet("communication alone")
        with np.errstate(all="ignore"):  # there are no gradients, so these sums are of anything
            for action in actions:
                action.run()
        comm.exchange(bytes(_RECORD), "the end of communication alone")
        _settle(engine)
        return time.perf_counter() - begin


def _settle(engine: Engine) -> None:
    stream = getattr(engine.ops, "stream", None)
    if stream is not None:
        stream.synchronize()


def _tallies(engine: Engine) -> dict[str, tuple[float, float]]:
    """Return busy and waited seconds by kind, so far, over the communicators of the engine."""
    comms = [comm.tallies for comm in (engine.comm, *(engine._parts or ()))]
    return {
        kind: (sum(each[kind].busy for each in comms), sum(each[kind].waited for each in comms)) for kind in KINDS
    }


def _between(
    before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]], steps: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return busy and waited seconds of a step by kind."""
    both = [{kind: (after[kind][i] - before[kind][i]) / steps for kind in KINDS} for i in range(2)]
    return both[0], both[1]


def document(
    host: Mapping[str, Any], settings: Sequence[str], without: Summary, rows: Sequence[StepRow]
) -> dict[str, Any]:
    """Return what ``--json`` writes; docs/benchmarks.md describes it."""
    return {
        "host": dict(host),
        "settings": list(settings),
        "without_communication": asdict(without),
        "rows": [asdict(row) for row in rows],
    }
