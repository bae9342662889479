"""One gathered copy for the ranks of a host: what arrives, who may write when, mistakes, what an engine makes of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES, DType
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.mpi import MpiCommunicator
from mpishard.comm.node import NodeCommunicator
from mpishard.errors import CommError, ConfigError
from mpishard.testing import rounds
from tests.shard.predicted import predicted, used
from tests.shard.training import Job, train

pytestmark = pytest.mark.mpi

F4 = DTYPES["float32"]


@pytest.fixture(scope="module")
def comm() -> Iterator[NodeCommunicator]:
    from mpi4py import MPI

    made = NodeCommunicator(MPI.COMM_WORLD, NumpyOps())
    yield made
    made.close()


@pytest.mark.parametrize("count", [0, 1, 7, 300_001])
@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "float16"])
def test_each_rank_writes_its_part(comm: NodeCommunicator, name: str, count: int) -> None:
    kind: DType = DTYPES[name]
    wide = DTYPES["float64" if name == "float64" else "float32"]
    pool = comm.pool(2 * 64 * -(-count * comm.size * kind.itemsize // 64) + 64)
    out = pool.bytes[64 : 64 + count * comm.size * kind.itemsize].view(kind)
    shard = np.empty(count, wide)
    gather = pool.bind(shard, out)
    for round_ in range(3):
        shard[:] = rounds.data(count, wide, round_, comm.rank)
        time.sleep(0.002 * ((comm.rank + round_) % 3))
        work = gather.start()
        work.wait()
        due = np.concatenate([rounds.data(count, wide, round_, rank) for rank in range(comm.size)])
        rounded = np.empty(due.size, kind)
        comm.ops.copy(due, rounded)
        rounds.same(out, rounded, "a shared gather")
        shard[:] = -1.0  # it is free
        work.released()
        work.released()  # again is free
        work.wait_inputs()


def test_nothing_is_written_before_all_have_let_go(comm: NodeCommunicator) -> None:
    """One rank after another is slow to let go of what the others gather anew."""
    count = 50_000
    pool = comm.pool(4 * count * comm.size)
    out, shard = pool.bytes.view(F4), np.empty(count, np.float32)
    one, other = pool.bind(shard, out), pool.bind(shard, out)
    for round_ in range(4 * comm.size):
        shard[:] = 1000.0 * round_ + comm.rank
        work = (one if round_ % 2 else other).start()
        work.wait()
        if round_ % comm.size == comm.rank:
            time.sleep(0.01)
        due = 1000.0 * round_ + np.arange(comm.size)
        assert (out.reshape(comm.size, count) == due[:, None]).all()
        work.released()


def test_two_in_flight_are_let_go_of_in_another_order(comm: NodeCommunicator) -> None:
    count = 1000
    pool = comm.pool(2 * 4 * count * comm.size)
    outs = pool.bytes.view(F4).reshape(2, -1)
    shards = [np.empty(count, np.float32) for _ in outs]
    gathers = [pool.bind(shard, out) for shard, out in zip(shards, outs, strict=True)]
    for round_ in range(20):
        works = []
        for which, (shard, gather) in enumerate(zip(shards, gathers, strict=True)):
            shard[:] = 10 * round_ + which + comm.rank / 8
            works.append(gather.start())
        time.sleep(0.001 * ((round_ + comm.rank) % comm.size))
        for which in (0, 1) if round_ % 3 else (1, 0):
            works[which].wait()
            due = 10 * round_ + which + np.arange(comm.size) / 8
            assert (outs[which].reshape(comm.size, count) == due[:, None].astype(np.float32)).all()
        for which in (1, 0) if round_ % 2 else (0, 1):
            works[which].released()


def test_mistakes_are_told_on_all_ranks(comm: NodeCommunicator) -> None:
    pool = comm.pool(4 * 6 * comm.size)
    out, shard = pool.bytes.view(F4), np.zeros(6, np.float32)
    wrong = comm.rank == comm.size - 1  # one rank alone
    for mistake, message in (
        ((np.zeros(5, np.float32), out), "out holds"),
        ((np.zeros(6, np.float64), out), "shard is float64 and out is float32"),
        ((np.zeros((6, 2), np.float32)[:, 0], out), "1-D contiguous"),
        ((shard, np.zeros(6 * comm.size, np.float32)), "out is no part of the pool"),
        ((out[:6], out), "shard lies in the pool"),
    ):
        with pytest.raises(CommError, match=f"on rank {comm.size - 1}, .*{message}"):
            pool.bind(*(mistake if wrong else (shard, out)))
    pool.bind(shard, out)


def test_other_transports_have_none() -> None:
    from mpi4py import MPI

    made = MpiCommunicator(MPI.COMM_WORLD, NumpyOps())
    assert made.sharers == 1
    with pytest.raises(ConfigError, match="transport mpi has no memory that ranks share; use transport node"):
        made.pool(64)
    made.close()


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes", [{}, {"prefetch": 0}, {"reshard_after_forward": False}, {"strategy": "hybrid_shard"}]
)
def test_an_engine_holds_its_part(comm: NodeCommunicator, changes: dict[str, object], kind: str) -> None:
    """What is planned is what is held at each instruction, less than with a copy each, and no bit differs."""
    if changes.get("strategy"):
        changes = {**changes, "group": max(1, comm.size // 2) if comm.size % 2 == 0 else comm.size}
    job = Job().with_settings(**changes)
    group = int(str(changes.get("group", comm.size)))
    found = {}
    for shares in (True, False):
        comm.shares_gathered = shares
        engine = job.engine(comm, dtype_name=kind, ledger=True)
        plan = predicted(engine, "node", shares_gathered=shares)
        outcome = train(engine, job, 3)
        assert engine.memory() == plan.held
        assert used(engine) == plan.moments
        found[shares] = engine.memory(), outcome, plan.steps
        engine.close()
    comm.shares_gathered = True
    assert found[True][1] == found[False][1]
    assert found[False][2].sharers == 1
    if group > 1:
        assert found[True][2].sharers == group
        assert sum(found[True][0].values()) < sum(found[False][0].values())


def test_poison_gathers_into_copies_of_its_own(comm: NodeCommunicator) -> None:
    """A rank must not fill with NaN what another reads."""
    job = replace(Job(), poison=True)
    engine = job.engine(comm)
    assert engine.world.sharers == 1
    assert train(engine, job, 2) == train(Job().engine(comm), Job(), 2)
    engine.close()
