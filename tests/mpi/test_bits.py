"""Every number of ranks, in processes, gives the bits that each rank also makes alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.base import Communicator
from mpishard.comm.local import LocalCommunicator
from mpishard.shard.loss_scale import LossScale
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
    [
        {"strategy": "no_shard"},
        {"strategy": "shard_grad_op"},
        {"strategy": "shard_optimizer"},
        {"strategy": "hybrid_shard"},
        {"reshard_after_forward": False},
        {"prefetch": 0},
        {"prefetch": 2},
        {"recompute": "block"},
    ],
    ids=lambda changes: "-".join(map(str, *changes.items())),
)
def test_settings(comm: Communicator, changes: dict[str, object]) -> None:
    job = BASE.with_settings(**changes)
    assert train(job.engine(comm), job, 6) == expected(6)


def precise(precision: str) -> dict[str, Any]:
    """An engine's element types; a loss scale of its own where one is needed."""
    kind, wire = {
        "fp32 as bf16": ("float32", "bfloat16"),
        "bf16": ("bfloat16", ""),
        "fp16": ("float16", ""),
    }[precision]
    return {"dtype_name": kind, "reduce_dtype": wire, "loss_scale": LossScale(1024.0) if kind == "float16" else None}


@functools.cache
def expected_in(precision: str) -> Outcome:
    return train(BASE.engine(LocalCommunicator(NumpyOps()), **precise(precision)), BASE, 2)


@pytest.mark.parametrize("precision", ["fp32 as bf16", "bf16", "fp16"])
def test_precisions(comm: Communicator, precision: str) -> None:
    """One checksum for each, whatever the strategy."""
    for changes in (
        {},
        {"strategy": "no_shard"},
        {"strategy": "shard_grad_op", "recompute": "block"},
        {"strategy": "shard_optimizer", "prefetch": 0},
        {"reshard_after_forward": False},
    ):
        job = BASE.with_settings(**changes)
        assert train(job.engine(comm, **precise(precision)), job, 2) == expected_in(precision), changes


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_groups(comm: Communicator, kind: str) -> None:
    """With one micro-batch a rank, groups give full_shard's bits in brackets of as many ranks."""
    from mpi4py import MPI

    from mpishard.comm.mpi import MpiCommunicator

    job = replace(BASE, micros=comm.size)
    for group in (size for size in range(1, comm.size) if comm.size % size == 0):
        grouped = job.with_settings(strategy="hybrid_shard", group=group)
        engine = grouped.engine(comm, dtype_name=kind)
        outcome = train(engine, grouped, 4)
        engine.close()
        bracketed = MpiCommunicator(MPI.COMM_WORLD, NumpyOps())
        bracketed.bracket = group
        assert outcome == train(job.engine(bracketed, dtype_name=kind), job, 4)
        bracketed.close()


def test_losses_of_groups_and_of_one_reduction_stay_close(comm: Communicator) -> None:
    changes = [{"accumulate": "no_sync"}]
    changes += [{"strategy": "hybrid_shard", "group": comm.size // 2}] if comm.size % 2 == 0 else []
    for one in changes:
        job = replace(BASE, lr=1e-3).with_settings(**one)
        engine = job.engine(comm)
        outcome = train(engine, job, 10)
        engine.close()
        assert outcome.losses == pytest.approx(expected_slowly().losses, rel=1e-5)


@functools.cache
def expected_slowly() -> Outcome:
    return train_alone(replace(BASE, lr=1e-3), 10)


def test_poison(comm: Communicator) -> None:
    """Nothing reads what has not arrived or has been released, and nothing overwrites what is still read."""
    job = replace(BASE, poison=True).with_settings(prefetch=2, recompute="block")
    assert train(job.engine(comm), job, 4) == expected(4)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "shard_grad_op"])
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
