"""The sums of a node's ranks, and the way they take between nodes: a reduce-scatter on two levels, in pieces.

A rank (node i, local index l) sums, for every node j, what the ranks of its node contribute to the rank (j, l): a
*partial*. It reads their inputs where they lie. Partials go from node to node between the ranks of one local index,
all local indices at once, and are added in the order of the nodes. How they are cut is told in
:mod:`mpishard.comm.scratch`.

[Note: a slot's life]
A slot belongs to a piece from :meth:`Partials.pack` to the end of :meth:`Partials.add_up`, and then to the piece after
next. The inputs of the node's ranks are read in ``pack``, so they are free when the last piece has been packed.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpishard.array.dtypes import Array, DType, accumulator
from mpishard.array.ops import Ops
from mpishard.comm.scratch import Cut

__all__ = ["Partials"]


class Partials:
    """The pieces of one bound reduce-scatter, from one rank's side.

    Args:
        node, local: this rank's node and its index there.
        fulls: the inputs of the node's ranks, in order.
        out, scratch: the validated buffers; ``scratch`` holds ``cut.nbytes``.
        wire: the type to which contributions are rounded.
    """

    def __init__(
        self, node: int, local: int, fulls: Sequence[Array], out: Array, scratch: Array, wire: DType, cut: Cut
    ) -> None:
        self.cut, self.node, self._out = cut, node, out
        nodes, ranks = cut.size, len(fulls)
        # of each rank of this node, what it contributes to each node's rank of this local index: (nodes, count)
        self._blocks = [full.reshape(nodes, ranks, out.size)[:, local] for full in fulls]
        sums = accumulator(wire)
        areas = [
            scratch[area * cut.area :][: nodes * cut.width * cut.itemsize].view(sums) for area in range(2 * cut.slots)
        ]
        self._arriving, self._leaving = areas[::2], areas[1::2]
        self._rounded: list[Array] = []
        if cut.beside:
            each = cut.beside // ranks
            behind = scratch[cut.nbytes - cut.beside : cut.nbytes]
            self._rounded = [behind[rank * each : (rank + 1) * each].view(wire) for rank in range(ranks)]

    def width(self, piece: int) -> int:
        """Return the elements of a block that are in a piece."""
        return min(self.cut.width, self._out.size - piece * self.cut.width)

    def leaving(self, piece: int) -> Array:
        """Return a piece's partials: a row for each node, one behind the other."""
        return self._leaving[piece % self.cut.slots][: self.cut.size * self.width(piece)]

    def arriving(self, piece: int) -> Array:
        """Return what takes a piece, likewise; this node's own row is not sent."""
        return self._arriving[piece % self.cut.slots][: self.cut.size * self.width(piece)]

    def pack(self, ops: Ops, piece: int) -> None:
        """Sum the contributions of the node's ranks; all have started."""
        first, width = piece * self.cut.width, self.width(piece)
        for node, row in enumerate(self.leaving(piece).reshape(self.cut.size, width)):
            self._sum(ops, [blocks[node, first : first + width] for blocks in self._blocks], row)

    def _sum(self, ops: Ops, parts: Sequence[Array], out: Array) -> None:
        if not self._rounded:
            ops.ordered_sum(parts, out, False)
            return
        step = self._rounded[0].size
        for first in range(0, out.size, step):
            tiles = [part[first : first + step] for part in parts]
            rounded = [room[: tile.size] for room, tile in zip(self._rounded, tiles, strict=True)]
            for tile, room in zip(tiles, rounded, strict=True):
                ops.copy(tile, room)
            ops.ordered_sum(rounded, out[first : first + step], False)

    def add_up(self, ops: Ops, piece: int, add: bool) -> None:
        """Add the nodes' partials of a piece that has arrived, in their order."""
        rows = list(self.arriving(piece).reshape(self.cut.size, -1))
        rows[self.node] = self.leaving(piece).reshape(self.cut.size, -1)[self.node]
        self.finish(ops, piece, rows, add)

    def finish(self, ops: Ops, piece: int, terms: Sequence[Array], add: bool) -> None:
        """Write a piece of ``out``, or add to it."""
        first = piece * self.cut.width
        ops.ordered_sum(terms, self._out[first : first + self.width(piece)], add)
