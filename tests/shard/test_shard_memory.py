"""What a rank holds: 1/N of the state, as planned, as the ledger says, and never the whole model."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from mpishard.array.arena import CATEGORIES
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.shape_ops import ShapeOps
from mpishard.comm.base import Communicator
from mpishard.comm.dry import DryCommunicator
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.threads import run
from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.optim.adamw import AdamW
from mpishard.shard.engine import Engine, outline_of
from mpishard.shard.layout import layout
from mpishard.shard.precision import precision
from mpishard.shard.schedule import Settings, build_step
from mpishard.shard.steps import steps_of
from tests.shard.arrays import memory_of
from tests.shard.training import SMALL, Job, train, train_alone

STATE = ("parameters", "gradients", "optimizer")
ODD = [
    Gpt2(layers=layers, width=width, heads=1, sequence=sequence, vocabulary=vocabulary)
    for layers, width, sequence, vocabulary in [
        (0, 1, 1, 2),
        (1, 3, 5, 7),
        (2, 31, 9, 101),
        (5, 17, 3, 1009),
        (3, 129, 33, 257),
        (12, 768, 1024, 50257),
    ]
]


def none(count: int) -> int:
    return 0


def all_of(count: int) -> int:
    return count


def planned(job: Job, ranks: int, rank: int = 0, scratch: object = none, **changes: object) -> Engine:
    """An engine on shapes, of the whole batch."""
    shapes = ShapeOps(NumpyOps.own_bytes)
    layouts = {unit.name: layout(unit.specs, ranks) for unit in job.model.units}
    settings = replace(changes.get("settings", job.settings), micros=job.micros // ranks)
    steps = steps_of(outline_of(job.model), layouts, settings, precision("float32"), scratch, trained=True)
    return job.engine(DryCommunicator(rank, ranks, shapes, scratch), shapes, planned=steps, **changes)


@pytest.mark.parametrize("sizes", ODD, ids=str)
def test_the_state_is_one_nth(sizes: Gpt2) -> None:
    """At most 16 KiB of padding a rank and unit: four arrays of 4 bytes times 1024 elements."""
    model = gpt2(sizes)
    whole = 16 * model.parameters
    for ranks in range(1, 9):
        job = Job(sizes, micro_batch=1, micros=ranks)
        for rank in {0, ranks - 1}:
            held = planned(job, ranks, rank).memory()
            state = sum(held[category] for category in STATE)
            assert whole / ranks <= state <= whole / ranks + 16384 * len(model.units)
            assert held["parameters"] == held["gradients"] == held["optimizer"] // 2 == state // 4
            assert held["masters"] == 0
        replicated = planned(job.with_settings(strategy="no_shard"), ranks).memory()
        assert whole <= sum(replicated[category] for category in STATE) <= whole + 16384 * len(model.units) * ranks


def exercised(comm: Communicator, job: Job) -> Engine:
    engine = job.engine(comm)
    for step in range(2):
        engine.step(job.feed(step), lr=job.lr)
    engine.evaluate(job.feed(2))
    engine.predict(engine._runner.inputs[0].copy(), 1)
    return engine


PLANS = [
    Job(replace(SMALL, layers=layers, **changes), micro_batch, 6, settings=Settings(strategy, prefetch, recompute))
    for (layers, changes, micro_batch), (strategy, prefetch, recompute) in zip(
        itertools.cycle([(4, {}, 2), (1, {"vocabulary": 300}, 3), (0, {}, 1), (3, {"dropout": 0.0, "width": 48}, 1)]),
        [*itertools.product(["full_shard", "no_shard"], [0, 1, 2], ["none", "block"])] * 3,
        strict=False,
    )
]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_plan_is_what_is_used(ranks: int) -> None:
    """To the byte, in every category, on every rank; and each stack is used to its end."""

    def body(comm: Communicator, job: Job) -> None:
        engine = exercised(comm, job)
        rehearsed = Engine.rehearsed(
            job.model, comm, comm.ops, AdamW(), engine.settings, micro_batch=job.micro_batch
        )
        assert engine.arena.peaks() == rehearsed.arena.peaks()
        assert engine.memory() == rehearsed.memory()
        whole = planned(job, comm.size, comm.rank)
        whole.step(None, lr=0.0)
        whole.evaluate(None)
        whole._forward_one(1)
        assert whole.memory() == engine.memory()
        assert set(engine.memory()) == set(CATEGORIES)

    for job in PLANS[ranks - 1 :: 3]:
        run(ranks, lambda comm, job=job: body(comm, job))


def test_the_plan_counts_scratch() -> None:
    """A transport's scratch is staging, and as large as the largest reduction."""
    job = PLANS[0]
    without, with_scratch = (planned(job, 3, scratch=scratch) for scratch in (none, all_of))
    more = {name: with_scratch.memory()[name] - size for name, size in without.memory().items()}
    assert more == {**dict.fromkeys(CATEGORIES, 0), "staging": 4 * max(f.total for f in without.layouts.values())}


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_the_ledger_is_what_is_allocated(strategy: str) -> None:
    """Every array that an engine can reach, but for a few small ones, is in its ledger, and the other way round."""
    job = Job(settings=Settings(strategy, 1, "none"), micros=2)
    engine = exercised(LocalCommunicator(NumpyOps()), job)
    arrays = memory_of(engine)
    large = {address: array for address, array in arrays.items() if array.nbytes >= 1024}
    total = sum(array.nbytes for array in arrays.values())
    ledger = sum(engine.memory().values())
    padding = 64 * len(large)  # each is allocated with room to align it
    small = total - sum(array.nbytes for array in large.values())
    assert total - padding - small <= ledger <= total
    assert small < 4096  # masks of the attention
    for category, arrays_of_kind in {
        "parameters": ["param"],
        "gradients": ["grad"],
        "optimizer": ["exp_avg", "exp_avg_sq"],
    }.items():
        held = sum(part.arrays[name].nbytes for part in engine.state.values() for name in arrays_of_kind)
        assert engine.memory()[category] == held


DEEP = Gpt2(layers=16, width=64, heads=2, sequence=8, vocabulary=64)


def test_no_rank_holds_the_whole_model() -> None:
    """Neither an array nor, while an engine is made and trains, all that it allocates together."""
    ranks = 8
    job = Job(DEEP, micro_batch=1, micros=ranks).with_settings(prefetch=0, recompute="block")
    whole = 4 * job.model.parameters
    ops = NumpyOps()
    comm = DryCommunicator(3, ranks, ops, none)  # a rank's own part and real memory, without its peers' numbers
    tracemalloc.start()
    try:
        engine = job.engine(comm)
        _, peak = tracemalloc.get_traced_memory()
        assert peak < whole
        with np.errstate(all="ignore"):
            engine.step(job.feed(0), lr=0.0)
        _, peak = tracemalloc.get_traced_memory()
        assert peak < whole
    finally:
        tracemalloc.stop()
    assert max(array.nbytes for array in memory_of(engine).values()) < whole / 2

    tracemalloc.start()
    try:
        job.with_settings(strategy="no_shard").engine(comm)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak > 4 * whole  # the same measurement sees a model that is whole


def test_no_array_of_a_rank_is_as_large_as_the_model() -> None:
    job = Job(DEEP, micro_batch=1, micros=4)
    whole = 4 * job.model.parameters

    def largest(comm: Communicator) -> int:
        engine = exercised(comm, job)
        # The peers' arrays can be reached through a meeting of threads, so only what is not theirs is asked for.
        own = (engine.state, engine.arena, engine._runner)
        return max(array.nbytes for part in own for array in memory_of(part).values())

    # Both moments lie in one block: 8 bytes a parameter over the ranks, half of 4 bytes a parameter, and padding.
    assert max(run(4, largest)) < whole / 2 * 1.1


def test_a_schedule_that_needs_other_memory_than_the_settings() -> None:
    """It is planned as it is: fewer buffers or more, and another recomputation."""
    job = Job(replace(SMALL, layers=3))
    expected = train_alone(job, 2)
    for given, run_as in (({"prefetch": 3}, {"prefetch": 0}), ({"recompute": "block"}, {}), ({}, {"prefetch": 2})):
        settings = replace(job.settings, **run_as, micros=job.micros)
        steps = build_step(outline_of(job.model), settings)
        engine = job.with_settings(**given).engine(LocalCommunicator(NumpyOps()), schedule=steps)
        assert train(engine, job, 2) == expected
