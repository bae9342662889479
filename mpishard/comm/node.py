"""Ranks of one host that read each other's arrays where they lie.

[Note: what is copied]
Arrays come from :meth:`NodeCommunicator.allocate`, in memory that peers map (:mod:`mpishard.comm.shared`). An
all-gather copies each peer's shard once. A reduce-scatter copies nothing: it adds up the peers' blocks as they lie,
each rounded on the way to the narrower type where one travels. An input from elsewhere is copied into shared memory at
the start. Where ranks share one gathered copy, each writes its own part and nothing else is copied
(:mod:`mpishard.comm.pool`).

[Note: who works]
Nothing moves by itself between ranks of one host: copying is work of a core. So it is done in ``wait()``, by the thread
that waits, and there is no overlap. ``start()`` never blocks: it says on the board (:mod:`mpishard.comm.board`) that
the input is ready.

[Note: buffer lifetimes]
Peers read the input, or its copy, until ``wait_inputs()`` returns. ``out`` and the scratch are this rank's alone and
are touched in ``wait()`` only.

MPI carries what is no array: exchanges and broadcasts. In between no MPI call is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from mpi4py import MPI

from mpishard.array.dtypes import DTYPES, Array, DType, accumulator, address, overlap
from mpishard.array.ops import Ops
from mpishard.comm.base import Collective, Communicator, Node, Tally, Work
from mpishard.comm.board import BOARD_WORDS, Board
from mpishard.comm.mpi import MpiCommunicator
from mpishard.comm.pool import Pool, PooledGather
from mpishard.comm.record import kernel_identity
from mpishard.comm.scratch import Scratch
from mpishard.comm.shared import PLACE_BYTES, Place, SharedMemory
from mpishard.comm.together import together
from mpishard.errors import ConfigError

__all__ = ["NodeCommunicator"]

_BYTES = DTYPES["uint8"]

#: makes ``out`` of the peers' inputs; told how to wait for a rank's, and whether to add
_Take = Callable[[Callable[[int], None], bool], None]


class _NodeWork(Work):
    def __init__(self, tally: Tally, board: Board, what: int, take: _Take, add: bool) -> None:
        super().__init__(tally)
        self._board, self._take, self._add = board, take, add
        self._number = board.begin(what)

    def _complete(self) -> None:
        self._take(lambda rank: self._board.started(rank, self._number), self._add)
        self._board.end(self._number)

    def _inputs_free(self) -> None:
        self._board.ended(self._number)


class _NodeCollective(Collective):
    """Inputs that peers map, and what each rank makes of them."""

    def __init__(
        self, tally: Tally, nbytes: int, board: Board, what: int, begin: Callable[[], None], take: _Take
    ) -> None:
        super().__init__(tally, nbytes)
        self._board, self._what, self._begin, self._take = board, what, begin, take

    def _launch(self, add: bool) -> Work:
        self._begin()
        return _NodeWork(self._tally, self._board, self._what, self._take, add)


class NodeCommunicator(MpiCommunicator):
    """The ranks of an mpi4py intracommunicator that are all on one host; see :class:`MpiCommunicator`.

    Args:
        comm: the intracommunicator; collective over it.
        ops: operations on host arrays.
        threaded, why, node: as for :class:`MpiCommunicator`.

    Raises:
        ConfigError: on all ranks, when they are on several hosts, or cannot map each other's memory.
    """

    transport = "node"
    progress = "copies"

    def __init__(
        self,
        comm: MPI.Intracomm,
        ops: Ops,
        *,
        threaded: bool | None = None,
        why: str = "",
        node: Node | None = None,
    ) -> None:
        super().__init__(comm, ops, threaded=threaded, why=why, node=node)
        try:
            self._open(SharedMemory())
        except Exception:
            self.close()
            raise

    def _open(self, memory: SharedMemory) -> None:
        self._adds, self.own_bytes = self.ops, 0
        kernels = self.exchange(kernel_identity(), "the kernels of the ranks")
        first = self._peers[0]
        together(self, lambda: self._one_kernel([kernels[rank] for rank in self._peers]))
        self._memory, self._names = memory, dict[int, str]()
        words = together(self, lambda: self._taken(BOARD_WORDS, DTYPES["int64"]))
        meanwhile = None if self._pump.threaded else self._pump.look
        self._board = Board(
            self.rank - first, self._everyones(words), self._names, first=first, meanwhile=meanwhile
        )

    @property
    def _peers(self) -> range:
        """The ranks that share memory with this one, itself among them."""
        return range(self.size)

    def _one_kernel(self, kernels: Sequence[bytes]) -> None:
        other = next((rank for rank, kernel in zip(self._peers, kernels, strict=True) if kernel != kernels[0]), None)
        if other is not None:
            raise ConfigError(
                f"transport {self.transport!r} shares memory inside a host, and rank {other} and rank "
                f"{self._peers[0]} do not see each other's processes; start the ranks of a host in one container, or "
                "use transport mpi"
            )

    def _taken(self, count: int, dtype: DType) -> Array:
        try:
            return self.allocate(count, dtype)
        except MemoryError as error:
            raise ConfigError(f"on rank {self.rank}, {error}; use transport mpi, which shares none") from None

    def _common(self, nbytes: int) -> Array:
        try:
            return self._memory.common(nbytes)
        except MemoryError as error:
            raise ConfigError(f"{error}; use more ranks, a smaller batch, or transport mpi") from None

    def allocate(self, count: int, dtype: DType) -> Array:
        """Return a 1-D array in memory that peers read in place."""
        return self._memory.allocate(count, dtype)

    def pool(self, nbytes: int) -> Pool:
        """Return memory of the ranks of this host: rank 0's, of which each takes a part of the pages."""
        first = self._peers[0]
        if self.sharers != len(self._peers):
            return super().pool(nbytes)
        mine = together(self, lambda: self._common(nbytes) if self.rank == first else None)
        place = self._memory.place(mine) if mine is not None else None
        records = self.exchange(place.pack() if place else bytes(PLACE_BYTES), "the place of a pool")

        def array() -> Array:
            return mine if mine is not None else self._memory.at(Place.unpack(records[first]), nbytes, _BYTES)

        shared = together(self, array)
        self._memory.take(shared, self.rank - first, len(self._peers))
        return Pool(shared, partial(self._bind_pooled, shared))

    def _bind_pooled(self, pool: Array, shard: Array, out: Array) -> Collective:
        problem = self._problem("shard", shard) or self._problem("out", out)
        if not problem and shard.dtype not in (out.dtype, accumulator(out.dtype)):
            problem = f"shard is {shard.dtype} and out is {out.dtype}; {accumulator(out.dtype)} can be rounded to it"
        if not problem and out.size != shard.size * self.size:
            need = shard.size * self.size
            problem = f"out holds {out.size} elements, {self.size} ranks with {shard.size} each need {need}"
        if not problem and overlap(shard, pool):
            problem = "shard lies in the pool, where peers read"
        if not problem and out.size and not overlap(out, pool):
            problem = "out is no part of the pool"
        at = address(out) - address(pool)
        self._agree_binding(f"all-gather to {at} of a pool", out, problem)
        tally, part = self._tallies["all_gather"], out[self.rank * shard.size : (self.rank + 1) * shard.size]
        nbytes = part.nbytes * (self.size - 1)
        self._names[self._bound] = f"all-gather number {self._bound - 1}"
        return PooledGather(tally, nbytes, self._board, self._bound, self.ops, shard, part)

    @property
    def scratch_rule(self) -> Scratch:
        """Room for a piece of all blocks in the type that travels, where that is not their own; else nothing."""
        return Scratch(self.transport, self.size)

    def _everyones(self, array: Array) -> list[Array]:
        """Return this array of every peer; each is of one length, and from :meth:`allocate`. Collective."""
        mine = self._memory.place(array)
        assert mine is not None
        places = [Place.unpack(record) for record in self.exchange(mine.pack(), "the places of buffers")]

        def arrays() -> list[Array]:
            return [
                array if rank == self.rank else self._memory.at(places[rank], array.size, array.dtype)
                for rank in self._peers
            ]

        return together(self, arrays)

    def _inputs(self, array: Array) -> tuple[list[Array], Callable[[], None]]:
        """Return every peer's input, as it is read, and what makes this rank's ready at a start."""
        here = self._memory.place(array) is not None
        read = together(self, lambda: array if here else self._taken(array.size, array.dtype))
        return self._everyones(read), (lambda: None) if here else (lambda: self.ops.copy(array, read))

    def _bind_all_gather(self, shard: Array, out: Array, tally: Tally, nbytes: int) -> Collective:
        count, in_place = shard.size, overlap(shard, out)
        shards, begin = self._inputs(shard)
        shards[self.rank] = shard
        places = [out[rank * count : (rank + 1) * count] for rank in range(self.size)]
        # The nearest ranks first, so that not all read from one.
        order = [(self.rank + far) % self.size for far in range(1, self.size)]

        def take(started: Callable[[int], None], add: bool) -> None:
            if not in_place:
                self.ops.copy(shard, places[self.rank])
            for rank in order:
                started(rank)
                self.ops.copy(shards[rank], places[rank])

        return self._collective("all-gather", tally, nbytes, begin, take)

    def _bind_reduce_scatter(
        self, full: Array, out: Array, scratch: Array | None, wire: DType, tally: Tally, nbytes: int
    ) -> Collective:
        fulls, begin = self._inputs(full)
        fulls[self.rank] = full
        count, bracket = out.size, self.bracket
        blocks = [each[self.rank * count : (self.rank + 1) * count] for each in fulls]
        cut = self.scratch_rule.cut(full.size, full.dtype, wire)
        rows: list[Array] = []
        if cut.slots:
            assert scratch is not None  # bound buffers were validated
            area = scratch[: self.size * cut.width * cut.itemsize].view(wire)
            rows = list(area.reshape(self.size, cut.width))

        def take(started: Callable[[int], None], add: bool) -> None:
            for rank in range(self.size):
                started(rank)
            if not rows:
                self.ops.ordered_sum(blocks, out, add, bracket)
                return
            for first in range(0, count, cut.width):
                width = min(cut.width, count - first)
                parts = [row[:width] for row in rows]
                for block, part in zip(blocks, parts, strict=True):
                    self.ops.copy(block[first : first + width], part)
                self.ops.ordered_sum(parts, out[first : first + width], add, bracket)

        return self._collective("reduce-scatter", tally, nbytes, begin, take)

    def _collective(
        self, name: str, tally: Tally, nbytes: int, begin: Callable[[], None], take: _Take
    ) -> _NodeCollective:
        self._names[self._bound] = f"{name} number {self._bound - 1}"
        return _NodeCollective(tally, nbytes, self._board, self._bound, begin, take)

    def _split(self, groups: Sequence[Sequence[int]], own: Sequence[int]) -> Communicator:
        child = cast("NodeCommunicator", super()._split(groups, own))
        child._open(self._memory)
        return child
