"""What a rank holds: 1/N of the state, as planned, as the ledger says, and never the whole model."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.base import Communicator
from mpishard.comm.dry import DryCommunicator
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.scratch import transport_scratch
from mpishard.comm.threads import run
from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.shard.engine import Engine, outline_of
from mpishard.shard.schedule import STRATEGIES, Settings, build_step
from tests.shard.arrays import memory_of
from tests.shard.predicted import dry, predicted
from tests.shard.training import SMALL, Job, train, train_alone

STATE = ("parameters", "masters", "gradients", "optimizer")
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


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", ODD, ids=str)
def test_the_state_is_one_nth(sizes: Gpt2, kind: str) -> None:
    """16 bytes a parameter, of which each strategy shards its part; at most 16 KiB of padding a rank and unit.

    Four arrays of 4 bytes times 1024 elements. What is whole is padded for all ranks. In 16 bits parameters are there
    twice: 2 bytes of what is computed with, where that is kept, and masters.
    """
    model = gpt2(sizes)
    count, units = model.parameters, len(model.units)
    narrow = 2 if kind == "bfloat16" else 4
    for ranks in range(1, 9):
        job = Job(sizes, micro_batch=1, micros=ranks)
        for rank in {0, ranks - 1}:
            held = dry(job, rank, ranks, dtype_name=kind).memory()
            state = sum(held[category] for category in STATE)
            assert 16 * count / ranks <= state <= 16 * count / ranks + 16384 * units
            params = "masters" if narrow == 2 else "parameters"
            assert held[params] == held["gradients"] == held["optimizer"] // 2 == state // 4
        for strategy in ("shard_grad_op", "shard_optimizer", "no_shard"):
            held = dry(job.with_settings(strategy=strategy), ranks - 1, ranks, dtype_name=kind).memory()
            copies = 1 if strategy == "no_shard" else ranks
            whole = 12 * count / copies + narrow * count + (4 * count / copies if narrow == 2 else 0)
            state = sum(held[category] for category in STATE)
            assert whole <= state <= whole + 16384 * units * (ranks if strategy == "no_shard" else 2 * ranks)
            assert held["gathered"] == 0
            assert held["gradients"] == held["optimizer"] // 2
        for group in (size for size in range(1, ranks) if ranks % size == 0):
            other = job.with_settings(strategy="hybrid_shard", group=group)
            held = dry(other, ranks - 1, ranks, dtype_name=kind).memory()
            state = sum(held[category] for category in STATE)
            assert 16 * count / group <= state <= 16 * count / group + 16384 * units * ranks / group


def exercised(comm: Communicator, job: Job, **changes: object) -> Engine:
    engine = job.engine(comm, **changes)
    for step in range(2):
        engine.step(job.feed(step), lr=job.lr)
    engine.evaluate(job.feed(2))
    engine.predict(engine._runner.inputs[0].copy(), 1)
    return engine


@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_ledger_is_what_is_allocated(strategy: str, kind: str) -> None:
    """Every array that an engine can reach, but for a few small ones, is in its ledger, and the other way round."""
    job = Job(settings=Settings(strategy, 1, "none"), micros=2)
    engine = exercised(LocalCommunicator(NumpyOps()), job, dtype_name=kind)
    arrays = memory_of(engine)
    large = {address: array for address, array in arrays.items() if array.nbytes >= 1024}
    total = sum(array.nbytes for array in arrays.values())
    ledger = sum(engine.memory().values())
    padding = 64 * len(large)  # each is allocated with room to align it
    small = total - sum(array.nbytes for array in large.values())
    assert total - padding - small <= ledger <= total
    assert small < 4096  # masks of the attention
    kept = "parameters" if kind == "float32" else "masters"
    for category, arrays_of_kind in {
        kept: ["param"],
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
    # A rank's own part and real memory, without its peers' numbers.
    comm = DryCommunicator(3, ranks, ops, transport_scratch("threads", ranks))
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
        assert predicted(engine, "local", schedule=steps).held == engine.memory()
