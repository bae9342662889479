"""Ranks with a GPU each that communicate by NCCL, on the device's streams. The transport to compare with.

[Note: two libraries, one at a time]
Device memory is NCCL's alone. Records (exchanges, bindings, the unique id) go over another communicator, *control*,
which carries host memory only; so two libraries never wait for each other on the device.

[Note: order]
Everything is queued on the lane's stream by the calling thread: ``start()`` and ``wait()`` do not block the host. One
stream means one order: groups that share ranks must be started in one order on all of them.

[Note: sums]
``sums="ordered"``: a reduce-scatter is an all-to-all (grouped sends and receives) and an ordered sum on the device:
the bits of every other transport. ``sums="library"``: ncclReduceScatter, whose order depends on algorithm, topology
and number of ranks, and which rounds sums of 16-bit types to 16 bits at each addition. It claims no bits.

[Note: what NCCL sees]
Bytes, since nothing is converted on the way; the element type only where NCCL is asked to add.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpishard.array.dtypes import Array, DType, address, name_of
from mpishard.array.ops import Ops
from mpishard.comm.base import Collective, Communicator, Tally
from mpishard.comm.lane import DeviceCollective, Lane, Marks, taken
from mpishard.comm.parts import blocks_of
from mpishard.comm.scratch import Scratch
from mpishard.comm.together import same_on_all_ranks, together
from mpishard.errors import CommError, ConfigError

__all__ = ["SUMS", "NcclCommunicator"]

#: Who adds in a reduce-scatter.
SUMS = ("ordered", "library")

#: ncclDataType_t of the types that NCCL adds; nccl.h.
_TYPES = {"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
_BYTES = 1
_SUM = 0
_ID_BYTES = 128


class NcclCommunicator(Communicator):
    """The ranks of ``control``, each with a GPU of its own. Collective.

    Args:
        control: carries records; closed with this one.
        ops: operations on a device's arrays; the device becomes the calling thread's.
        sums: ``ordered``, or ``library`` to measure NCCL's own; see the note on sums.
        why: why this transport was chosen, for :meth:`describe`.

    Raises:
        ConfigError: on all ranks, when ``sums`` is unknown, NCCL is missing on one of them, versions differ, or NCCL
            does not start: it takes one rank for each GPU.
    """

    transport = "nccl"

    def __init__(self, control: Communicator, ops: Ops, *, sums: str = "ordered", why: str = "") -> None:
        if sums not in SUMS:
            raise ConfigError(f"sums is {sums!r}; choose one of {', '.join(SUMS)}")
        nccl = together(control, _load)
        version: int = nccl.get_version()
        same_on_all_ranks(control, [f"NCCL's version = {version}", f"sums = {sums}"])
        self.sums, self._why, self._version = sums, why, _text(version)
        lane = taken(control, lambda: Lane(ops), "a stream and scratch for communication")
        self._set_up(control, ops, nccl, lane)
        self.own_bytes = lane.ops.own_bytes

    def _set_up(self, control: Communicator, ops: Ops, nccl: Any, lane: Lane) -> None:
        super().__init__(control.rank, control.size, control.node, ops)
        self._control, self._nccl, self._lane, self._once = control, nccl, lane, lane.marks()
        self._started: list[DeviceCollective] = []
        self._comm: Any = None
        if self.size > 1:
            key = together(control, lambda: _identify(nccl) if self.rank == 0 else bytes(_ID_BYTES))
            key = control.exchange(key, "NCCL's unique id")[0]
            self._comm = together(control, lambda: _join(nccl, self.size, key, self.rank))

    def describe(self) -> str:
        """Return the transport, NCCL's version, who adds, what carries records, and why it was chosen."""
        sums = "sums by NCCL, in no fixed order" if self.sums == "library" else "ordered sums"
        why = f", {self._why}" if self._why else ""
        return f"nccl, NCCL {self._version}, {sums}, records by {self._control.describe()}{why}"

    @property
    def scratch_rule(self) -> Scratch:
        """Room for the blocks of all ranks; for one block where NCCL adds."""
        return Scratch(self.transport, self.size, True, sums=self.sums)

    def _settle(self) -> None:
        for collective in self._started:
            collective.settle()

    def _collective(self, tally: Tally, nbytes: int, name: str, queue: Callable[[bool], None]) -> Collective:
        """Return the collective that ``queue(add)`` puts on the lane's stream."""

        def begin(marks: Marks, add: bool) -> Callable[[], None]:
            self._on_lane(name, marks, lambda: queue(add))
            return lambda: self._check(name)

        made = DeviceCollective(tally, nbytes, self._lane, begin)
        self._started.append(made)
        return made

    def _on_lane(self, name: str, marks: Marks, queue: Callable[[], None]) -> None:
        if self.closed:
            raise CommError(f"{name}: the communicator is closed")
        marks.follow(self._lane.stream)
        try:
            queue()
        except (self._nccl.NcclError, KeyError) as error:  # KeyError: a status that CuPy has no name for
            raise CommError(f"{name} failed in NCCL: {error}") from error
        marks.finish()

    def _check(self, name: str) -> None:
        """Raise what NCCL has met on the device since; it tells when it is asked."""
        if self._comm is not None:
            try:
                self._comm.check_async_error()
            except (self._nccl.NcclError, KeyError) as error:  # KeyError: a status that CuPy has no name for
                raise CommError(f"{name} failed in NCCL: {error}") from error

    def _bind_all_gather(self, shard: Array, out: Array, tally: Tally, nbytes: int) -> Collective:
        count = shard.size
        own = out[self.rank * count : (self.rank + 1) * count]
        in_place = address(own) == address(shard)
        ends = (address(shard), address(out), shard.nbytes, _BYTES, self._lane.stream.ptr)

        def queue(add: bool) -> None:
            if self._comm is None and not in_place:
                self._lane.ops.copy(shard, own)
            elif self._comm is not None and count:
                self._comm.allGather(*ends)

        return self._collective(tally, nbytes, f"all-gather number {self._bound - 1}", queue)

    def _bind_reduce_scatter(
        self, full: Array, out: Array, scratch: Array | None, wire: DType, tally: Tally, nbytes: int
    ) -> Collective:
        name = f"reduce-scatter number {self._bound - 1}"
        if self._comm is None or out.size == 0:
            return self._collective(tally, nbytes, name, lambda add: self._lane.ops.ordered_sum([full], out, add))
        assert scratch is not None  # bound buffers were validated
        if self.sums == "library":
            return self._collective(tally, nbytes, name, self._library_sum(full, out, scratch))
        blocks = blocks_of(scratch[: full.nbytes].view(full.dtype), self.size)
        block, stream, bracket = full.nbytes // self.size, self._lane.stream, self.bracket
        targets = [(self.rank + far) % self.size for far in range(1, self.size)]
        sends = [(address(full) + peer * block, block, _BYTES, peer, stream.ptr) for peer in targets]
        receives = [(address(scratch) + peer * block, block, _BYTES, peer, stream.ptr) for peer in targets[::-1]]
        blocks[self.rank] = full[self.rank * out.size : (self.rank + 1) * out.size]

        def queue(add: bool) -> None:
            self._nccl.groupStart()
            try:
                for call in sends:
                    self._comm.send(*call)
                for call in receives:
                    self._comm.recv(*call)
            finally:
                self._nccl.groupEnd()
            self._lane.ops.ordered_sum(blocks, out, add, bracket)

        return self._collective(tally, nbytes, name, queue)

    def _library_sum(self, full: Array, out: Array, scratch: Array) -> Callable[[bool], None]:
        """NCCL adds in full's type; what is of another type, or is added to, comes by way of the scratch."""
        block = scratch[: out.size * full.itemsize].view(full.dtype)
        kind, stream = _TYPES[name_of(full.dtype)], self._lane.stream.ptr

        def queue(add: bool) -> None:
            straight = not add and out.dtype == full.dtype
            target = address(out if straight else block)
            self._comm.reduceScatter(address(full), target, out.size, kind, _SUM, stream)
            if not straight:
                self._lane.ops.ordered_sum([block], out, add)

        return queue

    def _exchange(self, record: bytes) -> list[bytes]:
        return self._control._exchange(record)

    def _broadcast(self, array: Array, root: int) -> None:
        def queue() -> None:
            if self._comm is not None and array.size:
                where = address(array)
                self._comm.broadcast(where, where, array.nbytes, _BYTES, root, self._lane.stream.ptr)

        self._once.start()
        self._on_lane("a broadcast", self._once, queue)
        self._once.join()
        self._check("a broadcast")

    def _split(self, groups: Sequence[Sequence[int]], own: Sequence[int]) -> Communicator:
        child = NcclCommunicator.__new__(NcclCommunicator)
        child.sums, child._why, child._version = self.sums, self._why, self._version
        child._set_up(self._control._split(groups, own), self.ops, self._nccl, self._lane)
        return child

    def abort(self, message: str, code: int = 1) -> None:
        """Print the message and end every rank of the job; what is on the device ends with the processes."""
        self._control.before_abort = self.before_abort
        self._control.abort(message, code)

    def close(self) -> None:
        """Wait for what is on the lane's stream, and give NCCL's communicator and ``control`` back. Again is free."""
        if not self.closed:
            self.closed = True
            self._lane.stream.synchronize()
            self._settle()
            self._started.clear()  # they hold this communicator, and it their buffers
            if self._comm is not None:
                self._comm.destroy()
            self._control.close()


def _load() -> Any:
    try:
        from cupy.cuda import nccl
    except Exception as error:  # whatever is wrong with a library that is looked for
        reason = str(error).strip().partition("\n")[0]
    else:
        if nccl.available:
            return nccl
        reason = "CuPy does not find libnccl"
    raise ConfigError(
        f"transport 'nccl' needs NCCL, which cannot be loaded ({reason}); install it with: pip install "
        "nvidia-nccl-cu12 (cu13 for CUDA 13), or use transport mpi or staged"
    )


def _identify(nccl: Any) -> bytes:
    try:
        key: bytes = nccl.get_unique_id()
    except (nccl.NcclError, KeyError) as error:
        raise ConfigError(
            f"NCCL finds no network interface ({error}); name one in NCCL_SOCKET_IFNAME, or use transport mpi or "
            "staged; NCCL_DEBUG=WARN says more"
        ) from error
    return key


def _join(nccl: Any, size: int, key: bytes, rank: int) -> Any:
    try:
        return nccl.NcclCommunicator(size, key, rank)
    except (nccl.NcclError, KeyError) as error:
        raise ConfigError(
            f"NCCL does not start on rank {rank} ({error}); it takes one rank for each GPU: start fewer, or use "
            "transport mpi or staged; NCCL_DEBUG=WARN says more"
        ) from error


def _text(version: int) -> str:
    """NCCL's version in words: 22304 is 2.23.4."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
