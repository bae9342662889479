"""float16 and its loss scale: a gradient that overflows on one rank skips that step on all, and no other."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpishard.array.constants import IGNORE
from mpishard.array.dtypes import Array
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.base import Communicator
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.threads import run
from mpishard.errors import CommError
from mpishard.shard.engine import Engine
from mpishard.shard.loss_scale import LossScale
from mpishard.shard.results import StepResult
from tests.shard.training import SMALL, Job

JOB = Job(replace(SMALL, layers=1, width=9, sequence=24, dropout=0.0), micro_batch=4, micros=6, lr=1e-3)
#: the step, and its micro-batch, that overflow; every step of the others is far from it
WHEN, WHICH = 2, 4
STRATEGIES = ["full_shard", "no_shard", "shard_grad_op", "shard_optimizer", "hybrid_shard"]


def feed(job: Job, step: int, bad: int = WHEN) -> Callable[[int, Array, Array], None]:
    """One target in each micro-batch but in that one, which has them all and the same: its gradients add up."""

    def fill(micro: int, inputs: Array, targets: Array) -> None:
        job.feed(step)(micro, inputs, targets)
        if (step, micro) == (bad, WHICH):
            inputs[...], targets[...] = 3, 5
        else:
            targets[...] = IGNORE
            targets[0, 0] = micro

    return fill


def steps_of(engine: Engine, job: Job, count: int, bad: int = WHEN) -> list[StepResult]:
    return [engine.step(feed(job, step, bad), lr=job.lr) for step in range(count)]


@functools.cache
def edge() -> float:
    """The smallest scale at which that micro-batch overflows; the others are finite with four times as much."""
    for exponent in range(14, 40):
        scale = 2.0**exponent
        engine = JOB.engine(LocalCommunicator(NumpyOps()), dtype_name="float16", loss_scale=fixed(scale))
        if not all(result.updated for result in steps_of(engine, JOB, WHEN + 1)):
            return scale
    raise AssertionError("nothing overflows")


def fixed(scale: float) -> LossScale:
    return LossScale(scale, dynamic=False)


def held(engine: Engine) -> list[bytes]:
    return [array.tobytes() for part in engine.state.values() for name, array in part.arrays.items() if name != "grad"]


def test_the_scale_is_where_one_micro_batch_overflows_and_no_other() -> None:
    for scale in (edge(), 4 * edge()):
        engine = JOB.engine(LocalCommunicator(NumpyOps()), dtype_name="float16", loss_scale=fixed(scale))
        assert [result.updated for result in steps_of(engine, JOB, 4)] == [True, True, False, True]
        engine = JOB.engine(LocalCommunicator(NumpyOps()), dtype_name="float16", loss_scale=fixed(scale))
        assert all(result.updated for result in steps_of(engine, JOB, 4, bad=99))
    engine = JOB.engine(LocalCommunicator(NumpyOps()), dtype_name="float16", loss_scale=fixed(edge() / 2))
    assert all(result.updated for result in steps_of(engine, JOB, 4))


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [*((2, strategy) for strategy in STRATEGIES), (3, "full_shard"), (6, "shard_grad_op"), (6, "hybrid_shard")],
)
def test_an_overflow_on_one_rank_skips_that_step_on_all_and_no_other(ranks: int, strategy: str) -> None:
    """Weights, moments and Adam's count stay, the scale halves, and doubles after so many finite steps."""
    group = 2 if strategy == "hybrid_shard" and ranks % 2 == 0 else 0
    job = JOB.with_settings(strategy=strategy, group=group)

    def body(comm: Communicator) -> tuple[Any, ...]:
        scale = LossScale(edge(), every=3)
        engine = job.engine(comm, dtype_name="float16", loss_scale=scale)
        results = steps_of(engine, job, WHEN)
        before, updates = held(engine), engine.updates
        skipped = engine.step(feed(job, WHEN), lr=job.lr)
        assert held(engine) == before
        assert (engine.updates, updates) == (WHEN, WHEN)
        assert math.isnan(skipped.grad_norm)
        assert math.isfinite(skipped.loss)  # it is the gradient that float16 cannot hold
        assert (scale.scale, scale.good) == (edge() / 2, 0)
        results += [skipped, *(engine.step(feed(job, step), lr=job.lr) for step in range(WHEN + 1, 8))]
        assert [result.updated for result in results] == [step != WHEN for step in range(8)]
        assert engine.updates == 7
        high, low = edge(), edge() / 2
        assert [result.loss_scale for result in results] == [high, high, high, low, low, low, high, high]
        return engine.checksum(), tuple(result.loss for result in results)

    outcomes = run(ranks, body)
    assert outcomes == [outcomes[0]] * ranks
    if not group:  # which add up in another order
        assert outcomes[0] == alone()


@functools.cache
def alone() -> tuple[Any, ...]:
    engine = JOB.engine(LocalCommunicator(NumpyOps()), dtype_name="float16", loss_scale=LossScale(edge(), every=3))
    results = steps_of(engine, JOB, 8)
    return engine.checksum(), tuple(result.loss for result in results)


def test_the_run_goes_on_as_without_that_step() -> None:
    """The bits of a run that has the next steps at the scale to which the overflow led."""
    first = JOB.engine(LocalCommunicator(NumpyOps()), dtype_name="float16", loss_scale=LossScale(edge()))
    steps_of(first, JOB, WHEN + 1)
    first.step(feed(JOB, 5), lr=JOB.lr)
    scale = LossScale(edge())
    second = JOB.engine(LocalCommunicator(NumpyOps()), dtype_name="float16", loss_scale=scale)
    steps_of(second, JOB, WHEN)
    scale.scale = edge() / 2
    second.step(feed(JOB, 5), lr=JOB.lr)
    assert first.checksum() == second.checksum()


def test_a_scale_is_a_power_of_two_and_changes_no_bit_of_wider_types() -> None:
    """Nothing is rounded by it: runs in float32, and in bfloat16, end with the same bits at any scale."""
    for kind in ("float32", "bfloat16"):
        checksums = set()
        for scale in (None, fixed(1.0), fixed(2.0**16)):
            engine = JOB.engine(LocalCommunicator(NumpyOps()), dtype_name=kind, loss_scale=scale)
            results = steps_of(engine, JOB, 3)
            assert {result.loss_scale for result in results} == {scale.scale if scale else 1.0}
            checksums.add((engine.checksum(), tuple(result.grad_norm for result in results)))
        assert len(checksums) == 1


def test_small_gradients_vanish_without_a_scale() -> None:
    """What it is for: in float16 nothing below 2**-24 can be held."""
    zeros = []
    for scale in (2.0**-20, 2.0**4):
        engine = JOB.engine(LocalCommunicator(NumpyOps()), dtype_name="float16", loss_scale=fixed(scale))
        engine.step(feed(JOB, 0), lr=0.0)
        zeros.append(float(np.mean(engine.state["h.0"].arrays["grad"] == 0)))
    assert zeros[0] > zeros[1] + 0.3


def test_a_fixed_scale_stays() -> None:
    scale = fixed(edge())
    engine = JOB.engine(LocalCommunicator(NumpyOps()), dtype_name="float16", loss_scale=scale)
    assert [result.loss_scale for result in steps_of(engine, JOB, 4)] == [edge()] * 4
    assert scale.scale == edge()


def test_ranks_with_other_scales_are_told() -> None:
    def other_setting(comm: Communicator) -> None:
        JOB.engine(comm, dtype_name="float16", loss_scale=LossScale(1024.0, every=5 + comm.rank))

    with pytest.raises(CommError, match="rank 1 has schedules"):
        run(2, other_setting)

    def other_scale(comm: Communicator) -> None:
        scale = LossScale(1024.0)
        engine = JOB.engine(comm, dtype_name="float16", loss_scale=scale)
        scale.scale *= 1 + comm.rank
        engine.step(feed(JOB, 0), lr=JOB.lr)

    with pytest.raises(CommError, match="rank 1 ran collectives and rates"):
        run(2, other_scale)
