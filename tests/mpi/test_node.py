"""Ranks that share memory: the contract, arrays from elsewhere, mismatched starts, lifetimes, and training's bits."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.choice import connect
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.node import NodeCommunicator
from mpishard.comm.shared import SharedMemory
from mpishard.errors import CommError, ConfigError
from mpishard.testing import communicator as suite
from mpishard.testing import rounds
from tests.shard.training import Job, train

pytestmark = pytest.mark.mpi

F4 = DTYPES["float32"]


@pytest.fixture(scope="module", params=[True, False], ids=["thread", "inline"])
def comm(request: pytest.FixtureRequest) -> Iterator[NodeCommunicator]:
    from mpi4py import MPI

    made = NodeCommunicator(MPI.COMM_WORLD, NumpyOps(), threaded=request.param)
    yield made
    made.close()


@pytest.mark.parametrize("name", suite.CHECKS)
def test_contract(comm: NodeCommunicator, name: str) -> None:
    suite.CHECKS[name](comm)


@pytest.mark.parametrize("foreign", [0, -1, None], ids=["first", "last", "all"])
def test_inputs_from_elsewhere(comm: NodeCommunicator, foreign: int | None) -> None:
    """On one rank or on all: they are read as they are at each start."""
    mine = foreign is None or comm.rank == foreign % comm.size
    make = NumpyOps().empty if mine else comm.allocate
    full, out, shard = make(7 * comm.size, F4), np.empty(7, np.float32), make(5, F4)
    gathered = np.empty(5 * comm.size, np.float32)
    reduce, gather = comm.bind_reduce_scatter(full, out), comm.bind_all_gather(shard, gathered)
    for round_ in range(3):
        full[:] = rounds.data(full.size, F4, round_, comm.rank)
        shard[:] = rounds.data(5, F4, round_, comm.rank)
        works = [reduce.start(), gather.start()]
        for work in works:
            work.wait_inputs()
        fulls = [rounds.data(full.size, F4, round_, rank) for rank in range(comm.size)]
        rounds.same(out, rounds.ordered(fulls, 7 * comm.rank, 7, None), "a sum")
        shards = np.concatenate([rounds.data(5, F4, round_, rank) for rank in range(comm.size)])
        rounds.same(gathered, shards, "a gather")


def test_ranks_that_start_different_collectives_are_told(comm: NodeCommunicator) -> None:
    if comm.size == 1:
        pytest.skip("one rank is of one mind")
    part = comm.split([list(range(comm.size))])
    one, other = (part.bind_all_gather(comm.allocate(3, F4), comm.allocate(3 * comm.size, F4)) for _ in range(2))
    work = (other if comm.rank == 1 else one).start()
    if comm.rank < 2:  # each looks at the next rank first
        other_rank = (comm.rank + 1) % comm.size
        told = (
            f"rank {other_rank} starts all-gather number {1 - comm.rank}, "
            f"rank {comm.rank} starts all-gather number {comm.rank}"
        )
        with pytest.raises(CommError, match=told):
            work.wait()
    comm.barrier()
    part.close()


def test_more_starts_than_places_on_the_board(comm: NodeCommunicator) -> None:
    shard, out = comm.allocate(1, F4), comm.allocate(comm.size, F4)
    gather = comm.bind_all_gather(shard, out)
    for start in range(2100):
        shard[0] = start + comm.rank
        gather.start().wait_inputs()
        assert out.tolist() == [start + rank for rank in range(comm.size)]


def test_memory_and_descriptors_are_given_back(comm: NodeCommunicator) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            shared = sum("memfd:mpishard" in line for line in maps)
        return shared, len(os.listdir("/proc/self/fd"))

    comm.barrier()
    before = held()
    arrays = [comm.allocate(1 << 20, F4) for _ in range(3)]
    out = comm.allocate((1 << 20) * comm.size, F4)
    bound = [comm.bind_all_gather(array, out) for array in arrays]
    during = held()
    assert during[0] - before[0] == 3 * comm.size + 1  # peers' shards, and nothing of their outputs
    assert during[1] - before[1] == 4
    del arrays, out, bound
    comm._names.clear()
    assert held() == before
    comm.barrier()


def test_auto_is_node_on_one_host() -> None:
    from mpi4py import MPI

    for asked, name in (("auto", "node"), ("node", "node"), ("mpi", "mpi")):
        made = connect(MPI.COMM_WORLD, NumpyOps(), asked)
        assert made.transport == name
        assert made.describe().startswith(f"{name}, ")
        made.close()


def test_memory_that_cannot_be_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank: asked for by name it is an error on all; auto says why it is mpi."""
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_size() == 1:
        pytest.skip("one rank shares nothing")
    at = SharedMemory.at

    def refuse(self: SharedMemory, *place: object) -> object:
        raise ConfigError("memory of process 7 of this host cannot be mapped")

    monkeypatch.setattr(SharedMemory, "at", refuse if MPI.COMM_WORLD.Get_rank() == 0 else at)
    with pytest.raises(ConfigError, match="memory of process 7"):
        connect(MPI.COMM_WORLD, NumpyOps(), "node")
    made = connect(MPI.COMM_WORLD, NumpyOps())
    assert made.transport == "mpi"
    assert "not node, since memory of process 7" in made.describe()
    made.close()


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "shard_optimizer", "hybrid_shard"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_training_has_the_bits_of_one_rank(comm: NodeCommunicator, strategy: str, kind: str) -> None:
    group = 2 if strategy == "hybrid_shard" and comm.size % 2 == 0 else 0
    job = Job().with_settings(strategy=strategy, group=group)
    found = train(job.engine(comm, dtype_name=kind), job, 4)
    alone = Job().engine(LocalCommunicator(NumpyOps()), dtype_name=kind)
    expected = train(alone, Job(), 4)
    if group:  # its groups add up by themselves first
        assert found.losses[0] == expected.losses[0]
    else:
        assert found == expected
