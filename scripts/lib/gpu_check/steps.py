"""What steps ask of the GPU: memory that is taken and given back, waits of the host, launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpu_check import tiny
from gpu_check.report import Report, Task
from mpishard.array.cupy_ops import CupyOps
from mpishard.comm.local import LocalCommunicator

__all__ = ["check", "watched"]

#: What must not be called in a step after the second.
TAKING = ("malloc", "free", "mallocAsync", "freeAsync", "mallocManaged", "hostAlloc", "alloc_pinned_memory")
WAITING = ("deviceSynchronize", "Device.synchronize")


@contextmanager
def watched() -> Iterator[Counter[str]]:
    """Count calls of CuPy that take memory or wait for all of a device or stream; those of libraries are not seen."""
    import cupy

    counts: Counter[str] = Counter()
    cuda, runtime, before = cupy.cuda, cupy.cuda.runtime, []

    def put(owner: Any, name: str, value: Any) -> None:
        before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return call(*args, **kwargs)

        return count

    def synchronize(kind: type) -> type:
        def wait(self: Any) -> None:
            counts[f"{kind.__name__}.synchronize"] += 1
            kind.synchronize(self)  # type: ignore[attr-defined]

        return type(kind.__name__, (kind,), {"synchronize": wait})

    for owner, names in ((runtime, (*TAKING[:-1], "deviceSynchronize", "streamSynchronize")), (cuda, TAKING[-1:])):
        for name in names:
            if hasattr(owner, name):
                put(owner, name, counted(name, getattr(owner, name)))
    for name in ("Device", "Stream"):
        put(cuda, name, synchronize(getattr(cuda, name)))
    try:
        yield counts
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def check(task: Task, report: Report) -> None:
    table = report.table(
        "What one step asks of the GPU, after the second",
        *("type", "strategy", "launches", "copies", "host waits", "memory taken", "device-wide waits", "bytes gone"),
        note=f"Of a small GPT-2 with {tiny.BATCH} micro-batches. Memory taken: calls that take or give back "
        "memory of the GPU or pinned memory; it must be 0, and so must device-wide waits. Bytes gone: free memory of "
        "the GPU before and after, which other programs change too.",
    )
    steps, vocabulary = task.size(6, 2), tiny.sizes_of(task.small).vocabulary
    for kind in ("float32", "bfloat16", "float16"):
        for strategy in ("full_shard", "no_shard"):
            with watched() as counts:
                ops = CupyOps(task.device)
                made = tiny.engine(ops, LocalCommunicator(ops), kind, task.small, strategy)
                for step in range(2):
                    made.step(tiny.feed(step, vocabulary), lr=tiny.LR)
                free = ops.room
                counts.clear()
                ops.counters.reset()
                for step in range(2, 2 + steps):
                    made.step(tiny.feed(step, vocabulary), lr=tiny.LR)
                counts, counters = Counter(counts), ops.counters
                gone = free - ops.room
            taken = max(sum(counts[name] for name in TAKING), counters.allocations)
            wide = sum(counts[name] for name in WAITING)
            each = [n / steps for n in (counters.launches, counters.copies, counters.waits)]
            table.row(kind, strategy, *each, taken, wide, gone)
            report.require(not taken, f"{kind}, {strategy}: {taken} calls take or give back memory: {dict(counts)}")
            report.require(not wide, f"{kind}, {strategy}: {wide} waits for the whole device: {dict(counts)}")
            made.close()
