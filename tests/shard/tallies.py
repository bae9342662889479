"""Calls and bytes of an engine's collectives, as measured and by formulas of their own."""

from __future__ import annotations

from typing import Any

from mpishard.comm.base import Communicator
from tests.shard.training import SMALL, Job

KINDS = ("all_gather", "reduce_scatter", "exchange", "broadcast")


def elements(ranks: int, *sizes: int) -> int:
    """A unit's flat buffer: parameters at multiples of 16 elements, the end at a multiple of 512 on each rank."""
    end = 0
    for size in sizes:
        end = -(-end // 16) * 16 + size
    return -(-end // (512 * ranks)) * 512 * ranks


def buffers(ranks: int) -> tuple[int, int]:
    """Bytes of the root's and of a block's buffer."""
    width, positions, vocabulary = SMALL.width, SMALL.sequence, SMALL.vocabulary
    root = elements(ranks, vocabulary * width, positions * width, width, width)
    attention = (width * 3 * width, 3 * width, width * width, width)
    block = elements(
        ranks, width, width, *attention, width, width, width * 4 * width, 4 * width, width * 4 * width, width
    )
    return 4 * root, 4 * block


def measured(comm: Communicator, job: Job, **changes: Any) -> dict[str, dict[str, tuple[int, int]]]:
    """Calls and bytes of everything that an engine does; what groups do begins with ``inside`` and ``across``."""
    engine = job.engine(comm, **changes)
    comms = {"": comm}
    if engine._parts is not None:
        comms |= dict(zip(("inside ", "across "), engine._parts, strict=True))

    def tally() -> dict[str, tuple[int, int]]:
        return {
            name + kind: (one.tallies[kind].calls, one.tallies[kind].bytes)
            for name, one in comms.items()
            for kind in KINDS
        }

    found = {}
    deeds = {
        "step": lambda: engine.step(job.feed(0), lr=job.lr),
        "step again": lambda: engine.step(job.feed(1), lr=job.lr),
        "evaluate": lambda: engine.evaluate(job.feed(2)),
        "predict": lambda: engine.predict(engine._runner.inputs[0].copy(), 1),
        "checksum": engine.checksum,
    }
    for name, deed in deeds.items():
        before = tally()
        deed()
        found[name] = {kind: (n - before[kind][0], b - before[kind][1]) for kind, (n, b) in tally().items()}
    return found
