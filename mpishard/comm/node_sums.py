"""The flight of a reduce-scatter on two levels: sums of a node's ranks travel between nodes, piece by piece.

[Note: who waits]
Nobody where MPI is called: a piece is packed when all ranks of the node have started, and until then nothing is posted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from mpishard.array.ops import Ops
from mpishard.comm.board import Board
from mpishard.comm.partials import Partials
from mpishard.comm.series import Series
from mpishard.comm.wires import WIRE, wire_view

__all__ = ["NodeSums"]


class NodeSums(Series):
    """The flight of one start, on the communicator of the ranks of this local index.

    Args:
        ops: operations of the thread that calls MPI.
        board, number: the board of the node's ranks for that thread, and the start's number there.
        line: as for :class:`Series`.
    """

    def __init__(
        self,
        name: str,
        partials: Partials,
        comm: MPI.Intracomm,
        ops: Ops,
        board: Board,
        number: int,
        line: deque[Series],
        add: bool,
    ) -> None:
        cut = partials.cut
        super().__init__(
            name,
            cut.pieces,
            cut.slots,
            _sender(partials, comm, ops, lambda: board.end(number)),
            lambda piece: partials.add_up(ops, piece, add),
            line,
        )
        self._started = False
        self._all_started: Callable[[], bool] = lambda: board.have_started(number)

    def _go_on(self) -> None:
        self._started = self._started or self._all_started()
        if self._started:
            super()._go_on()


def _sender(
    partials: Partials, comm: MPI.Intracomm, ops: Ops, packed: Callable[[], None]
) -> Callable[[int], list[MPI.Request]]:
    """Return what sends a piece to the other nodes; ``packed`` is called when no input is read any more."""
    cut = partials.cut
    kind, nodes = WIRE[cut.itemsize], np.arange(cut.size, dtype=np.intc)

    def send(piece: int) -> list[MPI.Request]:
        partials.pack(ops, piece)
        if piece == cut.pieces - 1:
            packed()
        width = partials.width(piece)
        counts, places = np.full(cut.size, width, np.intc), width * nodes
        counts[partials.node] = 0
        mine = [wire_view(partials.leaving(piece)), counts, places, kind]
        return [comm.Ialltoallv(mine, [wire_view(partials.arriving(piece)), counts, places, kind])]

    return send
