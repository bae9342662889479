"""Each MPI call that training makes, tried once on known values: what a child job of the doctor runs.

Some of them end a process that should not have made them: GPU memory given to an MPI that cannot take it, or a
transport layer that does not work. So nothing here is called by a program that has something to lose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpishard.array.device import operations
from mpishard.array.dtypes import DTYPES, Array, address
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.ops import Ops
from mpishard.comm.base import Communicator
from mpishard.comm.choice import connect
from mpishard.comm.mpi import WIRE
from mpishard.comm.mpi_device import Wire
from mpishard.comm.parts import pieces_of

__all__ = ["SIZES", "Attempt", "attempts"]

#: Bytes from rank to rank: libraries take other ways for messages below and above some 64 KiB.
SIZES = (4 << 10, 1 << 20)
_HOST, _GPU = ("mpi", "node", "hierarchical"), ("staged", "nccl")
_KIND = WIRE[1]


class Attempt(NamedTuple):
    """One thing to try; ``run`` returns what is wrong with the result, "" for nothing. Collective.

    It raises ConfigError, on all ranks, where what it tries is not possible here: NCCL with fewer GPUs than ranks, say.
    """

    what: str
    memory: str
    nbytes: int
    run: Callable[[], str]


class _Memory:
    """Bytes of host or device memory, and how MPI is told of them."""

    def __init__(self, ops: Ops, device: bool) -> None:
        self.ops, self.device = ops, device

    def of(self, values: Array) -> Array:
        array = self.ops.empty(values.size, DTYPES["uint8"])
        host = self.ops.host_like(array)
        host[...] = values
        self.ops.upload(host, array)
        self.ops.fetch(array[:1])  # MPI knows no streams
        return array

    def wire(self, array: Array) -> Any:
        return Wire(address(array), array.size, 1) if self.device else array

    def differs(self, array: Array, expected: Array) -> str:
        wrong = np.flatnonzero(np.asarray(self.ops.fetch(array)) != expected)
        return f"{wrong.size} of {expected.size} bytes are wrong, from byte {wrong[0]} on" if wrong.size else ""


def attempts(world: Any, device: bool, local_rank: int | None) -> list[Attempt]:
    """Return what training calls, host memory first.

    Args:
        world: an mpi4py intracommunicator of the ranks that try.
        device: try GPU memory, too.
        local_rank: this process among those of its machine, for the choice of a GPU.

    Raises:
        ConfigError: a GPU was asked for and cannot be used.
    """
    host = _Memory(NumpyOps(), False)
    found = [*_calls(world, host), *_transports(world, host.ops, _HOST, "host")]
    if device:
        gpu = _Memory(operations("cuda", local_rank), True)
        found += [*_transports(world, gpu.ops, _GPU, "GPU"), *_calls(world, gpu)]
    return found


def _calls(world: Any, memory: _Memory) -> list[Attempt]:
    from mpi4py import MPI

    rank, size = world.Get_rank(), world.Get_size()
    blocking = memory.device  # transports call nothing else on a GPU

    def values(source: int, target: int, count: int) -> Array:
        """What ``source`` sends to ``target``; all alike where the target is -1."""
        return ((np.arange(count, dtype=np.int64) * 7 + 31 * source + 11 * (target + 1)) % 251).astype(np.uint8)

    def finished(*requests: Any) -> None:
        MPI.Request.Waitall(list(requests))

    def gather(comm: Any, count: int) -> str:
        me, ranks = comm.Get_rank(), comm.Get_size()
        expected = np.concatenate([values(source, -1, count) for source in range(ranks)])
        start = np.zeros_like(expected)
        start[me * count : (me + 1) * count] = values(me, -1, count)
        everyone = memory.of(start)
        receive = [memory.wire(everyone), count, _KIND]
        if blocking:
            comm.Allgather(MPI.IN_PLACE, receive)
        else:
            finished(comm.Iallgather(MPI.IN_PLACE, receive))
        return memory.differs(everyone, expected)

    def exchange(comm: Any, count: int) -> str:
        me, ranks = comm.Get_rank(), comm.Get_size()
        mine = memory.of(np.concatenate([values(me, target, count) for target in range(ranks)]))
        theirs = memory.of(np.zeros(ranks * count, np.uint8))
        send, receive = [memory.wire(mine), count, _KIND], [memory.wire(theirs), count, _KIND]
        if blocking:
            comm.Alltoall(send, receive)
        else:
            finished(comm.Ialltoall(send, receive))
        return memory.differs(theirs, np.concatenate([values(source, me, count) for source in range(ranks)]))

    def pieces(count: int) -> str:
        mine = memory.of(np.concatenate([values(rank, target, count) for target in range(size)]))
        theirs = memory.of(np.zeros(size * count, np.uint8))
        counts, places = np.full(size, count, np.intc), count * np.arange(size, dtype=np.intc)
        counts[rank] = 0
        finished(world.Ialltoallv([mine, counts, places, _KIND], [theirs, counts, places, _KIND]))
        blocks = [values(source, rank, count) if source != rank else np.zeros(count) for source in range(size)]
        return memory.differs(theirs, np.concatenate(blocks).astype(np.uint8))

    def broadcast(count: int) -> str:
        problem = ""
        for root in range(size):
            array = memory.of(values(rank, -1, count))
            buffer = [memory.wire(array), count, _KIND]
            if blocking:
                world.Bcast(buffer, root)
            else:
                finished(world.Ibcast(buffer, root))
            problem = problem or memory.differs(array, values(root, -1, count))
        return problem

    def slices(count: int) -> str:
        mine, theirs = memory.of(values(rank, -1, count)), memory.of(np.zeros(count, np.uint8))
        source, target = (rank - 1) % size, (rank + 1) % size
        step = max(1, count // 3)
        requests = [world.Irecv([part, part.size, _KIND], source, 7) for part in pieces_of(memory.wire(theirs), step)]
        requests += [world.Isend([part, part.size, _KIND], target, 7) for part in pieces_of(memory.wire(mine), step)]
        finished(*requests)
        return memory.differs(theirs, values(source, -1, count))

    named: list[tuple[str, Callable[[int], str]]] = [
        ("a copy to itself (all-to-all of one rank)", lambda count: exchange(MPI.COMM_SELF, count)),
        ("all-gather in place", lambda count: gather(world, count)),
        ("all-to-all", lambda count: exchange(world, count)),
        *([] if memory.device else [("all-to-all of pieces", pieces)]),
        ("broadcast", broadcast),
        ("slices from point to point", slices),
    ]
    where = "GPU" if memory.device else "host"
    return [
        Attempt(what, where, count, lambda call=call, count=count: call(count))  # type: ignore[misc]
        for what, call in named
        for count in SIZES
    ]


def _transports(world: Any, ops: Ops, names: tuple[str, ...], memory: str) -> list[Attempt]:
    def use(name: str) -> str:
        comm = connect(world, ops, name, share_device=name != "nccl")
        try:
            return next(filter(None, (_used(comm, count // 4) for count in SIZES)), "")
        finally:
            comm.close()

    return [
        Attempt(f"transport {name}", memory, SIZES[-1], lambda name=name: use(name))  # type: ignore[misc]
        for name in names
    ]


def _used(comm: Communicator, count: int) -> str:
    """Gather and reduce ``count`` fp32 values a rank; twice, since what a library prepares is used the second time."""
    ops, kind = comm.ops, DTYPES["float32"]
    full, shard = comm.allocate(count * comm.size, kind), comm.allocate(count, kind)
    scratch = comm.allocate(comm.scratch_bytes(full.size, kind, kind), DTYPES["uint8"])
    gather = comm.bind_all_gather(shard, full)
    reduce = comm.bind_reduce_scatter(full, shard, scratch)
    for turn in range(2):
        ops.fill(shard, float(comm.rank + turn))
        gather.start().wait_inputs()
        expected = np.repeat(np.arange(comm.size, dtype=np.float32) + turn, count)
        if not np.array_equal(np.asarray(ops.fetch(full)), expected):
            return "the all-gather has wrong values"
        ops.fill(full, float(comm.rank + 1))
        reduce.start().wait_inputs()
        if not np.all(np.asarray(ops.fetch(shard)) == comm.size * (comm.size + 1) / 2):
            return "the reduce-scatter has wrong values"
    return ""
