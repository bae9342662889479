"""Ranks as MPI processes with arrays in host memory.

[Note: who calls MPI]
The pump (:mod:`mpishard.comm.pump`) makes every MPI call after construction: in a thread of ours where MPI grants
MPI_THREAD_SERIALIZED; else ``start()`` posts and ``wait()`` tests.

[Note: buffer lifetimes]
The input is read, and ``out`` and the scratch are written, from ``start()`` to ``wait()``. A send is complete when its
buffer may be reused, so ``wait_inputs()`` waits for nothing more.

[Note: reduce-scatter]
It goes in pieces (:mod:`mpishard.comm.scratch`): each is an all-to-all of blocks, nonblocking, and two are under way.
Where MPI is called, a piece is rounded before it leaves and added up in rank order when it has arrived, and the next
but one leaves; so the pump's thread has operations of its own. Pieces travel on a communicator of their own
(:mod:`mpishard.comm.series`), duplicated when the first such reduce-scatter is bound. What is one piece travels among
the other calls and is added up in ``wait()``, on the caller's thread.

[Note: what MPI may see]
Whole numbers of the element's width: nothing is converted, and no sum is ever handed to MPI.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from mpishard.array.dtypes import Array, DType, overlap
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.ops import Ops
from mpishard.comm.base import Collective, Communicator, Node, Tally, Work
from mpishard.comm.native import Native, native_problem
from mpishard.comm.pairwise import Pairwise
from mpishard.comm.parts import blocks_of, pieces_of
from mpishard.comm.pieces import Pieces
from mpishard.comm.pump import Flight, Post, Pump
from mpishard.comm.ring import Ring
from mpishard.comm.scratch import CHUNK_BYTES, Scratch
from mpishard.comm.segments import ORDERED, check_algorithm
from mpishard.comm.series import Series
from mpishard.comm.tuning import Tuning, measured
from mpishard.comm.wires import WIRE, Peers
from mpishard.comm.wires import wire_view as _wire
from mpishard.errors import CommError, ConfigError

__all__ = ["CHUNK_BYTES", "WIRE", "MpiCommunicator", "library", "place"]

#: MPI promises tags up to 32767.
_TAGS = 2**15


class _MpiWork(Work):
    """A flight, and what the caller's thread does when it has landed."""

    def __init__(self, tally: Tally, pump: Pump, flight: Flight, then: Callable[[], object] = tuple) -> None:
        super().__init__(tally)
        self._pump, self._flight, self._then = pump, flight, then
        pump.submit(flight)

    def _complete(self) -> float:
        self._pump.finish(self._flight)
        self._then()
        return self._flight.arrived

    def _inputs_free(self) -> None:
        return None


class _MpiCollective(Collective):
    """A flight that can be repeated; ``then(add)`` makes ``out`` of what arrived."""

    def __init__(self, tally: Tally, nbytes: int, pump: Pump, name: str, post: Post, then: Callable[[bool], None]):
        super().__init__(tally, nbytes)
        self._pump, self._name, self._post, self._then = pump, name, post, then

    def _launch(self, add: bool) -> Work:
        return _MpiWork(self._tally, self._pump, Flight(self._name, self._post), lambda: self._then(add))


class _MpiReduce(Collective):
    """A flight that is made anew for each start."""

    def __init__(self, tally: Tally, nbytes: int, pump: Pump, make: Callable[[bool], Flight]) -> None:
        super().__init__(tally, nbytes)
        self._pump, self._make = pump, make

    def _launch(self, add: bool) -> Work:
        return _MpiWork(self._tally, self._pump, self._make(add))


class MpiCommunicator(Communicator):
    """The ranks of an mpi4py intracommunicator, which is duplicated: the program's own messages never meet ours.

    Ranks of one process that communicate with several groups should :meth:`split` one communicator: what is
    split shares its thread, so MPI_THREAD_SERIALIZED remains enough.

    Args:
        comm: the intracommunicator; collective over it.
        ops: operations on host arrays.
        chunk_bytes: above this many bytes from rank to rank, slices go from point to point, and a reduce-scatter in
            more pieces; equal on all ranks.
        threaded: whether a thread owns the MPI calls; None for wherever MPI's thread level allows it.
        why: why this transport was chosen, for :meth:`describe`.
        node: where this rank runs (:func:`place`), if ``comm`` was duplicated already and is given away.
        algorithm: how a reduce-scatter goes, one of :data:`mpishard.comm.segments.ALGORITHMS`; equal on all ranks.

    Raises:
        ConfigError: ``comm`` is an intercommunicator, a thread was asked for and MPI does not allow it, or there is no
            such algorithm.
    """

    transport = "mpi"
    algorithm: str = "alltoall"
    #: what ``auto`` chooses by; measured when the first reduce-scatter is bound, where it is None by then
    tuning: Tuning | None = None

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
        check_algorithm(algorithm)
        if comm.Is_inter():
            raise ConfigError("an intercommunicator was given; merge it first, an intracommunicator is needed")
        allowed = MPI.Query_thread() >= MPI.THREAD_SERIALIZED
        if threaded and not allowed:
            raise ConfigError(
                "a communication thread needs MPI_THREAD_SERIALIZED and MPI was started with less; "
                "set MPI4PY_RC_THREAD_LEVEL=serialized, or pass threaded=False"
            )
        own = comm.Dup() if node is None else comm
        self._set_up(own, node or place(own), ops, Pump(allowed if threaded is None else threaded), chunk_bytes)
        self._why, self.algorithm = why, algorithm
        self._adds = ops
        if self._pump.threaded and not self.on_device:
            self._adds = NumpyOps()  # their scratch is one thread's
            self.own_bytes = self._adds.own_bytes

    def describe(self) -> str:
        """Return the transport, the MPI library and its version, and why it was chosen."""
        name = library()
        why = self._why if self._why.startswith(name) else ", ".join(filter(None, [name, self._why]))
        how = "" if self.algorithm == "alltoall" else f", reduce-scatter {self.algorithm}"
        return f"{self.transport}, {why}{how}"

    def _set_up(self, comm: MPI.Intracomm, node: Node, ops: Ops, pump: Pump, chunk_bytes: int) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), node, ops)
        self._mpi, self._pump, self.chunk_bytes = comm, pump, chunk_bytes
        self._tag, self.closed, self._why = 0, False, ""
        if not pump.threaded and self.progress == "background":
            self.progress = "none"
        self._apart: MPI.Intracomm | None = None
        self._line: deque[Series] = deque()

    def _share(self, parent: Any) -> None:
        """Take over what a communicator split from ``parent`` shares with it."""
        self._why, self._adds = parent._why, parent._adds
        self.algorithm, self.tuning = parent.algorithm, parent.tuning
        self.shares_gathered = parent.shares_gathered

    @property
    def scratch_rule(self) -> Scratch:
        """What the algorithm takes on the host, room for the blocks of all ranks on a device."""
        return Scratch(self.transport, self.size, self.on_device, self.chunk_bytes, algorithm=self.algorithm)

    def _sum_problem(self, full: Array, out: Array, wire: DType) -> str:
        problem = super()._sum_problem(full, out, wire)
        if problem or self.size == 1 or self.algorithm in ORDERED:
            return problem
        if self.bracket > 1:
            return f"sums are by brackets of {self.bracket} ranks and algorithm {self.algorithm} has its own order"
        return native_problem(full.dtype, wire) if self.algorithm == "native" else ""

    def _bind_all_gather(self, shard: Array, out: Array, tally: Tally, nbytes: int) -> Collective:
        count = shard.size
        in_place = overlap(shard, out)
        own = out[self.rank * count : (self.rank + 1) * count]
        mine, everyone = _wire(shard), _wire(out)
        sliced = shard.nbytes > self.chunk_bytes
        post: Post
        if self.size == 1 or count == 0:
            post = list
        elif sliced:
            post = self._point_to_point([mine] * self.size, blocks_of(everyone, self.size))
        else:
            # MPICH refuses a send buffer that is part of the receive buffer, so it is named in place.
            kind = WIRE[out.itemsize]
            send: Any = MPI.IN_PLACE if in_place else [mine, count, kind]
            post = lambda: [self._mpi.Iallgather(send, [everyone, count, kind])]  # noqa: E731

        def then(add: bool) -> None:
            if not in_place and (sliced or self.size == 1):
                self.ops.copy(shard, own)

        return _MpiCollective(tally, nbytes, self._pump, f"all-gather number {self._bound - 1}", post, then)

    def _bind_reduce_scatter(
        self, full: Array, out: Array, scratch: Array | None, wire: DType, tally: Tally, nbytes: int
    ) -> Collective:
        name = f"reduce-scatter number {self._bound - 1}"
        if self.size > 1 and out.size and (algorithm := self._chosen(out.size * wire.itemsize)) != "alltoall":
            assert scratch is not None  # bound buffers were validated
            flight = self._bind_other(algorithm, full, out, scratch, wire)
            if algorithm == "ring":
                nbytes = out.nbytes * (self.size - 1)  # sums travel
            return _MpiReduce(tally, nbytes, self._pump, lambda add: flight(name, add))
        cut = self.scratch_rule.cut(full.size, full.dtype, wire)
        pieces = Pieces(self.rank, full, out, scratch, wire, cut, self.bracket)
        if self.size == 1 or cut.pieces == 1:

            def then(add: bool) -> None:
                for piece in range(cut.pieces):
                    pieces.add_up(self.ops, piece, add)

            return _MpiCollective(tally, nbytes, self._pump, name, self._whole(pieces), then)
        if self._apart is None:
            self._apart = self._pump.call("a communicator for pieces", self._mpi.Dup)
        send = self._piecewise(pieces)

        def make(add: bool) -> Series:
            def land(piece: int) -> None:
                pieces.add_up(self._adds, piece, add)

            return Series(name, cut.pieces, cut.slots, send, land, self._line)

        return _MpiReduce(tally, nbytes, self._pump, make)

    def _chosen(self, nbytes: int) -> str:
        """Return the algorithm for blocks of ``nbytes``; collective where it is still to be measured."""
        if self.algorithm != "auto":
            return self.algorithm
        if self.tuning is None:
            self.tuning = measured(self)
        return self.tuning.choose(nbytes * self.size)

    def _bind_other(
        self, algorithm: str, full: Array, out: Array, scratch: Array, wire: DType
    ) -> Callable[[str, bool], Flight]:
        """Return what makes the flight of a start, by name and whether to add."""
        if algorithm == "native":
            return Native(self._mpi, self._adds, full, out, scratch).flight
        cut = self.scratch_rule.segments(algorithm, full.size, full.dtype, wire)
        peers = Peers(self._mpi, self.rank, self.size, self._next_tag)
        if algorithm == "ring":
            return Ring(peers, self._adds, full, out, scratch, wire, cut).flight
        return Pairwise(peers, self._adds, full, out, scratch, wire, cut, self.bracket).flight

    def _next_tag(self) -> int:
        """Return a tag; called where MPI is called, equally often on every rank."""
        self._tag = (self._tag + 1) % _TAGS
        return self._tag

    def _whole(self, pieces: Pieces) -> Post:
        """Send all blocks at once."""
        width, kind = pieces.cut.width, WIRE[pieces.cut.itemsize]
        if self.size == 1 or width == 0:
            return list
        mine, theirs = _wire(pieces.leaving(0)), _wire(pieces.arriving(0))

        def post() -> list[MPI.Request]:
            pieces.pack(self._adds, 0)
            return [self._mpi.Ialltoall([mine, width, kind], [theirs, width, kind])]

        return post

    def _piecewise(self, pieces: Pieces) -> Callable[[int], list[MPI.Request]]:
        """Send a piece of each block."""
        cut, kind = pieces.cut, WIRE[pieces.cut.itemsize]
        ranks = np.arange(self.size, dtype=np.intc)
        apart, landing = pieces.apart * ranks, cut.width * ranks

        def send(piece: int) -> list[MPI.Request]:
            assert self._apart is not None
            pieces.pack(self._adds, piece)
            counts = np.full(self.size, pieces.width(piece), np.intc)
            counts[self.rank] = 0  # its own it need not send
            mine = [_wire(pieces.leaving(piece)), counts, pieces.first(piece) + apart, kind]
            return [self._apart.Ialltoallv(mine, [_wire(pieces.arriving(piece)), counts, landing, kind])]

        return send

    def _point_to_point(self, sends: Sequence[Array], receives: Sequence[Array]) -> Post:
        """Exchange block ``r`` with rank ``r`` in slices, nearest ranks first; the own block is left out.

        Slices between two ranks arrive in the order sent. Collectives in flight are kept apart by their tags;
        every rank posts in one order, so all count alike.
        """
        step, kind = max(1, self.chunk_bytes // sends[0].itemsize), WIRE[sends[0].itemsize]
        sources = [(self.rank - far) % self.size for far in range(1, self.size)]
        targets = [(self.rank + far) % self.size for far in range(1, self.size)]

        def post() -> list[MPI.Request]:
            tag = self._next_tag()
            return [
                self._mpi.Irecv([piece, piece.size, kind], rank, tag)
                for rank in sources
                for piece in pieces_of(receives[rank], step)
            ] + [
                self._mpi.Isend([piece, piece.size, kind], rank, tag)
                for rank in targets
                for piece in pieces_of(sends[rank], step)
            ]

        return post

    def _exchange(self, record: bytes) -> list[bytes]:
        count = len(record)
        records = bytearray(count * self.size)
        send, receive = [record, count, MPI.BYTE], [records, count, MPI.BYTE]
        self._pump.do("an exchange", lambda: [self._mpi.Iallgather(send, receive)])
        return [bytes(records[rank * count : (rank + 1) * count]) for rank in range(self.size)]

    def _broadcast(self, array: Array, root: int) -> None:
        pieces = pieces_of(_wire(array), max(1, self.chunk_bytes // array.itemsize))
        kind = WIRE[array.itemsize]
        self._pump.do("a broadcast", lambda: [self._mpi.Ibcast([piece, piece.size, kind], root) for piece in pieces])

    def _split(self, groups: Sequence[Sequence[int]], own: Sequence[int]) -> Communicator:
        color, key = min(own), list(own).index(self.rank)

        def make() -> tuple[MPI.Intracomm, Node]:
            comm = cast("MPI.Intracomm", self._mpi.Split(color, key))
            return comm, place(comm)

        comm, node = self._pump.call("a split", make)
        child = type(self).__new__(type(self))
        child._set_up(comm, node, self.ops, self._pump, self.chunk_bytes)
        child._share(self)
        self._pump.users += 1
        return child

    def abort(self, message: str, code: int = 1) -> None:
        """Print the message and end every rank of the job; MPI does it where MPI can be called, or the system."""
        if self.before_abort is not None:
            self.before_abort()
        print(message, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError, ValueError):  # it may be what has failed
            sys.stdout.flush()
        self._pump.attempt(lambda: self._mpi.Abort(code))
        os._exit(code)  # MPI is held by a call that does not return; the launcher ends the others

    def close(self) -> None:
        """Free the duplicated communicator, and end the thread with its last user. Collective; again is free.

        Raises:
            CommError: a collective is still in flight.
        """
        if not self.closed:
            if self._pump.users == 1 and self._pump.busy():
                raise CommError("the communicator was closed with collectives in flight; wait for all of them first")
            self.closed = True
            self._pump.call("close", self._free)
            self._pump.leave()

    def _free(self) -> None:
        if self._apart is not None:
            self._apart.Free()
        self._mpi.Free()


def place(comm: MPI.Intracomm) -> Node:
    """Find the rank's place; nodes are numbered by their lowest rank. Blocking and collective."""
    comm.Set_errhandler(MPI.ERRORS_RETURN)  # so that a failure reaches who waits, with its name
    local = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.Get_rank())
    lowest = np.array([comm.Get_rank()], np.int64)
    local.Bcast([lowest, 1, MPI.INT64_T], 0)
    leaders = np.empty(comm.Get_size(), np.int64)
    comm.Allgather([lowest, 1, MPI.INT64_T], [leaders, 1, MPI.INT64_T])
    nodes = sorted(set(leaders.tolist()))
    found = Node(local.Get_rank(), local.Get_size(), nodes.index(int(lowest[0])), len(nodes))
    local.Free()
    return found


def library() -> str:
    """Return the MPI library and its version: "MPICH 5.0.2"."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"
