"""A reduce-scatter of host arrays in pieces: what is sent of each, where it arrives, and its ordered sum.

How it is cut and why is told in :mod:`mpishard.comm.scratch`. Pieces are cut across the ranks' blocks, so each element
is added in rank order as ever, and the bits depend on no size.

[Note: a slot's life]
A slot belongs to a piece from :meth:`Pieces.pack` to the end of :meth:`Pieces.add_up`, and then to the piece after
next. Sends read it, or the input where nothing is packed; both rest until every piece has been added up.
"""

from __future__ import annotations

from mpishard.array.dtypes import Array, DType
from mpishard.array.ops import Ops
from mpishard.comm.scratch import Cut

__all__ = ["Pieces"]


class Pieces:
    """The pieces of one bound reduce-scatter, from rank ``rank``'s side.

    Args:
        full, out, scratch: the validated buffers; ``scratch`` holds ``cut.nbytes``.
        wire: the type that travels.
        bracket: ranks whose contributions are summed first.
    """

    def __init__(
        self, rank: int, full: Array, out: Array, scratch: Array | None, wire: DType, cut: Cut, bracket: int
    ) -> None:
        self.rank, self.cut = rank, cut
        self._full, self._out, self._bracket = full, out, bracket
        self._blocks = full.reshape(cut.size, out.size)
        self._rounds = wire != full.dtype
        areas: list[Array] = []
        count = cut.size * cut.width
        for area in range(cut.slots * (1 + cut.packed)):
            assert scratch is not None  # bound buffers were validated
            areas.append(scratch[area * cut.area :][: count * cut.itemsize].view(wire))
        self._arrived = areas[:: 1 + cut.packed]
        self._sent = areas[1::2] if cut.packed else []
        shape = (cut.size, cut.width)
        self._rows = [list(area.reshape(shape)) for area in self._arrived]
        self._places = [area.reshape(shape) for area in self._sent]
        #: elements from one rank's part of what is sent to the next one's
        self.apart = cut.width if cut.packed else out.size

    def width(self, piece: int) -> int:
        """Return the elements of each rank's block that are in a piece."""
        return min(self.cut.width, self._out.size - piece * self.cut.width)

    def first(self, piece: int) -> int:
        """Return where rank 0's part of a piece begins in what is sent."""
        return 0 if self._sent else piece * self.cut.width

    def leaving(self, piece: int) -> Array:
        """Return the array that a piece is sent from."""
        return self._sent[piece % self.cut.slots] if self._sent else self._full

    def arriving(self, piece: int) -> Array:
        """Return the array that takes a piece, with rows of ``cut.width``, of which the last piece fills less."""
        return self._arrived[piece % self.cut.slots]

    def pack(self, ops: Ops, piece: int) -> None:
        """Make ready what a piece sends."""
        if self._sent:
            first, width = piece * self.cut.width, self.width(piece)
            ops.copy(self._blocks[:, first : first + width], self._places[piece % self.cut.slots][:, :width])

    def own(self, ops: Ops, piece: int) -> Array:
        """Return this rank's own contribution to a piece, as others would get it."""
        first, width, slot = piece * self.cut.width, self.width(piece), piece % max(1, self.cut.slots)
        mine: Array = self._blocks[self.rank, first : first + width]
        if self._sent:
            mine = self._places[slot][self.rank, :width]
        elif self._rounds:  # nothing is sent
            row = self._rows[slot][self.rank][:width]
            ops.copy(mine, row)
            mine = row
        return mine

    def rows(self, piece: int) -> list[Array]:
        """Return where each rank's part of a piece arrives; this rank's own part is not sent."""
        rows, width = self._rows[piece % self.cut.slots], self.width(piece)
        return list(rows) if width == self.cut.width else [row[:width] for row in rows]

    def add_up(self, ops: Ops, piece: int, add: bool) -> None:
        """Sum a piece that has arrived."""
        first, width = piece * self.cut.width, self.width(piece)
        if not width:
            return
        rows = self.rows(piece) if self.cut.size > 1 else [self._full]
        rows[self.rank] = self.own(ops, piece)
        ops.ordered_sum(rows, self._out[first : first + width], add, self._bracket)
