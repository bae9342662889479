"""One rank of a job that is not there, with its memory."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm import Node
from mpishard.comm.alone import AloneCommunicator
from mpishard.comm.scratch import transport_scratch
from mpishard.errors import CommError, ConfigError
from mpishard.testing import rounds
from tests.standin import installed

F4, F2 = DTYPES["float32"], DTYPES["bfloat16"]
#: transport, and whether arrays are on a device
WAYS = [("mpi", False), ("threads", False), ("mpi", True), ("staged", True), ("nccl", True)]


def every_rank_sends_the_same(comm: AloneCommunicator, count: int, wire: np.dtype | None, bracket: int) -> None:
    comm.bracket = bracket
    full = rounds.put(comm, mine := rounds.data(count * comm.size, F4, 1))
    before = rounds.data(count, F4, 2)
    own = mine[comm.rank * count : (comm.rank + 1) * count]
    scratch = rounds.scratch_for(comm, full, wire)
    out = rounds.put(comm, before)
    bound = comm.bind_reduce_scatter(full, out, scratch, wire)
    for add in (False, True):
        rounds.write(comm, out, before)
        bound.start(add).wait_inputs()
        want = rounds.ordered([own] * comm.size, 0, count, before if add else None, wire, bracket)
        rounds.same(rounds.read(comm, out), want, f"{comm.scratch_rule.transport} {count} {wire} {bracket} {add}")


def check(comm: AloneCommunicator) -> None:
    for wire in (None, F2):
        for bracket in (1, 2, comm.size):
            for count in (0, 1, 5, 1003):
                every_rank_sends_the_same(comm, count, wire, bracket)
    comm.bracket = 1
    shard, out = rounds.put(comm, rounds.data(7, F4, 3)), rounds.room(comm, 7 * comm.size, F4)
    comm.bind_all_gather(shard, out).start().wait_inputs()
    rounds.same(rounds.read(comm, out), np.tile(rounds.data(7, F4, 3), comm.size), "every place holds the own shard")
    own = out[comm.rank * 7 : comm.rank * 7 + 7]
    rounds.write(comm, own, rounds.data(7, F4, 4))
    comm.bind_all_gather(own, out).start().wait_inputs()
    rounds.same(rounds.read(comm, out), np.tile(rounds.data(7, F4, 4), comm.size), "in place")


@pytest.mark.parametrize("algorithm", ["auto", "pairwise"])
@pytest.mark.parametrize("size", [4, 64])
def test_with_the_scratch_of_another_algorithm(size: int, algorithm: str) -> None:
    check(AloneCommunicator(2, size, NumpyOps(), "mpi", algorithm=algorithm))


@pytest.mark.parametrize(("transport", "on_device"), WAYS)
def test_what_it_has_stands_for_all(transport: str, on_device: bool) -> None:
    if not on_device:
        check(AloneCommunicator(2, 4, NumpyOps(), transport))
        return
    with installed(late="needed"):
        from mpishard.array.cupy_ops import CupyOps

        comm = AloneCommunicator(2, 4, CupyOps(), transport)
        check(comm)
        assert comm.scratch_rule.on_device


def test_a_reduction_goes_through_all_its_scratch() -> None:
    """So the memory that a rank of the job would touch is touched."""
    comm = AloneCommunicator(5, 64, NumpyOps())
    full, out = comm.allocate(64 * 100_000, F4), comm.allocate(100_000, F4)
    full.fill(1)
    for wire in (F4, F2):
        scratch = comm.allocate(comm.scratch_bytes(full.size, F4, wire), DTYPES["uint8"])
        scratch.fill(0xFF)
        comm.bind_reduce_scatter(full, out, scratch, wire).start().wait_inputs()
        assert (out == 64).all()
        assert not (scratch.reshape(-1, 4096)[:-1] == 0xFF).all(axis=1).any()


def test_a_rank_of_a_large_job() -> None:
    comm = AloneCommunicator(1000, 1024, NumpyOps(), local_size=8)
    assert comm.node == Node(0, 8, 125, 128)
    assert comm.exchange(b"abc") == [b"abc"] * 1024
    assert comm.scratch_rule == transport_scratch("mpi", 1024)
    every_rank_sends_the_same(comm, 3, F2, 8)
    part = comm.split([list(range(i, 1024, 8)) for i in range(8)])
    assert (part.rank, part.size, part.transport, part.node) == (125, 128, "alone", Node(0, 1, 125, 128))
    assert part.scratch_rule == transport_scratch("mpi", 128)
    inside = comm.split([list(range(i, i + 8)) for i in range(0, 1024, 8)])
    assert (inside.rank, inside.size, inside.node) == (0, 8, Node(0, 8, 0, 1))


def test_what_is_made_of_collectives_goes_on() -> None:
    comm, array = AloneCommunicator(1, 4, NumpyOps()), np.arange(3.0)
    comm.all_reduce(array)
    assert array.tolist() == [4.0, 4.0, 4.0]  # its own block is one element, that of index 1
    comm.broadcast(array)
    comm.barrier()
    comm.close()


def test_bindings_are_validated_as_everywhere() -> None:
    comm = AloneCommunicator(0, 2, NumpyOps())
    with pytest.raises(CommError, match="there is no scratch; 64 bytes are needed"):
        comm.bind_reduce_scatter(comm.allocate(8, F4), comm.allocate(4, F4))
    with pytest.raises(ConfigError, match="transport 'pigeon' is not known"):
        AloneCommunicator(0, 2, NumpyOps(), "pigeon")
