"""Ranks on several nodes: through memory inside a node, over MPI between nodes, so that a byte leaves a node once.

[Note: two levels]
Ranks are numbered node by node, equally many on each. A rank works with two groups: with the ranks of its node, whose
arrays it reads where they lie (as :mod:`mpishard.comm.node` does), and over MPI with the ranks of its own local index
on the other nodes. So all ranks of a node use the network at once, each with peers of its own.

- All-gather: shards travel between ranks of one local index, straight to their places in ``out``; the other local
  indices' blocks are copied from where they arrived at the ranks of the node. Of N ranks, g a node, (N - g)/N of the
  whole enters a node: each foreign byte once.
- Reduce-scatter: the ranks of a node are summed first, and the sums travel, in fp32 (fp64 for fp64), and are added in
  the order of the nodes (:mod:`mpishard.comm.partials`): 1/g of the elements that would travel one by one. So the
  bracket is g, and no other.

Of one node this is ``node``. With one rank a node it is ``mpi``, and contributions travel in their own type.

[Note: algorithms between nodes]
``alltoall``: nonblocking collectives of the MPI library that move and do not add. ``tree``, when asked for, on 2, 4,
8, ... nodes: both collectives in as many rounds as the logarithm of the nodes, and the sums in an order of their own
(:mod:`mpishard.comm.doubling`).

[Note: who works]
The pump's thread, where there is one: it adds up what has arrived and sends on while the program computes. What is
copied inside a node is copied in ``wait()``, by the thread that waits.

[Note: buffer lifetimes]
Peers of the node read the input of a reduce-scatter until ``wait_inputs()`` returns, and ``out`` of an all-gather until
``released()`` or ``wait_inputs()`` does. Where one of them is not from :meth:`HierarchicalCommunicator.allocate` they
read a shared copy of it, or of what has arrived.

[Note: what is split off]
A group inside one node is a ``node`` communicator; one with as many ranks, two or more, on each of several nodes, in
the order of the nodes, is ``hierarchical``; any other is ``mpi``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from mpishard.array.dtypes import Array, DType, overlap
from mpishard.array.ops import Ops
from mpishard.comm.base import Collective, Communicator, Node, Tally, Work
from mpishard.comm.board import Board
from mpishard.comm.doubling import TreeSums, doubling
from mpishard.comm.mpi import MpiCommunicator
from mpishard.comm.node import NodeCommunicator
from mpishard.comm.node_sums import NodeSums
from mpishard.comm.nodes import ranks_of_a_node
from mpishard.comm.partials import Partials
from mpishard.comm.parts import pieces_of
from mpishard.comm.pump import Flight, Post, Pump
from mpishard.comm.scratch import CHUNK_BYTES, Scratch
from mpishard.comm.series import Series
from mpishard.comm.shared import SharedMemory
from mpishard.comm.together import together
from mpishard.comm.wires import WIRE, Peers, wire_view
from mpishard.errors import ConfigError

__all__ = ["ACROSS", "HierarchicalCommunicator"]

#: algorithms between nodes; ``auto`` is the first of the others
ACROSS = ("auto", "alltoall", "tree")
_INT_MAX = 2**31 - 1


class _Shared(Work):
    """A flight, after which peers of the node may still read; ``then`` reads what they have."""

    def __init__(self, tally: Tally, pump: Pump, flight: Flight, board: Board, number: int) -> None:
        super().__init__(tally)
        self._pump, self._flight, self._board, self._number = pump, flight, board, number
        pump.submit(flight)

    def _complete(self) -> float | None:
        self._pump.finish(self._flight)
        return self._flight.arrived

    def _inputs_free(self) -> None:
        self._board.ended(self._number)


class _Gathered(_Shared):
    def __init__(self, take: Callable[[int], None], *rest: Any) -> None:
        super().__init__(*rest)
        self._take = take

    def _complete(self) -> None:
        super()._complete()
        self._take(self._number)
        self._board.end(self._number)

    def released(self) -> None:
        """Block until no rank of the node reads ``out``; implies :meth:`wait`."""
        self.wait_inputs()


class _Arriving(Flight):
    """The all-gather across nodes of one start, which tells the peers of the node when it has landed."""

    def __init__(self, name: str, post: Post, board: Board, number: int) -> None:
        super().__init__(name, post)
        self._board, self._number = board, number

    def end(self, error: BaseException | None = None) -> None:
        """Let go of the buffers and wake who waits."""
        if error is None:
            self._board.arrive(self._number)
        super().end(error)


class _TwoLevels(Collective):
    """``begin(number, add)`` makes the work of a start that has this number on the board, after ``ready()``."""

    def __init__(
        self,
        tally: Tally,
        nbytes: int,
        board: Board,
        what: int,
        ready: Callable[[], None],
        begin: Callable[[int, bool], Work],
    ) -> None:
        super().__init__(tally, nbytes)
        self._board, self._what, self._ready, self._begin = board, what, ready, begin

    def _launch(self, add: bool) -> Work:
        if self._work is not None:
            self._work.released()  # peers may read what is about to be written
        self._ready()
        return self._begin(self._board.begin(self._what), add)


class HierarchicalCommunicator(NodeCommunicator):
    """The ranks of an mpi4py intracommunicator on several nodes; see :class:`MpiCommunicator`.

    Args:
        comm: the intracommunicator; collective over it.
        ops: operations on host arrays.
        chunk_bytes, threaded, why, node: as for :class:`MpiCommunicator`.
        algorithm: one of :data:`ACROSS`; equal on all ranks.

    Raises:
        ConfigError: on all ranks, when nodes have different numbers of ranks, ranks are not numbered node by node,
            those of a node cannot map each other's memory, or there is no such algorithm for so many nodes.
    """

    transport = "hierarchical"
    progress = "background"
    children = ("node", "mpi")

    def __init__(
        self,
        comm: MPI.Intracomm,
        ops: Ops,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        threaded: bool | None = None,
        why: str = "",
        node: Node | None = None,
        algorithm: str = "alltoall",
    ) -> None:
        if algorithm not in ACROSS:
            raise ConfigError(
                f"algorithm {algorithm!r} is not one of transport hierarchical; choose one of {', '.join(ACROSS)}"
            )
        MpiCommunicator.__init__(self, comm, ops, chunk_bytes=chunk_bytes, threaded=threaded, why=why, node=node)
        try:
            self._ranks = ranks_of_a_node(self, "transport is hierarchical")
            nodes = self.size // self._ranks
            if algorithm == "tree" and nodes & (nodes - 1):
                raise ConfigError(f"algorithm tree is for 2, 4, 8, ... nodes and there are {nodes}; use alltoall")
            self.algorithm = "tree" if algorithm == "tree" else "alltoall"
            self._open(SharedMemory())
        except Exception:
            self.close()
            raise

    def _open(self, memory: SharedMemory) -> None:
        adds, own = self._adds, self.own_bytes
        super()._open(memory)
        self._adds = adds
        self.own_bytes += own
        self._index, self._local = divmod(self.rank, self._ranks)
        self._nodes = self.size // self._ranks
        self._beside = self._board.beside()
        self._sent = {"all_gather": 0, "reduce_scatter": 0}
        self.bracket = self._ranks
        if self._two_levels:
            self._pump.call("communicators between nodes", self._connect)

    def _set_up(self, comm: MPI.Intracomm, node: Node, ops: Ops, pump: Pump, chunk_bytes: int) -> None:
        super()._set_up(comm, node, ops, pump, chunk_bytes)
        self._gathers: MPI.Intracomm | None = None
        self._sums: MPI.Intracomm | None = None

    def _connect(self) -> None:
        """Make two communicators of the ranks of this local index: pieces of sums are posted as others arrive."""
        self._gathers = cast("MPI.Intracomm", self._mpi.Split(self._local, self._index))
        self._gathers.Set_errhandler(MPI.ERRORS_RETURN)
        self._sums = self._gathers.Dup()

    @property
    def _two_levels(self) -> bool:
        return self._nodes > 1 and (self._ranks > 1 or self.algorithm == "tree")

    @property
    def _peers(self) -> range:
        first = self.rank // self._ranks * self._ranks
        return range(first, first + self._ranks)

    @property
    def brackets(self) -> tuple[int, ...]:
        """The ranks of a node, and nothing else."""
        return (self._ranks,)

    @property
    def bytes_across(self) -> dict[str, int]:
        """Bytes that this rank has sent to other nodes so far, by kind of collective; part of what tallies count."""
        if self._ranks == 1 and not self._two_levels:
            return {kind: self.tallies[kind].bytes for kind in self._sent}
        return dict(self._sent)

    @property
    def scratch_rule(self) -> Scratch:
        """Two slots of rows of sums, and a few rows in which contributions are rounded."""
        how, ranks = self.algorithm, self._ranks
        return Scratch(self.transport, self.size, chunk_bytes=self.chunk_bytes, algorithm=how, local_size=ranks)

    def _sum_problem(self, full: Array, out: Array, wire: DType) -> str:
        return Communicator._sum_problem(self, full, out, wire)  # algorithms of plain MPI are none of these

    def describe(self) -> str:
        """Return the transport, the MPI library and its version, the ranks and nodes, and why it was chosen."""
        return f"{super().describe()}, {_counted(self._nodes, 'node')} of {_counted(self._ranks, 'rank')}"

    def _bind_all_gather(self, shard: Array, out: Array, tally: Tally, nbytes: int) -> Collective:
        if self._nodes == 1:
            return super()._bind_all_gather(shard, out, tally, nbytes)
        if not self._two_levels or not shard.size:
            return MpiCommunicator._bind_all_gather(self, shard, out, tally, nbytes)
        name, count, nodes, local = f"all-gather number {self._bound - 1}", shard.size, self._nodes, self._local
        places = out.reshape(nodes, self._ranks, count)
        # Where one rank's out cannot be read by its peers, all let shards arrive in shared memory beside it.
        flags = self.exchange(bytes([self._memory.place(out) is not None]), "whether all-gathers arrive in place")
        in_place = all(flag == b"\1" for flag in flags)
        read = out if in_place else together(self, lambda: self._taken(nodes * count, out.dtype))
        theirs = [one.reshape(nodes, -1, count) for one in self._everyones(read)]
        theirs = [one[:, peer if in_place else 0] for peer, one in enumerate(theirs)]
        flight = self._across(name, shard, theirs[local], overlap(shard, out) and in_place)

        def take(number: int) -> None:
            if not in_place:
                self.ops.copy(theirs[local], places[:, local])
            for far in range(1, self._ranks):  # the nearest first, so that not all read from one
                peer = (local + far) % self._ranks
                self._board.arrived(peer, number)
                self.ops.copy(theirs[peer], places[:, peer])

        def begin(number: int, add: bool) -> Work:
            self._sent["all_gather"] += shard.nbytes * (nodes - 1)
            return _Gathered(take, tally, self._pump, flight(number), self._board, number)

        self._names[self._bound] = name
        return _TwoLevels(tally, nbytes, self._board, self._bound, lambda: None, begin)

    def _across(self, name: str, shard: Array, rows: Array, in_place: bool) -> Callable[[int], Flight]:
        """Return what gathers the shards of this local index into ``rows`` (nodes, count), which may lie apart.

        Args:
            in_place: this node's row is the shard.
        """
        board = self._beside
        post = self._whole_rows(shard, rows, in_place)
        if post is not None and self.algorithm == "tree":
            assert self._gathers is not None
            peers = Peers(self._gathers, self._index, self._nodes, self._next_tag)

            def own() -> None:
                if not in_place:
                    self._adds.copy(shard, rows[self._index])

            return lambda number: doubling(name, peers, rows, own, lambda: board.arrive(number))
        chosen = post or self._slices(shard, rows, in_place)
        return lambda number: _Arriving(name, chosen, board, number)

    def _whole_rows(self, shard: Array, rows: Array, in_place: bool) -> Post | None:
        """Gather by one call; None where that cannot be."""
        assert self._gathers is not None
        comm, count, kind = self._gathers, shard.size, WIRE[shard.itemsize]
        places = np.arange(self._nodes) * (rows.strides[0] // rows.itemsize)
        if shard.nbytes > self.chunk_bytes or places[-1] + count > _INT_MAX:
            return None
        begin = rows[0]
        whole = wire_view(np.lib.stride_tricks.as_strided(begin, (int(places[-1]) + count,), begin.strides))
        send: Any = MPI.IN_PLACE if in_place else [wire_view(shard), count, kind]
        counts, displacements = np.full(self._nodes, count, np.intc), places.astype(np.intc)
        return lambda: [comm.Iallgatherv(send, [whole, counts, displacements, kind])]

    def _slices(self, shard: Array, rows: Array, in_place: bool) -> Post:
        """Gather from point to point, nearest nodes first, in slices."""
        assert self._gathers is not None
        peers = Peers(self._gathers, self._index, self._nodes, self._next_tag)
        step = max(1, self.chunk_bytes // shard.itemsize)
        others = range(1, self._nodes)

        def post() -> list[MPI.Request]:
            tag = peers.tag()
            if not in_place:
                self._adds.copy(shard, rows[self._index])
            sources = [(self._index - far) % self._nodes for far in others]
            targets = [(self._index + far) % self._nodes for far in others]
            receives = [peers.receive(part, node, tag) for node in sources for part in pieces_of(rows[node], step)]
            return receives + [peers.send(part, node, tag) for node in targets for part in pieces_of(shard, step)]

        return post

    def _bind_reduce_scatter(
        self, full: Array, out: Array, scratch: Array | None, wire: DType, tally: Tally, nbytes: int
    ) -> Collective:
        if self._nodes == 1:
            return super()._bind_reduce_scatter(full, out, scratch, wire, tally, nbytes)
        if not self._two_levels or not out.size:
            return MpiCommunicator._bind_reduce_scatter(self, full, out, scratch, wire, tally, nbytes)
        assert scratch is not None and self._sums is not None  # bound buffers were validated
        name, comm = f"reduce-scatter number {self._bound - 1}", self._sums
        cut = self.scratch_rule.cut(full.size, full.dtype, wire)
        fulls, ready = self._inputs(full)
        fulls[self._local] = full
        partials = Partials(self._index, self._local, fulls, out, scratch, wire, cut)
        line: deque[Series] = self._line
        tree = self.algorithm == "tree"
        peers = Peers(comm, self._index, self._nodes, self._next_tag) if tree else None

        def begin(number: int, add: bool) -> Work:
            self._sent["reduce_scatter"] += out.nbytes * (self._nodes - 1)
            flight: Flight
            if peers is not None:
                flight = TreeSums(name, partials, peers, self._adds, self._beside, number, add)
            else:
                flight = NodeSums(name, partials, comm, self._adds, self._beside, number, line, add)
            return _Shared(tally, self._pump, flight, self._board, number)

        self._names[self._bound] = name
        return _TwoLevels(tally, nbytes, self._board, self._bound, ready, begin)

    def _split(self, groups: Sequence[Sequence[int]], own: Sequence[int]) -> Communicator:
        nodes = [rank // self._ranks for rank in own]
        each = nodes.count(nodes[0])
        order = list(dict.fromkeys(nodes))
        mine = self._index
        place = own.index(self.rank)
        node = Node(nodes[:place].count(mine), nodes.count(mine), order.index(mine), len(order))
        kind: type[MpiCommunicator] = MpiCommunicator
        if len(order) == 1:
            kind = NodeCommunicator
        elif each > 1 and nodes == [one for one in order for _ in range(each)]:
            kind = HierarchicalCommunicator

        def make() -> MPI.Intracomm:
            comm = cast("MPI.Intracomm", self._mpi.Split(min(own), place))
            comm.Set_errhandler(MPI.ERRORS_RETURN)
            return comm

        child = kind.__new__(kind)
        child._set_up(self._pump.call("a split", make), node, self.ops, self._pump, self.chunk_bytes)
        child._share(self)
        child._why = f"a group of {_counted(len(own), 'rank')} on {_counted(len(order), 'node')}"
        self._pump.users += 1
        if isinstance(child, HierarchicalCommunicator):
            child._ranks = each
        if not isinstance(child, HierarchicalCommunicator) or len(order) & (len(order) - 1):
            child.algorithm = "alltoall"  # a tree has a power of two
        if isinstance(child, NodeCommunicator):
            child._open(self._memory)
        return child

    def _free(self) -> None:
        for comm in (self._gathers, self._sums):
            if comm is not None:
                comm.Free()
        super()._free()


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"
