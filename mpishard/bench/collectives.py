"""Collectives over several transports, timed in turn.

[Note: method]
For each operation, type and size every variant is bound once. It is run on fresh data into an output of other numbers,
and checked; then all variants run WARM_UPS times; then they take turns (A B C A B C), so that a ratio is of one time of
the machine. At its turn each runs twice, and the second time counts: a variant must not find in the caches what another
that uses the same buffers has left there. Before each sample is a barrier; a sample is from before the call until the
result is there and the input may be overwritten, on a device until its stream has come there; it counts as the slowest
rank's. At the end each is checked again. A copy and a sum of private buffers of the same size, on all ranks at once,
take turns with the others: what this memory gives now.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from mpishard.array.dtypes import DTYPES, Array
from mpishard.bench.host import available
from mpishard.bench.rows import References, Row
from mpishard.bench.sizes import fitted, readable
from mpishard.bench.statistics import summary
from mpishard.bench.subjects import Memory, Private, Subject, bound
from mpishard.bench.variants import DTYPE_NAMES, Variant
from mpishard.comm.base import Communicator
from mpishard.comm.library_calls import LibraryCalls
from mpishard.errors import ConfigError

__all__ = ["LEAST_SAMPLES", "MOST_SAMPLES", "WARM_UPS", "Ask", "Meeting", "Sweep", "Together", "rounds"]

WARM_UPS = 5
#: of each row; how many it gets between them, follows from the time that it may take
LEAST_SAMPLES, MOST_SAMPLES = 5, 200


@dataclass(frozen=True)
class Ask:
    """What is to be measured, alike on all ranks.

    Attributes:
        sizes: bytes of whole messages.
        seconds: of samples for each row, about.
        least: samples of each row, whatever they take.
    """

    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    variants: tuple[Variant, ...]
    baseline: Variant
    seconds: float = 0.5
    least: int = LEAST_SAMPLES

    def counts(self, dtype: str, ranks: int) -> tuple[int, ...]:
        """Return the elements of each size, each once."""
        item = DTYPES[DTYPE_NAMES[dtype]].itemsize
        return tuple(dict.fromkeys(fitted(size, ranks, item) for size in self.sizes))

    def most(self, ranks: int) -> int:
        """Return the bytes of the largest message."""
        items = ((DTYPES[DTYPE_NAMES[dtype]].itemsize, dtype) for dtype in self.dtypes)
        return max(max(self.counts(dtype, ranks)) * item for item, dtype in items)


class Together(Protocol):
    """How ranks begin a sample together, and learn the slowest one's time."""

    def barrier(self) -> None:
        """Return when every rank has come here."""

    def largest(self, values: Array) -> Array:
        """Return the largest of the ranks' fp64 ``values`` (n,), element by element."""


class Meeting:
    """:class:`Together` over a communicator alone, where there is no MPI."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self._comm.barrier()

    def largest(self, values: Array) -> Array:
        """Return the largest of the ranks' ``values`` (n,)."""
        records = self._comm.exchange(values.astype(np.float64).tobytes(), "the slowest rank's times")
        found: Array = np.stack([np.frombuffer(record, np.float64) for record in records]).max(0)
        return found


def rounds(once: float, variants: int, seconds: float, least: int = LEAST_SAMPLES) -> int:
    """Return how often all variants are run: for ``seconds`` each, where they take ``once`` seconds together."""
    return int(min(MOST_SAMPLES, max(least, seconds * variants / max(once, 1e-9))))


@dataclass
class Sweep:
    """One measurement over all sizes. Made and run alike by all ranks.

    Attributes:
        comms: a communicator for each variant; for the MPI library's own, one whose buffers it uses.
        together: makes ranks begin a sample at one time.
        calls: the MPI library's own collectives, where they are among the variants.
        notes: what was left out, and why.
    """

    ask: Ask
    comms: Mapping[Variant, Communicator]
    together: Together
    calls: LibraryCalls | None = None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        comm = next(iter(self.comms.values()))
        self._ops, self._size = comm.ops, comm.size
        stream = getattr(comm.ops, "stream", None)
        self._sync: Callable[[], object] = (lambda: None) if stream is None else stream.synchronize
        self._most = self.ask.most(self._size)
        #: buffers by transport, which its variants share
        self.memories: dict[str, Memory] = {}
        for variant, one in self.comms.items():
            scratch = max(self._scratch(other) for v, other in self.comms.items() if v.transport == variant.transport)
            self.memories.setdefault(variant.transport, Memory(one, self._most, scratch))
        self._private: tuple[Array, Array, Array] | None = None

    def check_room(self, ranks: int) -> None:
        """Check that ``ranks`` ranks of this machine can have the buffers, before any is taken.

        Raises:
            ConfigError: they cannot.
        """
        need, there = self._most * 3 + sum(memory.nbytes for memory in self.memories.values()), available()
        if there and self._ops.device == "cpu" and need * ranks > there:
            raise ConfigError(
                f"a rank needs {readable(need)} of buffers and {ranks} of them run on this machine, where "
                f"{readable(there)} are free; use a smaller --max, or fewer transports at a time"
            )

    def _scratch(self, comm: Communicator) -> int:
        kinds = [(DTYPES[DTYPE_NAMES[dtype]], dtype) for dtype in self.ask.dtypes]
        return max(
            comm.scratch_bytes(count, kind, kind)
            for kind, dtype in kinds
            for count in self.ask.counts(dtype, self._size)
        )

    def run(self, each: Callable[[list[Row]], None] = lambda rows: None) -> list[Row]:
        """Measure everything; ``each`` is given the rows of an operation and a type, if any, when they are there."""
        found: list[Row] = []
        for op in self.ask.ops:
            for dtype in self.ask.dtypes:
                rows = [row for count in self.ask.counts(dtype, self._size) for row in self._rows(op, dtype, count)]
                if rows:
                    each(rows)
                found += rows
        return found

    def _variants(self, op: str, dtype: str) -> Iterator[Variant]:
        for variant in self.comms:
            if not variant.differs(op):
                note = f"{variant.name}: {op} is that of {variant.transport}"
            elif variant.native and (self.calls is None or not self.calls.can(op, DTYPES[DTYPE_NAMES[dtype]])):
                note = f"{variant.name}: {op} of {dtype} is not measured, 16-bit numbers are never summed by MPI"
            else:
                yield variant
                continue
            if note not in self.notes:
                self.notes.append(note)

    def _rows(self, op: str, dtype: str, count: int) -> list[Row]:
        kind = DTYPES[DTYPE_NAMES[dtype]]
        nbytes = count * kind.itemsize
        variants = list(self._variants(op, dtype))
        if not variants:
            return []
        subjects: list[Subject] = [self.subject(op, variant, count, dtype) for variant in variants]
        if self._private is None:
            a, b, c = (self._ops.empty(-(-self._most // 4), DTYPES["float32"]) for _ in range(3))
            for buffer in (a, b, c):
                self._ops.fill(buffer, 1.0)
            self._private = a, b, c
        elements = max(1, nbytes // 4)
        subjects += Private.pair(self._ops, elements, self._private)
        before = [self._tried(subject) for subject in subjects]
        times = self._times(subjects)
        after = [self._tried(subject) for subject in subjects]
        wrong = [not (one and other) for one, other in zip(before, after, strict=True)]
        anywhere = self.together.largest(np.array(wrong, np.float64))
        found = [summary(samples) for samples in self.together.largest(times.ravel()).reshape(times.shape)]
        base = next((f.seconds for v, f in zip(variants, found, strict=False) if v == self.ask.baseline), None)
        references = References(base, found[-2].seconds, found[-1].seconds)
        return [
            Row.of(op, variant, dtype, self._size, nbytes, one, references, correct=not bad)
            for variant, one, bad in zip(variants, found, anywhere, strict=False)
        ]

    def subject(self, op: str, variant: Variant, count: int, dtype: str) -> Subject:
        """Return what is timed. Collective. (A comparison with another library has subjects of its own.)"""
        memory = self.memories[variant.transport]
        calls = self.calls if variant.native else None
        kind = DTYPES[DTYPE_NAMES[dtype]]
        return bound(
            op, memory, self.comms[variant], count, kind, ordered=variant.ordered, shared=variant.shared, calls=calls
        )

    def _tried(self, subject: Subject) -> bool:
        """Run once on fresh data."""
        subject.prepare()
        self._sync()
        self.together.barrier()
        subject.run()
        self._sync()
        right = subject.check()
        subject.end()
        return right

    def _times(self, subjects: Sequence[Subject]) -> Array:
        """Return this rank's seconds (subjects, samples)."""
        once = np.zeros(len(subjects))
        with _undisturbed():
            for _ in range(WARM_UPS):
                once = np.array([self._once(subject) for subject in subjects])
            once = self.together.largest(once)
            number = rounds(float(once.sum()), len(subjects), self.ask.seconds, self.ask.least)
            times = np.empty((len(subjects), number))
            for sample in range(number):
                for i, subject in enumerate(subjects):
                    self._once(subject)
                    times[i, sample] = self._once(subject)
        return times

    def _once(self, subject: Subject) -> float:
        self.together.barrier()
        begin = time.perf_counter()
        subject.run()
        self._sync()
        seconds = time.perf_counter() - begin
        subject.end()
        return seconds


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep the garbage collector out of the samples."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
