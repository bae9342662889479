"""The reduce-scatter ``pairwise``: contributions go from rank to rank in segments, and are added as they arrive.

[Note: order]
A rank receives, segment by segment, what ranks 0, 1, 2, ... contribute, and adds each to ``out`` (the first is written)
before the next; so the sum is in rank order as the contract has it, and no row waits for those before it. With
brackets, a bracket's sum grows in a row of its own and is added to ``out`` when it is whole. Every rank sends, segment
by segment, to ranks 0, 1, 2, ... in turn: rank q's message to rank d is the (q + d)-th of its segment, give or take
one, so no two ranks send to one at a time: the rounds of a pairwise exchange, which nobody has to keep.

[Note: no deadlock]
A rank waits for its oldest message alone. Give each message, from q to d, the number (segment, q + d). Who waits to
receive waits for a rank that waits to send something of a lower number, or nothing; who waits to send, likewise for
one that waits to receive. Numbers that fall end.

[Note: buffer lifetimes]
Sends read the input as it lies, or a row where it is rounded; a row is filled anew when its last send is complete.
"""

from __future__ import annotations

from collections import deque

from mpi4py import MPI

from mpishard.array.dtypes import Array, DType, accumulator
from mpishard.array.ops import Ops
from mpishard.comm.pump import Flight
from mpishard.comm.segments import Segments
from mpishard.comm.wires import Peers

__all__ = ["Pairwise"]


class Pairwise:
    """A bound reduce-scatter, on two ranks or more with something to add.

    Args:
        ops: operations of the thread that calls MPI.
        full, out, scratch: the validated buffers; ``scratch`` holds ``cut.nbytes``.
        wire: the type that travels.
        bracket: ranks whose contributions are summed first.
    """

    def __init__(
        self,
        peers: Peers,
        ops: Ops,
        full: Array,
        out: Array,
        scratch: Array,
        wire: DType,
        cut: Segments,
        bracket: int,
    ) -> None:
        self.peers, self.cut = peers, cut
        self._ops, self._out, self._bracket = ops, out, bracket
        self._blocks = full.reshape(peers.size, out.size)
        self._others = [rank for rank in range(peers.size) if rank != peers.rank]
        places = iter(range(0, cut.nbytes, cut.row or 1))

        def row() -> Array:
            return scratch[next(places) :][: cut.width * wire.itemsize].view(wire)

        self._arriving = [row() for _ in range(cut.arriving)]
        self._leaving = [row() for _ in range(cut.leaving)]  # the last is for this rank's own
        sums = accumulator(full.dtype)
        self._kept = scratch[cut.nbytes - cut.kept :][: cut.width * sums.itemsize].view(sums)
        #: messages in each direction
        self.messages = cut.count * len(self._others)

    def flight(self, name: str, add: bool) -> Flight:
        """Return what does it once."""
        return _Exchange(name, self, add)

    def peer(self, message: int) -> int:
        """Return who sends, or receives, a message."""
        return self._others[message % len(self._others)]

    def _span(self, message: int) -> tuple[int, int]:
        first = message // len(self._others) * self.cut.width
        return first, min(first + self.cut.width, self._out.size)

    def arriving(self, message: int) -> Array:
        """Return the row that takes a message."""
        first, last = self._span(message)
        return self._arriving[message % self.cut.arriving][: last - first]

    def leaving(self, message: int) -> Array:
        """Return what is sent; rounded, where it is to be."""
        first, last = self._span(message)
        part: Array = self._blocks[self.peer(message), first:last]
        return self._rounded(part, message % self.cut.arriving) if self._leaving else part

    def _rounded(self, part: Array, place: int) -> Array:
        row = self._leaving[place][: part.size]
        self._ops.copy(part, row)
        return row

    def land(self, message: int, add: bool) -> None:
        """Add what has arrived, and this rank's own contribution where it is its turn."""
        (first, last), source, mine = self._span(message), self.peer(message), self.peers.rank
        terms = [self.arriving(message)]
        before = mine == 0 and source == 1
        if before or source == mine - 1:
            own: Array = self._blocks[mine, first:last]
            if self._leaving:
                own = self._rounded(own, -1)
            terms.insert(0 if before else 1, own)
        self._add(terms, source - before, self._out[first:last], add)

    def _add(self, terms: list[Array], rank: int, out: Array, add: bool) -> None:
        """Add contributions of consecutive ranks, from ``rank`` on, to a segment of ``out``."""
        if self._bracket == 1:
            self._ops.ordered_sum(terms, out, add or rank > 0)
            return
        kept, size = self._kept[: out.size], self._bracket
        while terms:
            place = rank % size
            some, terms = terms[: size - place], terms[size - place :]
            written = rank < size and not add  # the first bracket, to out itself
            self._ops.ordered_sum(some, out if written else kept, place > 0)
            rank += len(some)
            if not written and rank % size == 0:
                self._ops.ordered_sum([kept], out, True)


class _Exchange(Flight):
    """The messages of one start."""

    def __init__(self, name: str, bound: Pairwise, add: bool) -> None:
        super().__init__(name, self._begin)
        self._bound, self._add = bound, add
        self._receives: deque[MPI.Request] = deque()
        self._sends: deque[MPI.Request] = deque()
        self._landed = self._left = self._tag = 0

    def _begin(self) -> list[MPI.Request]:
        self._tag = self._bound.peers.tag()
        self._go_on()
        return []

    def _go_on(self) -> None:
        bound, rows = self._bound, self._bound.cut.arriving
        for message in range(self._landed + len(self._receives), min(self._landed + rows, bound.messages)):
            row = bound.arriving(message)
            self._receives.append(bound.peers.receive(row, bound.peer(message), self._tag))
        for message in range(self._left + len(self._sends), min(self._left + rows, bound.messages)):
            self._sends.append(bound.peers.send(bound.leaving(message), bound.peer(message), self._tag))

    def test(self) -> bool:
        """Let at most one message land; return whether something moved."""
        moved = False
        try:
            while self._sends and self._sends[0].Test():
                self._sends.popleft()
                self._left += 1
                moved = True
            if self._receives and self._receives[0].Test():
                self._bound.land(self._landed, self._add)
                self._receives.popleft()
                self._landed += 1
                moved = True
            if moved:
                self._go_on()
            if not (self._receives or self._sends):
                self.end()
        except BaseException as error:
            self.end(error)
            return True
        return moved

    def end(self, error: BaseException | None = None) -> None:
        """Let go of the buffers, and wake who waits."""
        self._receives.clear()
        self._sends.clear()
        super().end(error)
