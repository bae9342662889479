"""The algorithm ``tree`` between nodes: as many rounds as the logarithm of the nodes, which are a power of two.

[Note: all-gather by recursive doubling]
In round r a node exchanges all that it has with the node whose number differs in bit r: 1, 2, 4, ... shards. No bit
depends on it. (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.)

[Note: reduce-scatter by recursive halving]
In the first of the rounds a node exchanges with the node n/2 away: it sends the sums for the other half of the nodes,
and adds what arrives to those for its own half; then with the node n/4 away, and so on (same paper). So the sum is a
tree, and a bracketing of its own: of partials P0, ..., P(n-1), those n/2 apart are added first, then those of these
sums that are n/4 apart, down to one, which is added to the shard. It does not depend on the rank, since a + b is b + a;
and it is not that of other transports. As many bytes travel as otherwise.

Pieces follow one another; none overlaps with the next. This is for many nodes and short messages.
"""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI

from mpishard.array.dtypes import Array
from mpishard.array.ops import Ops
from mpishard.comm.board import Board
from mpishard.comm.partials import Partials
from mpishard.comm.pump import Flight
from mpishard.comm.wires import WIRE, Peers

__all__ = ["Rounds", "TreeSums", "doubling"]


class Rounds(Flight):
    """A flight of rounds: each is begun when the one before has arrived.

    Args:
        begin: begins a round by its number, and returns its requests; None when nothing is left.
        ended: called before those who wait are told, unless it failed.
    """

    def __init__(
        self, name: str, begin: Callable[[int], list[MPI.Request] | None], ended: Callable[[], object] = tuple
    ) -> None:
        super().__init__(name, self._go_on)
        self._begin_round, self._ended, self._round = begin, ended, 0

    def _go_on(self) -> list[MPI.Request]:
        found = self._begin_round(self._round)
        if found is None:
            self._ended()
            self.end()
            return []
        self._round += 1
        return found

    def _may_begin(self) -> bool:
        return True

    def test(self) -> bool:
        """Let at most one round end; return whether one did."""
        try:
            if not (self._may_begin() and MPI.Request.Testall(self.requests)):
                return False
            requests = self._go_on()
            if not self.done.is_set():
                self.requests = requests
        except BaseException as error:
            self.end(error)
        return True


def doubling(name: str, peers: Peers, rows: Array, first: Callable[[], None], ended: Callable[[], None]) -> Rounds:
    """Return the all-gather of one start.

    Args:
        peers: the nodes, a power of two.
        rows: (nodes, count), which may lie apart; this node's is filled by ``first``, or before.
        first: called where MPI is called.
        ended: as for :class:`Rounds`.
    """
    kind, apart = WIRE[rows.itemsize], rows.strides[0] // rows.itemsize
    tags: list[int] = []

    def begin(round_: int) -> list[MPI.Request] | None:
        if not tags:
            tags.append(peers.tag())
            first()
        many = 1 << round_
        if many >= peers.size:
            return None
        mine = peers.rank // many * many
        other = peers.rank ^ many
        type_ = kind.Create_vector(many, rows.shape[1], apart).Commit()
        try:
            return [
                peers.comm.Irecv([_from(rows, mine ^ many), 1, type_], other, tags[0]),
                peers.comm.Isend([_from(rows, mine), 1, type_], other, tags[0]),
            ]
        finally:
            type_.Free()  # MPI keeps it for what is under way

    return Rounds(name, begin, ended)


def _from(rows: Array, row: int) -> MPI.buffer:
    """Return the memory from a row on, to the end of the last."""
    return MPI.buffer.fromaddress(rows[row:].ctypes.data, (rows.shape[0] - row - 1) * rows.strides[0] + rows[0].nbytes)


class TreeSums(Rounds):
    """The reduce-scatter of one start.

    Args:
        peers: the nodes, a power of two.
        ops: operations of the thread that calls MPI.
        board, number: the board of the node's ranks for that thread, and the start's number there.
    """

    def __init__(
        self, name: str, partials: Partials, peers: Peers, ops: Ops, board: Board, number: int, add: bool
    ) -> None:
        super().__init__(name, self._begin)
        self._partials, self._peers, self._ops, self._add = partials, peers, ops, add
        self._board, self._number, self._tag = board, number, -1
        self._started = False

    def _may_begin(self) -> bool:
        self._started = self._started or self._board.have_started(self._number)
        return self._started

    def _begin(self, round_: int) -> list[MPI.Request] | None:
        """Begin a round; round 0 begins nothing, and each piece has as many as the logarithm of the nodes."""
        if round_ == 0:
            self._tag = self._peers.tag()  # in the order of the starts
            return []
        depth, pieces = self._peers.size.bit_length() - 1, self._partials.cut.pieces
        piece, level = divmod(round_ - 1, depth)
        if level:
            self._add_up(piece, level - 1)
        elif piece:
            self._end_piece(piece - 1)
        if piece == pieces:
            return None
        if level == 0:
            self._partials.pack(self._ops, piece)
            if piece == pieces - 1:
                self._board.end(self._number)
        keep, give, other = self._halves(piece, level)
        into = self._partials.arriving(piece)[: keep.size]
        return [self._peers.receive(into, other, self._tag), self._peers.send(give, other, self._tag)]

    def _halves(self, piece: int, level: int) -> tuple[Array, Array, int]:
        """Return the rows that this node keeps, those that it gives away, and to whom."""
        far, node, width = self._peers.size >> (level + 1), self._partials.node, self._partials.width(piece)
        rows = self._partials.leaving(piece)
        keep, give = node // far * far, (node ^ far) // far * far
        return rows[keep * width : (keep + far) * width], rows[give * width : (give + far) * width], node ^ far

    def _add_up(self, piece: int, level: int) -> None:
        keep = self._halves(piece, level)[0]
        self._ops.ordered_sum([self._partials.arriving(piece)[: keep.size]], keep, True)

    def _end_piece(self, piece: int) -> None:
        last = self._peers.size.bit_length() - 2
        self._add_up(piece, last)
        self._partials.finish(self._ops, piece, [self._halves(piece, last)[0]], self._add)
