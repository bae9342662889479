"""``cupy.cuda.nccl`` among ranks that are threads of one process or processes of one machine.

[Note: as strict as NCCL]
- Ranks of one communicator are on different devices (``devices`` of a machine are told apart by their PCI numbers, in
  all processes alike): two on one device get ``NCCL_ERROR_INVALID_USAGE``.
- A send outside a group waits for its receive; so two ranks that first send to each other wait for ever (an error
  after ``PATIENCE`` seconds).
- ``reduceScatter`` adds from the next rank on around the ring, rounding after each addition: its bits are nobody's.
- Ranks that call different things, or with different counts or types, are told so.
- A communicator that is destroyed while a stream has operations of it is a conflict in a record.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.standin.arguments import address, count, whole
from tests.standin.errors import NcclError
from tests.standin.machine import Access, Work, here
from tests.standin.meeting import Gone, Meeting
from tests.standin.memory import Block, DeviceFault
from tests.standin.regions import one, overlap

NCCL_INT8, NCCL_CHAR, NCCL_UINT8, NCCL_INT32, NCCL_INT, NCCL_UINT32 = 0, 0, 1, 2, 2, 3
NCCL_INT64, NCCL_UINT64, NCCL_FLOAT16, NCCL_HALF = 4, 5, 6, 6
NCCL_FLOAT32, NCCL_FLOAT, NCCL_FLOAT64, NCCL_DOUBLE, NCCL_BFLOAT16 = 7, 7, 8, 8, 9
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = 0, 1, 2, 3, 4

__all__ = [
    *sorted(name for name in globals() if name.startswith("NCCL_")),
    "NcclCommunicator",
    "NcclError",
    "available",
    "get_unique_id",
    "get_version",
    "groupEnd",
    "groupStart",
]

available = True
#: Seconds that a rank waits for another one.
PATIENCE = 60.0
_BYTES = 128
#: numbers of communicators in a record, apart from those of allocations
_HANDLES = itertools.count(10**9)
_WHOLE = ((0, 1, 0, 0),)
_ITEM = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2)
_NAMES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16")


@dataclass(eq=False)
class _Call:
    """What one call does: told at once, done on the stream."""

    work: Work
    comm: NcclCommunicator
    name: str
    accesses: list[Access]
    offer: Callable[[], None]
    finish: Callable[[], None]


def get_version() -> int:
    return 23203


def get_unique_id() -> bytes:
    """Return what names a new communicator on all ranks."""
    return secrets.token_bytes(_BYTES)


def groupStart() -> None:  # noqa: N802 - CuPy's names, here and below
    local = here().local
    local.depth = getattr(local, "depth", 0) + 1
    if local.depth == 1:
        local.calls = []


def groupEnd() -> None:  # noqa: N802
    local = here().local
    if not getattr(local, "depth", 0):
        raise NcclError(5)
    local.depth -= 1
    if local.depth == 0:
        calls, local.calls = local.calls, []
        _run(calls)


def _run(calls: list[_Call]) -> None:
    """Put calls on their stream as one operation: none of them waits for another one."""
    if not calls:
        return
    if len({id(call.work) for call in calls}) > 1:
        raise DeviceFault("nccl: a group's calls are on different streams, which would wait for each other")
    accesses = [access for call in calls for access in call.accesses]
    for (first, parts, written), (second, others, also) in itertools.combinations(accesses, 2):
        if (written or also) and first is second and overlap(parts, others):
            raise DeviceFault(f"nccl: buffers of {' and '.join(sorted({c.name for c in calls}))} overlap in {first}")
    names: dict[str, int] = {}
    for call in calls:
        names[call.name] = names.get(call.name, 0) + 1
    name = ", ".join(f"{number} nccl {name}" if number > 1 else f"nccl {name}" for name, number in names.items())

    def run() -> None:
        try:
            for call in calls:
                call.offer()
            for call in calls:
                call.finish()
        except (Gone, ValueError) as error:
            raise DeviceFault(f"{name}: {error}") from None

    here().submit(calls[0].work, name, accesses, run, meets=True)


class NcclCommunicator:
    """One rank of a communicator; made by all ranks together.

    Args:
        ndev: number of ranks.
        commId: of :func:`get_unique_id`, the same on all ranks.
        rank: this one.
    """

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        self._meeting: Meeting | None = None
        if not isinstance(commId, bytes):
            raise TypeError(f"Argument 'commId' has incorrect type (expected bytes, got {type(commId).__name__})")
        if len(commId) != _BYTES:
            raise ValueError(f"commId length {len(commId)} != {_BYTES}.")
        if not 0 <= whole(rank) < whole(ndev):
            raise NcclError(4)
        self._rank, self._size, self._device = whole(rank), whole(ndev), here().device
        #: what its operations read and its end writes: nothing may be on a stream then
        self.handle = Block(next(_HANDLES), "NCCL communicator", self._device, 0, 1, np.zeros(1, np.uint8))
        self._number = 0
        patience = float(os.environ.get("STANDIN_PATIENCE", PATIENCE))
        self._meeting = Meeting(commId[:20].hex(), self._rank, self._size, patience)
        for peer in range(self._size):
            self._meeting.send(peer, "device", bytes([self._device]))
        devices = [self._meeting.receive(peer, "device") for peer in range(self._size)]
        if len(set(devices)) < self._size:
            self.destroy()
            raise NcclError(5)

    # --- the calls

    def allGather(  # noqa: N802
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int
    ) -> None:
        call = self._begin("allGather", stream, count, datatype)
        nbytes = call.nbytes
        own = address(recvbuf) + self._rank * nbytes
        call.reads(sendbuf, nbytes, in_place=own)
        call.writes(recvbuf, nbytes * self._size)

        def offer() -> None:
            for peer in range(self._size):
                call.send(peer, call.bytes(sendbuf, nbytes))

        def finish() -> None:
            for peer in range(self._size):
                call.store(recvbuf + peer * nbytes, call.receive(peer))

        call.put(offer, finish)

    def reduceScatter(  # noqa: N802
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        if whole(op) != NCCL_SUM:
            raise DeviceFault(f"nccl reduceScatter: the stand-in adds (NCCL_SUM) only, {op} was asked for")
        call = self._begin("reduceScatter", stream, recvcount, datatype)
        nbytes = call.nbytes
        call.writes(recvbuf, nbytes)
        call.reads(sendbuf, nbytes * self._size, but=recvbuf if recvbuf == sendbuf + self._rank * nbytes else None)

        def offer() -> None:
            for peer in range(self._size):
                call.send(peer, call.bytes(sendbuf + peer * nbytes, nbytes))

        def finish() -> None:
            kind = _host_type(datatype)
            blocks = [np.frombuffer(call.receive(peer), kind) for peer in range(self._size)]
            total = blocks[(self._rank + 1) % self._size].copy()
            for far in range(2, self._size + 1):
                total = (total + blocks[(self._rank + far) % self._size]).astype(kind)
            call.store(recvbuf, total.tobytes())

        call.put(offer, finish)

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
    ) -> None:
        self._check_peer(root)
        call = self._begin(f"broadcast from {root}", stream, count, datatype)
        if self._rank == root:
            call.reads(sendbuff, call.nbytes, in_place=recvbuff)
        call.writes(recvbuff, call.nbytes)

        def offer() -> None:
            for peer in range(self._size) if self._rank == root else ():
                call.send(peer, call.bytes(sendbuff, call.nbytes))

        call.put(offer, lambda: call.store(recvbuff, call.receive(root)))

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._check_peer(peer)
        call = self._begin("send", stream, count, datatype)
        call.reads(sendbuf, call.nbytes)

        def finish() -> None:
            self._line().receive(peer, "word " + call.tag)
            self._line().send(peer, call.tag, call.bytes(sendbuf, call.nbytes))

        call.put(lambda: None, finish)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._check_peer(peer)
        call = self._begin("recv", stream, count, datatype)
        call.writes(recvbuf, call.nbytes)
        call.put(
            lambda: self._line().send(peer, "word " + call.tag),
            lambda: call.store(recvbuf, call.receive(peer)),
        )

    def check_async_error(self) -> None:
        """Raise what has gone wrong on the device; here it was raised where it happened."""
        self._line()

    def abort(self) -> None:
        """Leave; what is in flight ends with an error."""
        self.destroy()

    def destroy(self) -> None:
        """Leave."""
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None
            machine = here()
            if machine.trace is not None:
                machine.trace.thread_access("nccl destroy", [(self.handle, _WHOLE, True)])

    # ---

    def _begin(self, name: str, stream: int, number: int, datatype: int) -> Any:
        return _Bound(self, name, stream, number, datatype)

    def _check_peer(self, peer: int) -> None:
        if not 0 <= whole(peer) < self._size:
            raise NcclError(4)

    def _line(self) -> Meeting:
        if self._meeting is None:
            raise DeviceFault("nccl: the communicator was aborted")
        return self._meeting


class _Bound:
    """A call whose buffers are being checked."""

    def __init__(self, comm: NcclCommunicator, name: str, stream: int, number: int, datatype: int) -> None:
        if comm._meeting is None or not 0 <= whole(datatype) < len(_ITEM):
            raise NcclError(4)
        self.comm, self.name = comm, name
        self.work = here().work(address(stream), f"nccl {name}")
        if self.work.device != comm._device:
            raise DeviceFault(f"nccl {name}: a stream of device {self.work.device} for one of device {comm._device}")
        self.nbytes = count(number) * _ITEM[datatype]
        what = "" if name in ("send", "recv") else f"{name} number {comm._number}, "
        comm._number += name not in ("send", "recv")
        self.tag = f"{what}{number} x {_NAMES[datatype]}"
        self._accesses: list[Access] = []

    def _find(self, start: int, nbytes: int, written: bool) -> Access:
        block = here().memory.find(start, nbytes, f"nccl {self.name}", "device", self.work.device)
        return block, one(start, nbytes), written

    def reads(self, start: int, nbytes: int, in_place: int | None = None, but: int | None = None) -> None:
        if address(start) == in_place or nbytes == 0:
            return  # it is a part of what is written
        if but is None:
            self._accesses.append(self._find(start, nbytes, False))
            return
        own = self.nbytes
        for low, high in ((start, but), (but + own, start + nbytes)):
            if high > low:
                self._accesses.append(self._find(low, high - low, False))

    def writes(self, start: int, nbytes: int) -> None:
        if nbytes:
            self._accesses.append(self._find(address(start), nbytes, True))

    def put(self, offer: Callable[[], None], finish: Callable[[], None]) -> None:
        accesses = [*self._accesses, (self.comm.handle, _WHOLE, False)]
        call = _Call(self.work, self.comm, self.name, accesses, offer, finish)
        local = here().local
        if getattr(local, "depth", 0):
            local.calls.append(call)
        else:
            _run([call])

    def bytes(self, start: int, nbytes: int) -> bytes:
        return self._view(start, nbytes).tobytes()

    def store(self, start: int, data: bytes) -> None:
        self._view(start, len(data))[:] = np.frombuffer(data, np.uint8)

    def _view(self, start: int, nbytes: int) -> np.ndarray:
        if not nbytes:
            return np.empty(0, np.uint8)
        block = here().memory.find(start, nbytes, f"nccl {self.name}", "device", self.work.device)
        return block.bytes[start - block.address : start - block.address + nbytes]

    def send(self, peer: int, data: bytes) -> None:
        self.comm._line().send(peer, self.tag, data)

    def receive(self, peer: int) -> bytes:
        return self.comm._line().receive(peer, self.tag)


def _host_type(datatype: int) -> Any:
    if datatype == NCCL_BFLOAT16:
        from ml_dtypes import bfloat16

        return bfloat16
    return np.dtype(_NAMES[datatype])

