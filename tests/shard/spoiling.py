"""NaN in everything that an engine holds and that is no element of a parameter, gradient or moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mpishard.array.arena import REGION
from mpishard.array.dtypes import Array
from mpishard.comm.base import Communicator
from mpishard.shard.engine import Engine
from mpishard.shard.state import UnitState
from tests.shard.training import Job, Outcome


class Spoiler:
    """An engine's memory: the region that collectives work in, its stacks and its state."""

    def __init__(self, comm: Communicator, job: Job, **changes: Any) -> None:
        self.engine: Engine = job.engine(comm, **changes)
        self.spoiled = 0

    def spoil(self) -> None:
        """Between steps: NaN in all that communication and stacks use, and in the state's holes."""
        engine = self.engine
        engine.arena._blocks[REGION].fill(255)
        for stack in (engine.arena.saved, engine.arena.workspace):
            stack._base.fill(255)
        for scratch in (engine._runner._losses, *engine._runner._flow):
            scratch.fill(np.nan)
        for part, hole in self.holes():
            for array in part.arrays.values():
                array[hole] = np.nan
                self.spoiled += int(hole.sum())

    def holes(self) -> Iterator[tuple[UnitState, Array]]:
        """Yield each unit's part and which of its elements belong to no parameter."""
        for part in self.engine.state.values():
            hole = np.ones(part.layout.total, bool)
            for slot in part.layout.slots:
                hole[slot.offset : slot.offset + slot.size] = False
            yield part, hole[part.start : part.stop]


def spoiled_run(comm: Communicator, job: Job, steps: int, **changes: Any) -> Outcome:
    spoiler = Spoiler(comm, job, **changes)
    engine, results = spoiler.engine, []
    for step in range(steps):
        spoiler.spoil()
        results.append(engine.step(job.feed(step), lr=job.lr))
        for part, hole in spoiler.holes():
            assert not part.arrays["grad"][hole].any()  # zero before it is reduced, so that nothing piles up
        spoiler.spoil()
        assert np.isfinite(engine.evaluate(job.feed(99)).loss)
    spoiler.spoil()
    assert comm.size > 1 or spoiler.spoiled > 0
    return Outcome(engine.checksum(), tuple(r.loss for r in results), tuple(r.grad_norm for r in results))
