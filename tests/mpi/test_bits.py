"""Every number of ranks, in processes, gives the bits that each rank also makes alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.base import Communicator
from tests.shard.damaged_ops import Reversed
from tests.shard.spoiling import spoiled_run
from tests.shard.training import MICROS, Job, Outcome, train, train_alone

pytestmark = pytest.mark.mpi

BASE = Job()
STEPS = 50


@pytest.fixture(scope="module")
def comm() -> Iterator[Communicator]:
    from mpi4py import MPI

    from mpishard.comm.mpi import MpiCommunicator

    made = MpiCommunicator(MPI.COMM_WORLD, NumpyOps())
    yield made
    made.close()


@functools.cache
def expected(steps: int) -> Outcome:
    return train_alone(BASE, steps)


def some(comm: Communicator, ranks: int) -> Communicator:
    """The communicator of the first ranks; the others form groups that can share the micro-batches too."""
    rest = list(range(ranks, comm.size))
    others = [rest] if rest and MICROS % len(rest) == 0 else [[rank] for rank in rest]
    return comm.split([list(range(ranks)), *others])


def test_all_ranks(comm: Communicator) -> None:
    assert train(BASE.engine(comm), BASE, STEPS) == expected(STEPS)


def test_fewer_ranks(comm: Communicator) -> None:
    """The first ranks of the launch, in fewer steps."""
    for ranks in (2, 3, 4):
        if ranks < comm.size:
            group = some(comm, ranks)
            assert train(BASE.engine(group), BASE, 10) == expected(10)
            group.close()


@pytest.mark.parametrize(
    "changes",
    [{"strategy": "no_shard"}, {"prefetch": 0}, {"prefetch": 2}, {"recompute": "block"}],
    ids=lambda changes: "-".join(map(str, *changes.items())),
)
def test_settings(comm: Communicator, changes: dict[str, object]) -> None:
    job = BASE.with_settings(**changes)
    assert train(job.engine(comm), job, 6) == expected(6)


def test_poison(comm: Communicator) -> None:
    """Nothing reads what has not arrived or has been released, and nothing overwrites what is still read."""
    job = replace(BASE, poison=True).with_settings(prefetch=2, recompute="block")
    assert train(job.engine(comm), job, 4) == expected(4)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_nan_in_padding(comm: Communicator, strategy: str) -> None:
    assert spoiled_run(comm, BASE.with_settings(strategy=strategy), 4) == expected(4)


def test_a_reduction_out_of_order_gives_other_bits(comm: Communicator) -> None:
    from mpi4py import MPI

    from mpishard.comm.mpi import MpiCommunicator

    other = MpiCommunicator(MPI.COMM_WORLD, Reversed())
    outcome = train(BASE.engine(other), BASE, 4)
    other.close()
    # One rank has nothing to reverse.
    assert (outcome.checksum != expected(4).checksum) == (comm.size > 1)
    assert outcome.losses == pytest.approx(expected(4).losses, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "prefetch", "recompute"),
    list(itertools.product(["full_shard", "no_shard"], [0, 1, 2], ["none", "block"])),
)
def test_full_product(comm: Communicator, strategy: str, prefetch: int, recompute: str) -> None:
    """On all ranks of the launch; six divide the micro-batches too."""
    job = BASE.with_settings(strategy=strategy, prefetch=prefetch, recompute=recompute)
    assert train(job.engine(comm), job, STEPS) == expected(STEPS)
