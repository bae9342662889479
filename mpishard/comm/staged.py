"""Ranks as MPI processes with arrays on a GPU that MPI cannot read: by way of pinned host memory, in pieces.

[Note: the pipeline]
A collective is cut into pieces of each rank's block, the same on all ranks. For piece i the pump's thread

1. copies to the host: on a stream of its own, *down*, queued while MPI carries piece i - 1;
2. waits for that copy, and calls MPI on pinned memory;
3. copies to the device on the lane's stream, where the ordered sum of the piece follows.

So while MPI carries piece i, piece i + 1 comes down and piece i - 1 goes up. There are two *slots* of pinned memory. A
slot's send buffer is free when MPI has returned; its receive buffer when the copy up has passed the event *landed*,
which the thread waits for before MPI writes there again. This holds across collectives, too.

[Note: what travels]
A rank's own block crosses no bus: the sum reads it in place, and MPI carries whatever stands in its stead. The sum of
a piece reads one piece of scratch, so a reduce-scatter needs little of it, however large the unit. Pieces are cut
across the ranks' blocks: each element is added in rank order as ever, and the bits depend on no size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpishard.array.dtypes import Array, DType, address
from mpishard.array.ops import Ops
from mpishard.comm.base import Collective, Node, Tally
from mpishard.comm.lane import Lane, Marks, taken
from mpishard.comm.mpi import WIRE
from mpishard.comm.mpi_device import DeviceMpiCommunicator
from mpishard.comm.scratch import STAGE_BYTES, Scratch
from mpishard.errors import ConfigError

__all__ = ["STAGE_BYTES", "StagedCommunicator"]

#: Bytes that rows may lie apart in a copy of several: CUDA's cudaDevAttrMaxPitch, on every GPU.
_PITCH = 2**31 - 1


class _Slot:
    """Pinned memory for one piece in flight."""

    def __init__(self, lane: Lane, nbytes: int) -> None:
        self._pinned = [lane.cuda.alloc_pinned_memory(nbytes) for _ in range(2)]
        self.send, self.receive = (np.frombuffer(memory, np.uint8, nbytes) for memory in self._pinned)
        #: the copy to ``send`` has been made; the copy from ``receive`` has
        self.left, self.landed = (lane.cuda.Event(disable_timing=True) for _ in range(2))


class _Stage:
    """The slots, and copies between them and the device; used by the pump alone."""

    def __init__(self, lane: Lane, nbytes: int) -> None:
        import cupy

        self.nbytes = nbytes
        self.down: Any = lane.new_stream()
        self._up: Any = lane.stream
        self._runtime: Any = cupy.cuda.runtime
        self._slots: tuple[_Slot, ...] = (_Slot(lane, nbytes), _Slot(lane, nbytes))
        #: communicators that send through it
        self.users = 1

    def leave(self) -> None:
        """One communicator less, whose copies are over; the last one gives the pinned memory back."""
        self.users -= 1
        if not self.users:
            self._slots = ()

    def to_host(self, host: Array, device: Array, rows: Sequence[tuple[int, int, int]], width: int) -> None:
        """Copy rows of ``width`` elements: (first row on the host, first element on the device, rows)."""
        self._copy(host, device, rows, width, self._runtime.memcpyDeviceToHost, self.down)

    def to_device(self, host: Array, device: Array, rows: Sequence[tuple[int, int, int]], width: int) -> None:
        """Copy rows of ``width`` elements the other way."""
        self._copy(host, device, rows, width, self._runtime.memcpyHostToDevice, self._up)

    def _copy(
        self, host: Array, device: Array, rows: Sequence[tuple[int, int, int]], width: int, kind: int, stream: Any
    ) -> None:
        """Rows lie ``width`` apart on the host and as far apart as the array's second axis says on the device."""
        item = device.itemsize
        pitch = apart = max(device.strides[0], width * item)
        if pitch > _PITCH:  # one by one
            rows = [(row + i, column, 1) for row, column, count in rows for i in range(count)]
            apart = width * item
        for row, column, count in rows:
            here, there = address(host) + row * width * item, address(device) + row * pitch + column * item
            ends = (there, apart, here, width * item) if stream is self._up else (here, width * item, there, apart)
            if count and width:
                self._runtime.memcpy2DAsync(*ends, width * item, count, kind, stream.ptr)

    def run(
        self,
        marks: Marks,
        pieces: int,
        down: Callable[[int, Array], None],
        talk: Callable[[int, Array, Array], None],
        up: Callable[[int, Array], None],
    ) -> None:
        """Run the pipeline: ``down(i, send)`` and ``up(i, receive)`` queue copies, ``talk`` calls MPI."""
        marks.follow(self.down, self._up)

        def begin(i: int) -> None:
            down(i, self._slots[i % 2].send)
            self._slots[i % 2].left.record(self.down)

        for i in range(pieces):
            slot = self._slots[i % 2]
            if i == 0:
                begin(0)
            if i + 1 < pieces:
                begin(i + 1)
            slot.left.synchronize()
            slot.landed.synchronize()
            talk(i, slot.send, slot.receive)
            up(i, slot.receive)
            slot.landed.record(self._up)


class StagedCommunicator(DeviceMpiCommunicator):
    """The ranks of an mpi4py intracommunicator, whatever its MPI; see :class:`MpiCommunicator`.

    Args:
        ops: operations on a device's arrays; the device becomes the calling thread's.
        chunk_bytes: of each of the four pinned buffers; a piece of a rank's block is this over the number of ranks.
            Equal on all ranks.
    """

    transport = "staged"

    def __init__(
        self,
        comm: MPI.Intracomm,
        ops: Ops,
        *,
        chunk_bytes: int = STAGE_BYTES,
        threaded: bool | None = None,
        why: str = "",
        node: Node | None = None,
    ) -> None:
        if chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes is {chunk_bytes}; some MiB are needed, such as {STAGE_BYTES}")
        super().__init__(comm, ops, chunk_bytes=chunk_bytes, threaded=threaded, why=why, node=node)
        nbytes = max(chunk_bytes, 8 * self.size)  # an element of each rank at least
        what = f"4 x {nbytes} bytes of pinned host memory"
        self._stage = taken(self, lambda: _Stage(self._lane, nbytes), what)

    def _share(self, parent: Any) -> None:
        super()._share(parent)
        self._stage = parent._stage
        self._stage.users += 1

    @property
    def scratch_rule(self) -> Scratch:
        """Room for one piece of the blocks of all ranks."""
        return Scratch(self.transport, self.size, True, self._stage.nbytes)

    def _bind_all_gather(self, shard: Array, out: Array, tally: Tally, nbytes: int) -> Collective:
        count, size, rank = shard.size, self.size, self.rank
        own = out[rank * count : (rank + 1) * count]
        in_place = address(own) == address(shard)
        mine, everyone = shard.reshape(1, count), out.reshape(size, count)
        pieces = _spans(count if size > 1 else 0, self.scratch_rule.piece(shard.itemsize))
        kind, stage = WIRE[shard.itemsize], self._stage

        def down(i: int, send: Array) -> None:
            first, width = pieces[i]
            stage.to_host(send, mine, [(0, first, 1)], width)

        def talk(i: int, send: Array, receive: Array) -> None:
            width = pieces[i][1]
            self._mpi.Allgather([send, width, kind], [receive, width, kind])

        def up(i: int, receive: Array) -> None:
            first, width = pieces[i]
            stage.to_device(receive, everyone, [(0, first, rank), (rank + 1, first, size - rank - 1)], width)

        def call(marks: Marks, add: bool) -> None:
            stage.run(marks, len(pieces), down, talk, up)
            if not in_place:
                self._lane.ops.copy(shard, own)

        return self._collective(tally, nbytes, f"all-gather number {self._bound - 1}", call)

    def _bind_reduce_scatter(
        self, full: Array, out: Array, scratch: Array | None, wire: DType, tally: Tally, nbytes: int
    ) -> Collective:
        count, size, rank = out.size, self.size, self.rank
        pieces, bracket = _spans(count if size > 1 else 0, self.scratch_rule.piece(full.itemsize)), self.bracket
        kind, stage, blocks = WIRE[full.itemsize], self._stage, full.reshape(size, count)
        arrived: list[Array] = []
        sums: list[tuple[list[Array], Array]] = []
        for first, width in pieces:
            assert scratch is not None  # bound buffers were validated
            arrived.append(scratch[: size * width * full.itemsize].view(full.dtype).reshape(size, width))
            parts = list(arrived[-1])
            parts[rank] = blocks[rank][first : first + width]
            sums.append((parts, out[first : first + width]))

        def down(i: int, send: Array) -> None:
            first, width = pieces[i]
            stage.to_host(send, blocks, [(0, first, rank), (rank + 1, first, size - rank - 1)], width)

        def talk(i: int, send: Array, receive: Array) -> None:
            width = pieces[i][1]
            self._mpi.Alltoall([send, width, kind], [receive, width, kind])

        def up(add: bool, i: int, receive: Array) -> None:
            width = pieces[i][1]
            stage.to_device(receive, arrived[i], [(0, 0, rank), (rank + 1, 0, size - rank - 1)], width)
            parts, part = sums[i]
            self._lane.ops.ordered_sum(parts, part, add, bracket)

        def call(marks: Marks, add: bool) -> None:
            stage.run(marks, len(pieces), down, talk, partial(up, add))
            if size == 1:
                self._lane.ops.ordered_sum([full], out, add)

        return self._collective(tally, nbytes, f"reduce-scatter number {self._bound - 1}", call)

    def _broadcast(self, array: Array, root: int) -> None:
        pieces = _spans(array.size if self.size > 1 else 0, self._stage.nbytes // array.itemsize)
        kind, stage, whole, sends = WIRE[array.itemsize], self._stage, array.reshape(1, -1), self.rank == root

        def down(i: int, send: Array) -> None:
            first, width = pieces[i]
            stage.to_host(send, whole, [(0, first, int(sends))], width)

        def talk(i: int, send: Array, receive: Array) -> None:
            self._mpi.Bcast([send if sends else receive, pieces[i][1], kind], root)

        def up(i: int, receive: Array) -> None:
            first, width = pieces[i]
            stage.to_device(receive, whole, [(0, first, int(not sends))], width)

        self._at_once("a broadcast", lambda marks: stage.run(marks, len(pieces), down, talk, up))

    def close(self) -> None:
        """As on the host; pinned memory is given back with the last communicator that was split from this one."""
        open_before = not self.closed
        super().close()
        if open_before:
            self._stage.leave()


def _spans(count: int, most: int) -> list[tuple[int, int]]:
    """Cut ``count`` elements into (first, number) of at most ``most``."""
    return [(first, min(most, count - first)) for first in range(0, count, most)]
