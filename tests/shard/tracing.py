"""How much memory each instruction allocates, temporaries included."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.ops import Ops
from mpishard.shard.engine import Engine
from mpishard.shard.program import Action
from tests.shard.training import Job

#: what NumPy buffers (8192 elements of each operand) and the exact GELU's pieces (2048 elements, in float64) take
BOUND = 150 * 1024


def measured(actions: list[Action], growth: dict[str, int]) -> list[Action]:
    """The same actions; each notes by how much traced memory was larger at its peak than before."""

    def wrap(action: Action) -> Action:
        def run() -> None:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            action.run()
            peak = tracemalloc.get_traced_memory()[1] - before
            name = str(action.instruction)
            growth[name] = max(growth.get(name, 0), peak)

        return action._replace(run=run)

    return [wrap(action) for action in actions]


def growths(engine: Engine, job: Job) -> dict[str, int]:
    """Two ordinary steps, then steps and an evaluation that are watched; their data is that of the first step."""
    growth: dict[str, int] = {}
    engine.step(job.feed(0), lr=job.lr)
    engine.step(None, lr=job.lr)
    engine.evaluate(None)
    engine._train, engine._eval = measured(engine._train, growth), measured(engine._eval, growth)
    tracemalloc.start()
    try:
        engine.step(None, lr=job.lr)
        engine.evaluate(None)
        gc.collect()  # cycles that wait for the collector are not kept
        held = tracemalloc.get_traced_memory()[0]
        engine.step(None, lr=job.lr)
        engine.evaluate(None)
        gc.collect()
        growth["what is left"] = tracemalloc.get_traced_memory()[0] - held
    finally:
        tracemalloc.stop()
    return growth


#: two of NumPy's buffers of 8192 elements in fp32, and vectors as long as a tile has rows
OPERATION_BOUND = 80 * 1024


def watched_ops(peaks: dict[str, int]) -> NumpyOps:
    """Operations that note, while memory is traced, by how much each raised it at most."""

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(self: NumpyOps, *arguments: Any) -> Any:
            if not tracemalloc.is_tracing():
                return call(self, *arguments)
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            result = call(self, *arguments)
            peaks[name] = max(peaks.get(name, 0), tracemalloc.get_traced_memory()[1] - before)
            return result

        return watched

    names = [name for name in Ops.__abstractmethods__ if name != "empty"]
    return type("Watched", (NumpyOps,), {name: wrap(name, getattr(NumpyOps, name)) for name in names})()
