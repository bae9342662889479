"""How much scratch a reduce-scatter takes, as a function of names and numbers."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm import LocalCommunicator, run_threads, scratch
from mpishard.comm.scratch import LEAST_BYTES, SLOT_BYTES, STAGE_BYTES, Scratch, cut, transport_scratch
from mpishard.errors import ConfigError
from mpishard.testing import rounds

F8, F4, F2 = DTYPES["float64"], DTYPES["float32"], DTYPES["bfloat16"]
COUNT = 1 << 30
KINDS = [(F4, F4), (F2, F2), (F8, F8), (F4, F2)]


@pytest.mark.parametrize(("kind", "wire"), KINDS)
@pytest.mark.parametrize("size", [2, 3, 4, 7, 64, 512])
def test_on_the_host_two_slots_are_enough(size, kind, wire):
    for count in (0, size, 1000 * size, 10**6 * size, COUNT // size * size, 3 * COUNT // size * size):
        assert transport_scratch("mpi", size)(count, kind, wire) <= 2 * SLOT_BYTES + 4 * 64
    assert transport_scratch("mpi", size)(1000 * size, kind, kind) <= -(-1000 * size * kind.itemsize // 64) * 64


@pytest.mark.parametrize(("kind", "wire"), KINDS)
def test_with_very_many_ranks_messages_stay_worth_their_start(kind, wire):
    rows = 2 if kind != wire else 1
    for size in (2048, 10000):
        found = cut(COUNT // size * size, size, kind, wire)
        assert LEAST_BYTES * 0.9 < found.width * found.itemsize <= LEAST_BYTES
        assert found.nbytes <= 2 * rows * LEAST_BYTES * size


@pytest.mark.parametrize(("kind", "wire"), KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 96, 2**28])
@pytest.mark.parametrize("size", [1, 2, 3, 1024])
def test_pieces_cover_a_block_once(size, chunk, kind, wire):
    for each in (1, 2, 1000, 10**6, 10**7 + 1):
        found = cut(each * size, size, kind, wire, chunk)
        assert (found.pieces - 1) * found.width < each <= found.pieces * found.width
        if size > 1:
            assert found.width * found.itemsize <= max(chunk, found.itemsize)
            assert found.slots == min(2, found.pieces)


def test_what_counts_cannot_name_is_packed():
    """MPI's counts and displacements are ints."""
    assert not cut(2**31 - 4, 4, F4, F4).packed
    assert cut(2**31, 4, F4, F4).packed


def test_what_each_transport_asks_for():
    whole = 4 * COUNT
    for name, on_device, plain, rounded in (
        ("threads", False, 0, whole // 2),
        ("mpi", True, whole, whole),
        ("nccl", True, whole, whole),
        ("staged", True, STAGE_BYTES, whole // 2 + STAGE_BYTES),
    ):
        found = transport_scratch(name, 4, on_device=on_device)
        assert (found(COUNT, F4, F4), found(COUNT, F4, F2)) == (plain, rounded), name
        assert found.of(1)(COUNT, F4, F4) == 0
        assert found.of(1)(COUNT, F4, F2) == whole // 2
    assert Scratch("nccl", 4, True, sums="library")(COUNT, F4, F4) == whole // 4
    assert transport_scratch("local", 1)(COUNT, F4, F4) == 0
    assert transport_scratch("local", 1)(COUNT, F4, F2) == transport_scratch("mpi", 1)(COUNT, F4, F2) == SLOT_BYTES


def test_communicators_answer_the_same():
    assert run_threads(2, lambda comm: comm.scratch_rule)[0] == transport_scratch("threads", 2)
    assert LocalCommunicator(NumpyOps()).scratch_rule == transport_scratch("local", 1)


def test_an_unknown_transport_is_refused():
    with pytest.raises(ConfigError, match="transport 'pigeon' is not known; choose one of local, threads, mpi"):
        transport_scratch("pigeon", 2)


def test_one_rank_rounds_in_pieces(monkeypatch):
    monkeypatch.setattr(scratch, "SLOT_BYTES", 256)
    monkeypatch.setattr(scratch, "LEAST_BYTES", 64)
    comm = LocalCommunicator(NumpyOps())
    assert comm.scratch_bytes(1001, F4, F2) == 256
    reduce = rounds.Reduce(comm, 1001, F4, wire=F2)
    for add in (False, True):
        reduce.fill(0)
        reduce.collective.start(add).wait_inputs()
        reduce.check(0, add)
    full = comm.allocate(3, F4)
    full[:] = np.float32(1 + 2.0**-9)
    out = comm.allocate(3, F4)
    comm.bind_reduce_scatter(full, out, rounds.scratch_for(comm, full, F2), F2).start().wait_inputs()
    assert out.tolist() == [1.0] * 3
