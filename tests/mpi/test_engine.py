"""The engine on MPI processes: exact counts, planned memory, agreement, and nothing allocated in a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from mpishard.comm.base import Communicator
from mpishard.comm.local import LocalCommunicator
from mpishard.errors import CommError
from mpishard.models.gpt2 import Gpt2
from mpishard.shard.schedule import STRATEGIES
from tests.shard.arrays import memory_of
from tests.shard.damaged_ops import Burst
from tests.shard.predicted import blocks_of, predicted, used
from tests.shard.tallies import buffers, measured
from tests.shard.tracing import BOUND, growths
from tests.shard.training import SMALL, Job

pytestmark = pytest.mark.mpi

JOB = Job()


@pytest.fixture(scope="module")
def comm() -> Iterator[Communicator]:
    from mpi4py import MPI

    from mpishard.comm.mpi import MpiCommunicator

    made = MpiCommunicator(MPI.COMM_WORLD, Burst())
    yield made
    made.close()


@pytest.mark.parametrize(("strategy", "prefetch"), [("full_shard", 0), ("full_shard", 1), ("no_shard", 1)])
def test_counts_and_bytes(comm: Communicator, strategy: str, prefetch: int) -> None:
    local, blocks, ranks = 2, SMALL.layers, comm.size
    root, block = buffers(ranks)
    job = Job(replace(SMALL, dropout=0.0), 1, ranks * local).with_settings(strategy=strategy, prefetch=prefetch)
    found = measured(comm, job)
    sharded = strategy == "full_shard"
    gathers = blocks + (2 * local - 1) * (blocks - 1 - prefetch) if sharded else blocks
    each = (ranks - 1) / ranks
    for name in ("step", "step again"):
        assert found[name]["all_gather"] == (1 + gathers, each * (root + gathers * block))
        assert found[name]["reduce_scatter"] == (local * (1 + blocks), each * local * (root + blocks * block))
        assert found[name]["exchange"][0] == 2  # it begins, and it agrees
        assert found[name]["broadcast"] == (0, 0)
    assert found["evaluate"]["all_gather"][0] == sharded * (1 + local * blocks)
    assert found["predict"]["exchange"][0] == 1


@pytest.mark.parametrize(
    ("strategy", "recompute"), [("full_shard", "none"), ("full_shard", "block"), ("no_shard", "none")]
)
def test_memory_is_as_planned(comm: Communicator, strategy: str, recompute: str) -> None:
    """Scratch of the transport too; and the ledger is what arrays there are."""
    job = JOB.with_settings(strategy=strategy, recompute=recompute)
    engine = job.engine(comm, ledger=True)
    plan, before = predicted(engine, "mpi"), blocks_of(engine)
    engine.step(job.feed(0), lr=job.lr)
    assert used(engine) == plan.moments
    engine.evaluate(job.feed(1))
    engine.predict(np.zeros(SMALL.sequence, np.int64), 3)
    assert engine.memory() == plan.held
    assert blocks_of(engine) == before
    held = [array.nbytes for array in memory_of([engine.state, engine.arena, engine._runner, comm.ops]).values()]
    assert sum(held) <= sum(engine.memory().values()) + 64 * len(held) + 4096
    state = sum(engine.memory()[name] for name in ("parameters", "gradients", "optimizer"))
    ranks = comm.size if strategy == "full_shard" else 1
    whole = 16 * job.model.parameters / ranks
    assert whole <= state <= whole + 16384 * len(job.model.units) * (comm.size // ranks)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "kept"])
def test_every_moment_is_predicted(comm: Communicator, strategy: str, kind: str) -> None:
    changes: dict[str, object] = {"strategy": strategy}
    if strategy == "kept":
        changes = {"reshard_after_forward": False}
    if strategy == "hybrid_shard":
        changes["group"] = max((size for size in range(1, comm.size) if comm.size % size == 0), default=1)
    job = JOB.with_settings(recompute="block", **changes)
    engine = job.engine(comm, dtype_name=kind, ledger=True)
    engine.step(job.feed(0), lr=job.lr)
    plan = predicted(engine, "mpi")
    assert used(engine) == plan.moments
    assert engine.memory() == plan.held
    engine.close()


@pytest.mark.parametrize(
    "other",
    [replace(JOB, seed=6), JOB.with_settings(prefetch=0), JOB.with_settings(strategy="no_shard"), replace(JOB, lr=0.1)],
    ids=["seed", "prefetch", "strategy", "nothing"],
)
def test_a_rank_that_differs_is_named_on_every_rank(comm: Communicator, other: Job) -> None:
    last = comm.size - 1
    mine = other if comm.rank == last else JOB
    if last == 0 or other.lr != JOB.lr:  # the rate is given step by step, and is no part of an engine
        mine.engine(comm)
        return
    with pytest.raises(CommError, match=f"^rank {last} has schedules "):
        mine.engine(comm)
    assert len(comm.exchange(b"on")) == comm.size


def test_a_gradient_that_is_not_finite(comm: Communicator) -> None:
    """All ranks skip the update, and go on with the bits of a run without that step."""
    engine = JOB.engine(comm)
    engine.step(JOB.feed(0), lr=JOB.lr)
    before = engine.checksum()
    if comm.rank == comm.size - 1:
        comm.ops.bad = math.inf
    skipped = engine.step(JOB.feed(1), lr=JOB.lr)
    assert not skipped.updated
    assert math.isnan(skipped.grad_norm)
    assert engine.checksum() == before
    after = engine.step(JOB.feed(2), lr=JOB.lr)
    assert (engine.steps, engine.updates) == (3, 2)

    alone = JOB.engine(LocalCommunicator(Burst()))
    alone.step(JOB.feed(0), lr=JOB.lr)
    alone.steps = 2
    without = alone.step(JOB.feed(2), lr=JOB.lr)
    assert (after.loss, after.grad_norm, engine.checksum()) == (without.loss, without.grad_norm, alone.checksum())


def test_signals(comm: Communicator) -> None:
    engine, seen = JOB.engine(comm), []
    last = comm.size - 1
    for step, (more, stop) in enumerate([(-1, -1), (last, -1), (-1, 0), (-1, -1)]):
        result = engine.step(JOB.feed(step), lr=JOB.lr, more=comm.rank != more, stop=comm.rank == stop)
        seen.append((result.more, result.stop))
    assert seen == [(True, False), (False, False), (True, True), (True, False)]


def test_evaluation_and_prediction(comm: Communicator) -> None:
    sample = np.arange(SMALL.sequence) % SMALL.vocabulary
    results = []
    for one in (comm, LocalCommunicator(Burst())):
        engine = JOB.engine(one)
        engine.step(JOB.feed(0), lr=JOB.lr)
        results.append((engine.evaluate(JOB.feed(9)), engine.predict(sample, 2).tobytes(), engine.checksum()))
    assert results[0] == results[1]


def test_nothing_large_is_allocated(comm: Communicator) -> None:
    """Arrays of activations, vocabulary and parameters here are of 200 KB and more."""
    sizes = Gpt2(layers=2, width=64, heads=2, sequence=128, vocabulary=1000, dropout=0.1)
    job = Job(sizes, 8, comm.size)
    growth = growths(job.engine(comm), job)
    assert max(growth.values()) < BOUND, growth
