"""Ranks as MPI processes with arrays on a GPU, which MPI reads and writes itself: a GPU-aware MPI.

[Note: what MPI is asked for]
Blocking calls alone: all-gather, all-to-all and broadcast, and messages from point to point in slices where the blocks
are large. They are made by the pump's thread, so the program goes on meanwhile. Nonblocking and persistent
collectives on a device's memory are not promised by Open MPI, and reductions it makes on the host. In place is the
all-gather only, which both families take.

[Note: order]
MPI knows no streams. So the thread waits for the event *produced* (:mod:`mpishard.comm.lane`), calls MPI, and when MPI
returns, puts the ordered sum on the lane's stream, beside what the program computes.

Started collectives are done one after another, in the order of the starts. Groups that share ranks must be started in
one order on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpishard.array.dtypes import Array, DType, address
from mpishard.array.ops import Ops
from mpishard.comm.base import Collective, Node, Tally
from mpishard.comm.lane import DeviceCollective, Lane, Marks, taken
from mpishard.comm.mpi import CHUNK_BYTES, WIRE, MpiCommunicator
from mpishard.comm.parts import blocks_of, pieces_of
from mpishard.comm.pump import Flight

__all__ = ["DeviceMpiCommunicator", "Wire"]


class Wire:
    """Device memory as MPI sees it: ``size`` whole numbers of ``itemsize`` bytes from an address on."""

    __slots__ = ("__cuda_array_interface__", "_address", "itemsize", "nbytes", "size")

    def __init__(self, start: int, size: int, itemsize: int) -> None:
        self._address, self.size, self.itemsize, self.nbytes = start, size, itemsize, size * itemsize
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": f"|u{itemsize}" if itemsize == 1 else f"<u{itemsize}",
            "data": (start, False),
            "version": 3,
        }

    def __getitem__(self, part: slice) -> Wire:
        start, stop, _ = part.indices(self.size)
        return Wire(self._address + start * self.itemsize, stop - start, self.itemsize)


def _wire(array: Array) -> Any:
    return Wire(address(array), array.size, array.itemsize)


class DeviceMpiCommunicator(MpiCommunicator):
    """The ranks of an mpi4py intracommunicator whose MPI is GPU-aware; see :class:`MpiCommunicator`.

    Args:
        ops: operations on a device's arrays; the device becomes the calling thread's.
    """

    transport = "mpi"

    def __init__(
        self,
        comm: MPI.Intracomm,
        ops: Ops,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        threaded: bool | None = None,
        why: str = "",
        node: Node | None = None,
    ) -> None:
        self._started: list[DeviceCollective] = []
        super().__init__(comm, ops, chunk_bytes=chunk_bytes, threaded=threaded, why=why, node=node)
        self._open(taken(self, lambda: Lane(ops), "a stream and scratch for communication"))
        self.own_bytes = self._lane.ops.own_bytes
        self._pump.call("the choice of a device", self._lane.enter)

    def _open(self, lane: Lane) -> None:
        self._lane, self._once = lane, lane.marks()
        self._started = []

    def _share(self, parent: Any) -> None:
        super()._share(parent)
        self._open(parent._lane)

    def _settle(self) -> None:
        for collective in self._started:
            collective.settle()

    def _collective(
        self, tally: Tally, nbytes: int, name: str, call: Callable[[Marks, bool], None]
    ) -> DeviceCollective:
        """Return the collective whose ``call(marks, add)`` the pump makes; it orders itself behind the start."""

        def begin(marks: Marks, add: bool) -> Callable[[], None]:
            def post() -> list[MPI.Request]:
                call(marks, add)
                marks.finish()
                return []

            flight = Flight(name, post, blocking=True)
            self._pump.submit(flight)
            return lambda: self._pump.finish(flight)

        made = DeviceCollective(tally, nbytes, self._lane, begin)
        self._started.append(made)
        return made

    def _bind_all_gather(self, shard: Array, out: Array, tally: Tally, nbytes: int) -> Collective:
        count = shard.size
        own = out[self.rank * count : (self.rank + 1) * count]
        in_place = address(own) == address(shard)
        mine, everyone, kind = _wire(shard), _wire(out), WIRE[out.itemsize]
        alone, sliced = self.size == 1 or count == 0, shard.nbytes > self.chunk_bytes
        post = self._point_to_point([mine] * self.size, blocks_of(everyone, self.size))
        send: Any = MPI.IN_PLACE if in_place else [mine, count, kind]

        def call(marks: Marks, add: bool) -> None:
            marks.ready()
            if not in_place and (alone or sliced):
                self._lane.ops.copy(shard, own)
            if sliced and not alone:
                MPI.Request.Waitall(post())
            elif not alone:
                self._mpi.Allgather(send, [everyone, count, kind])

        return self._collective(tally, nbytes, f"all-gather number {self._bound - 1}", call)

    def _bind_reduce_scatter(
        self, full: Array, out: Array, scratch: Array | None, wire: DType, tally: Tally, nbytes: int
    ) -> Collective:
        count = out.size
        alone, sliced = self.size == 1 or count == 0, count * full.itemsize > self.chunk_bytes
        blocks, bracket = [full], 1
        if not alone:
            bracket = self.bracket
            assert scratch is not None  # bound buffers were validated
            arrived = scratch[: full.nbytes].view(full.dtype)
            blocks = blocks_of(arrived, self.size)
            blocks[self.rank] = full[self.rank * count : (self.rank + 1) * count]
            mine, theirs, kind = _wire(full), _wire(arrived), WIRE[full.itemsize]
            post = self._point_to_point(blocks_of(mine, self.size), blocks_of(theirs, self.size))

        def call(marks: Marks, add: bool) -> None:
            marks.ready()
            if sliced and not alone:
                MPI.Request.Waitall(post())
            elif not alone:
                self._mpi.Alltoall([mine, count, kind], [theirs, count, kind])
            self._lane.ops.ordered_sum(blocks, out, add, bracket)

        return self._collective(tally, nbytes, f"reduce-scatter number {self._bound - 1}", call)

    def _broadcast(self, array: Array, root: int) -> None:
        pieces = pieces_of(_wire(array), max(1, self.chunk_bytes // array.itemsize))
        kind = WIRE[array.itemsize]

        def call(marks: Marks) -> None:
            marks.ready()
            for piece in pieces:
                self._mpi.Bcast([piece, piece.size, kind], root)

        self._at_once("a broadcast", call)

    def _at_once(self, name: str, call: Callable[[Marks], None]) -> None:
        """Let the pump make a call between what was computed before and what is computed next."""
        marks = self._once

        def post() -> list[MPI.Request]:
            call(marks)
            marks.finish()
            return []

        marks.start()
        self._pump.do(name, post, blocking=True)
        marks.join()

    def close(self) -> None:
        """Wait for what is on the lane's stream, so that buffers may go; then as on the host."""
        if not self.closed:
            self._lane.stream.synchronize()
            self._settle()
        super().close()
        self._started.clear()  # they hold this communicator, and it their buffers
