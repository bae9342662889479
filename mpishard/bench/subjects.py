"""One collective of one size on one transport, ready to be run many times and to be checked.

Buffers come from the transport (``allocate``), taken once for the largest message; every size uses the beginning of
them. A message is ``count`` elements, ``count / ranks`` of each rank. All-gathers are in place: a rank's part is its
own slice of the result; but where ranks gather into one copy, into which each copies its part. An all-reduce of ours is
an ordered reduce-scatter, rounded to the type of the message where that is narrower, and an all-gather.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from mpishard.array.dtypes import DTYPES, Array, DType, accumulator
from mpishard.array.ops import Ops
from mpishard.bench import data
from mpishard.comm.base import Communicator, Work
from mpishard.comm.library_calls import LibraryCalls
from mpishard.comm.pool import Pool

__all__ = ["Memory", "Message", "Private", "Subject", "bound"]


class Memory:
    """The buffers of one transport for messages of up to ``most`` bytes, each taken when it is first needed."""

    def __init__(self, comm: Communicator, most: int, scratch: int) -> None:
        each = 2 * -(-most // comm.size)  # sums of 16-bit numbers are twice as wide
        self.comm, self._most = comm, {"source": most, "out": most, "shard": each, "scratch": scratch}
        self._taken: dict[str, Array] = {}
        self._pool: Pool | None = None

    def pool(self) -> Pool:
        """Return what all ranks share, as large as a message. Collective when it is first asked for."""
        if self._pool is None:
            self._pool = self.comm.pool(self._most["out"])
        return self._pool

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, once they are taken."""
        return sum(self._most.values())

    def cut(self, name: str, count: int, kind: DType) -> Array:
        """Return the first ``count`` elements of a buffer, as ``kind``."""
        if name not in self._taken:
            nbytes = -(-self._most[name] // 64) * 64
            self._taken[name] = self.comm.allocate(nbytes, DTYPES["uint8"])
        return self._taken[name][: count * kind.itemsize].view(kind)


class Subject(ABC):
    """What is timed: :meth:`run`, from its call to its return, and :meth:`end` after it, which is not."""

    def prepare(self) -> None:  # noqa: B027 - what is no collective has nothing to lose
        """Write the input anew, and numbers into the output that a run must replace."""

    @abstractmethod
    def run(self) -> None:
        """Do it once, to its end: the result is there and the input is free."""

    def end(self) -> None:  # noqa: B027 - as above
        """Give back what a run holds."""

    def check(self) -> bool:
        """Return whether this rank's part of the result is right, after a run and before its end."""
        return True


class Private(Subject):
    """Work on buffers of this process alone: what its memory gives while all ranks do the same."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    @classmethod
    def pair(cls, ops: Ops, count: int, buffers: tuple[Array, Array, Array]) -> tuple[Private, Private]:
        """Return a copy and a sum of the first ``count`` fp32 elements of buffers that no other process sees."""
        a, b, c = (buffer[:count] for buffer in buffers)
        if getattr(ops, "stream", None) is not None:
            return cls(lambda: ops.copy(a, b)), cls(lambda: ops.add(a, b, c))
        return cls(lambda: np.copyto(b, a)), cls(lambda: np.add(a, b, out=c))

    def run(self) -> None:
        """Call it."""
        self._call()


class Message(Subject):
    """A collective over ``count`` elements of ``kind``; ``run`` is left to what carries it."""

    def __init__(self, op: str, memory: Memory, comm: Communicator, count: int, kind: DType, *, ordered: bool) -> None:
        self.op, self.comm, self.ops, self.kind = op, comm, comm.ops, kind
        self.ordered = ordered
        each = count // self.comm.size
        own = slice(self.comm.rank * each, (self.comm.rank + 1) * each)
        self.first = own.start
        wide = accumulator(kind)
        if op == "reduce_scatter":
            self.source = memory.cut("source", count, kind)
            self.out = memory.cut("shard", each, wide)
        else:
            self.out = memory.cut("out", count, kind)
            self.source = self.out[own] if op == "all_gather" else memory.cut("source", count, kind)
        #: where an all-reduce leaves this rank's sums
        self.part = self.out[own] if op == "all_reduce" else self.out
        self.sums = memory.cut("shard", each, wide) if op == "all_reduce" and kind != wide else self.part

    def prepare(self) -> None:
        """Write this rank's table into the input, and -1 into the output."""
        self.ops.fill(self.out, -1.0)
        data.fill(self.ops, self.source, data.table(self.comm.rank, self.kind))

    def check(self) -> bool:
        """Return whether every element of this rank's result is right: its bits, or a sum in whatever order."""
        size = self.comm.size
        if self.op == "all_gather":
            blocks = self.out.reshape(size, -1)
            return all(data.same(self.ops, blocks[rank], data.table(rank, self.kind)) for rank in range(size))
        first = self.first if self.op == "reduce_scatter" else 0
        if not self.ordered:
            return data.close(self.ops, self.out, size, self.kind, first)
        due = data.summed(size, self.kind, self.comm.bracket).astype(self.out.dtype, copy=False)
        return data.same(self.ops, self.out, due, first)


class _Ours(Message):
    """Bound once on a communicator, started at each run."""

    def __init__(self, op: str, memory: Memory, comm: Communicator, count: int, kind: DType, *, ordered: bool) -> None:
        super().__init__(op, memory, comm, count, kind, ordered=ordered)
        self._bound = []
        if op != "all_gather":
            nbytes = comm.scratch_bytes(count, kind, kind)
            scratch = memory.cut("scratch", nbytes, DTYPES["uint8"]) if nbytes else None
            into = self.out if op == "reduce_scatter" else self.sums
            self._bound.append(comm.bind_reduce_scatter(self.source, into, scratch))
        if op != "reduce_scatter":
            self._bound.append(comm.bind_all_gather(self.source if op == "all_gather" else self.part, self.out))
        self._works: list[Work] = []

    def run(self) -> None:
        self._works = [self._bound[0].start()]
        if len(self._bound) == 2:
            self._works[0].wait()
            if self.sums is not self.part:
                self.ops.copy(self.sums, self.part)
            self._works.append(self._bound[1].start())
        for work in reversed(self._works):
            work.wait_inputs()

    def end(self) -> None:
        for work in self._works:
            work.released()


class _Shared(Message):
    """An all-gather into memory that all ranks share."""

    def __init__(self, memory: Memory, comm: Communicator, count: int, kind: DType) -> None:
        super().__init__("all_gather", memory, comm, count, kind, ordered=True)
        pool = memory.pool()
        self.source, self.out = memory.cut("shard", count // comm.size, kind), pool.bytes[: self.out.nbytes].view(kind)
        self.part = self.out
        self._gather = pool.bind(self.source, self.out)
        self._work: Work | None = None

    def prepare(self) -> None:
        """Write this rank's table into the input, and -1 into this rank's part of the output."""
        each = self.source.size
        self.ops.fill(self.out[self.first : self.first + each], -1.0)
        data.fill(self.ops, self.source, data.table(self.comm.rank, self.kind))

    def run(self) -> None:
        self._work = self._gather.start()
        self._work.wait_inputs()

    def end(self) -> None:
        if self._work is not None:
            self._work.released()


class _Library(Message):
    """The MPI library's own, which blocks."""

    def __init__(
        self, op: str, memory: Memory, comm: Communicator, count: int, kind: DType, calls: LibraryCalls
    ) -> None:
        super().__init__(op, memory, comm, count, kind, ordered=False)
        self._call: Callable[[], None] = calls.bind(op, self.source, self.out)

    def run(self) -> None:
        self._call()


def bound(
    op: str,
    memory: Memory,
    comm: Communicator,
    count: int,
    kind: DType,
    *,
    ordered: bool,
    shared: bool = False,
    calls: LibraryCalls | None = None,
) -> Subject:
    """Return a collective of a communicator on buffers of its transport; with ``calls``, the library's own. Collective.

    Args:
        ordered: whether every bit of a sum is known.
        shared: gather into one copy of all ranks.
    """
    if shared:
        return _Shared(memory, comm, count, kind)
    if calls is not None:
        return _Library(op, memory, comm, count, kind, calls)
    return _Ours(op, memory, comm, count, kind, ordered=ordered)
