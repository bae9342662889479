"""The library interface in an MPI program: communicators of its own, its own messages, one duplicate, equal errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpishard
from mpishard.errors import ConfigError, EngineError
from mpishard.models.mlp import MlpClassifier, mlp_classifier
from mpishard.optim import AdamW
from mpishard.shard.engine import Engine
from mpishard.shard.feed import Batch

pytestmark = pytest.mark.mpi

MODEL = mlp_classifier(MlpClassifier(features=5, classes=3, width=70, layers=2))


@pytest.fixture
def world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


def data(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return mpishard.batch(rng.standard_normal((12, 5)), rng.integers(0, 3, 12))


def engine(comm: Any, **changes: Any) -> Engine:
    options = {"global_batch": 12, **changes}
    return mpishard.full_shard(MODEL, AdamW(), comm, **options)


def train(one: Engine, steps: int = 3) -> tuple[object, ...]:
    losses = tuple(one.step(data(step), lr=0.05).loss for step in range(steps))
    return losses, one.checksum(), one.parameter("hidden.1.weight").tobytes()


def alone(**changes: Any) -> tuple[object, ...]:
    from mpi4py import MPI

    return train(engine(MPI.COMM_SELF, **changes))


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_all_ranks(world: Any, strategy: str) -> None:
    one = engine(world, strategy=strategy)
    assert (one.comm.rank, one.comm.size) == (world.rank, world.size)
    assert train(one) == alone()
    one.close()


def test_a_communicator_of_the_programs_own(world: Any) -> None:
    """Two halves train at once, each its own model, on ranks in another order."""
    half = world.Split(world.rank % 2, -world.rank)
    one = engine(half, seed=world.rank % 2)
    assert (one.comm.rank, one.comm.size) == (half.rank, half.size)
    found = train(one)
    assert found == alone(seed=world.rank % 2)
    everybody = world.allgather((world.rank % 2, found[1]))
    assert len(set(everybody)) == min(2, world.size)
    one.close()
    half.Free()


def test_the_programs_own_messages_between_steps(world: Any) -> None:
    """Blocking, nonblocking and pending ones, on the very communicator that was given."""
    one, results = engine(world), []
    for step in range(3):
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        pending = world.irecv(source=left, tag=5)
        results.append(one.step(data(step), lr=0.05).loss)  # while a receive of the program's is open
        assert world.allreduce(world.rank) == sum(range(world.size))
        world.send(("mine", world.rank), dest=right, tag=5)
        assert pending.wait() == ("mine", left)
    assert (tuple(results), one.checksum()) == alone()[:2]
    one.close()


def test_a_rank_left_out_of_a_split(world: Any) -> None:
    from mpi4py import MPI

    inside = world.rank < max(1, world.size - 1)
    part = world.Split(0 if inside else MPI.UNDEFINED, world.rank)
    if inside:
        one = engine(part)
        assert train(one) == alone()
        one.close()
        part.Free()
    else:
        with pytest.raises(ConfigError, match=r"^comm is MPI\.COMM_NULL: this process is in no group of the split"):
            engine(part)


def test_it_duplicates_once_and_gives_back(world: Any) -> None:
    """The communicator that was given remains the program's; the duplicate and the thread are gone after close."""
    from mpi4py import MPI

    given, duplicates = world.Dup(), []

    class Counted(MPI.Intracomm):
        def Dup(self, info: Any = MPI.INFO_NULL) -> Any:  # noqa: N802
            duplicates.append(True)
            return MPI.Intracomm(given).Dup()

    before = threading.active_count()
    one = engine(Counted(given))
    train(one, 1)
    assert len(duplicates) == (world.size > 1)
    one.close()
    assert threading.active_count() == before
    with pytest.raises(EngineError, match="the engine was closed before step 1"):
        one.step(data(), lr=0.05)
    assert given.allreduce(1) == world.size
    given.Free()


def test_errors_are_the_same_on_every_rank_and_leave_nothing(world: Any) -> None:
    last, before = world.size - 1, threading.active_count()
    for changes, message in (
        ({"micro_batch": 7}, "micro_batch 7 does not divide global_batch 12; use 1, 2, 3, 4, 6 or 12"),
        ({"dtype": "bfloat8"}, "dtype is 'bfloat8'"),
        ({"seed": -1}, "seed is -1"),
        ({"dtype": ["float32"]}, r"dtype is \['float32'\]; it must be one of float32"),
        ({"transport": "pigeon"}, "transport 'pigeon' is not known; choose one of auto, local, node, mpi"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            engine(world, **(changes if world.rank == last else {}))
        assert len(set(world.allgather(str(caught.value)))) == 1
        assert threading.active_count() == before
    one = engine(world)
    wrong = data()
    if world.rank == last:
        wrong.targets[0] = 3
    with pytest.raises(ConfigError, match="a target of the batch is 3; it must be 0 to 2"):
        one.step(wrong, lr=0.05)
    assert train(one) == alone()
    one.close()


def test_what_one_rank_does_wrong_with_an_engine(world: Any) -> None:
    """It is raised on all ranks, and the engine goes on with the bits of one that was always used well."""
    last, point = world.rank == world.size - 1, np.zeros(5)
    one = engine(world)
    wrongs: list[tuple[Callable[[], object], str]] = [
        (lambda: one.step(data(), lr=float("nan") if last else 0.1), "^lr is nan; it must be a finite number, 0 or mo"),
        (lambda: one.step("data" if last else data(), lr=0.1), "^the feed is a str; give mpishard.batch"),
        (lambda: one.predict(point, 1 if last else 0), "^position is 1; it must be a whole number, 0 to 0$"),
        (lambda: one.parameter(3 if last else "head.bias"), "^the parameter's name is 3; give a text"),
    ]
    if world.size > 1:
        wrongs.append((lambda: one.step(data() if last else data().__call__, lr=0.1), "gives a batch, rank 0 a functi"))
    for call, message in wrongs:
        with pytest.raises(ConfigError, match=message) as caught:
            call()
        assert len(set(world.allgather(str(caught.value)))) == 1
    assert train(one) == alone()
    one.close()


def test_an_intercommunicator_is_refused(world: Any) -> None:
    if world.size < 2:
        pytest.skip("one rank makes no intercommunicator")
    half = world.Split(min(world.rank, 1), world.rank)
    both = half.Create_intercomm(0, world, 1 if world.rank == 0 else 0)
    with pytest.raises(ConfigError, match=r"^comm is an intercommunicator; merge it first"):
        engine(both)
    both.Free()
    half.Free()


def test_a_program_without_a_communicator_is_one_rank(world: Any) -> None:
    if world.size > 1:
        with pytest.raises(ConfigError, match=r"^comm is None, one rank alone, and the launcher started"):
            engine(None)
    else:
        assert train(engine(None)) == alone()
