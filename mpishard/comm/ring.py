"""The reduce-scatter ``ring``: partial sums travel from each rank to the next and take up a contribution at each.

[Note: order]
The sum for rank r's block begins with rank r + 1's contribution, goes on with those of r + 2, r + 3, ... (modulo the
ranks), and ends with r's own; then it is added to what stands in ``out``. So each block has an order of its own, which
is not the contract's. It is the same at every run.

Sums travel in fp32 (fp64 for fp64), so 16-bit inputs send twice the bytes that they have. Contributions are rounded to
the type that was to travel, so the terms are those of the other algorithms.

[Note: buffer lifetimes]
A *lane* takes one segment of all blocks round the ring, then the next but some. Of its two rows one is sent while the
other takes what arrives; they change places when both are done.
"""

from __future__ import annotations

from mpi4py import MPI

from mpishard.array.dtypes import Array, DType, accumulator
from mpishard.array.ops import Ops
from mpishard.comm.pump import Flight
from mpishard.comm.segments import Segments
from mpishard.comm.wires import Peers

__all__ = ["Ring"]


class Ring:
    """A bound reduce-scatter, on two ranks or more with something to add; arguments as for ``Pairwise``."""

    def __init__(
        self, peers: Peers, ops: Ops, full: Array, out: Array, scratch: Array, wire: DType, cut: Segments
    ) -> None:
        self.peers, self.cut, self.ops, self.out = peers, cut, ops, out
        self._blocks = full.reshape(peers.size, out.size)
        sums = accumulator(full.dtype)
        self._travels_as_it_lies = full.dtype == wire == sums
        rows = [scratch[row * cut.row :][: cut.width * sums.itemsize].view(sums) for row in range(cut.arriving)]
        #: the two rows of each lane
        self.lanes = list(zip(rows[::2], rows[1::2], strict=True))
        self._rounded = [scratch[cut.nbytes - cut.rounded :][: cut.width * wire.itemsize].view(wire)] * cut.leaving

    def flight(self, name: str, add: bool) -> Flight:
        """Return what does it once."""
        return _Round(name, self, add)

    def span(self, segment: int) -> tuple[int, int]:
        """Return where a segment begins and ends in a block."""
        first = segment * self.cut.width
        return first, min(first + self.cut.width, self.out.size)

    def own(self, back: int, segment: int) -> Array:
        """Return this rank's contribution to the block of the rank ``back`` places before it."""
        first, last = self.span(segment)
        part: Array = self._blocks[(self.peers.rank - back) % self.peers.size, first:last]
        for row in self._rounded:
            self.ops.copy(part, row[: part.size])
            part = row[: part.size]
        return part

    def first(self, segment: int, row: Array) -> Array:
        """Return what is sent first: a contribution, in the type of sums; ``row`` may be used for it."""
        part = self.own(1, segment)
        if self._travels_as_it_lies:
            return part
        self.ops.ordered_sum([part], row[: part.size], False)
        return row[: part.size]


class _Lane:
    """One segment after another round the ring, with a tag of its own."""

    def __init__(self, ring: Ring, lane: int, add: bool) -> None:
        self._ring, self._rows, self._add = ring, ring.lanes[lane], add
        self._segment, self._tag = lane, ring.peers.tag()
        self._requests: list[MPI.Request] = []
        self.over = False
        self._start()

    def _start(self) -> None:
        self._step = 0
        self._exchange(self._ring.first(self._segment, self._rows[0]))

    def _exchange(self, leaving: Array) -> None:
        peers, self._step = self._ring.peers, self._step + 1
        self._arriving = self._rows[self._step % 2][: leaving.size]
        left, right = (peers.rank - 1) % peers.size, (peers.rank + 1) % peers.size
        self._requests = [peers.receive(self._arriving, left, self._tag), peers.send(leaving, right, self._tag)]

    def test(self) -> bool:
        """Go a step further if the last one is done; return whether."""
        if not MPI.Request.Testall(self._requests):
            return False
        ring, last = self._ring, self._step == self._ring.peers.size - 1
        own = ring.own(self._step + 1, self._segment)
        if not last:
            ring.ops.ordered_sum([own], self._arriving, True)
            self._exchange(self._arriving)
            return True
        first, end = ring.span(self._segment)
        ring.ops.ordered_sum([self._arriving, own], ring.out[first:end], self._add, 2)
        self._segment += len(ring.lanes)
        self.over = self._segment >= ring.cut.count
        if not self.over:
            self._start()
        return True


class _Round(Flight):
    """The lanes of one start."""

    def __init__(self, name: str, ring: Ring, add: bool) -> None:
        super().__init__(name, self._begin)
        self._ring, self._add = ring, add
        self._lanes: list[_Lane] = []

    def _begin(self) -> list[MPI.Request]:
        self._lanes = [_Lane(self._ring, lane, self._add) for lane in range(len(self._ring.lanes))]
        return []

    def test(self) -> bool:
        """Let each lane go at most a step further; return whether one did."""
        try:
            moved = [lane.test() for lane in self._lanes]
            self._lanes = [lane for lane in self._lanes if not lane.over]
            if not self._lanes:
                self.end()
        except BaseException as error:
            self.end(error)
            return True
        return any(moved)

    def end(self, error: BaseException | None = None) -> None:
        """Let go of the buffers, and wake who waits."""
        self._lanes = []
        super().end(error)
