"""Holes and padding: NaN in all of them, before every step, changes nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mpishard.comm.base import Communicator
from mpishard.comm.threads import run
from tests.shard.spoiling import Spoiler, spoiled_run
from tests.shard.training import Job, train_alone

STEPS = 6
JOB = Job(micros=6)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "shard_grad_op", "shard_optimizer"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_nan_in_holes_changes_nothing(ranks: int, strategy: str) -> None:
    job = JOB.with_settings(strategy=strategy, recompute="block" if ranks == 2 else "none", prefetch=ranks - 1)
    steps = STEPS if strategy in ("full_shard", "no_shard") else 2
    assert run(ranks, lambda comm: spoiled_run(comm, job, steps)) == [train_alone(JOB, steps)] * ranks


def test_most_of_a_small_unit_is_padding() -> None:
    """Ranks that hold nothing but padding of every unit agree with the others."""
    job = replace(JOB, sizes=replace(JOB.sizes, layers=1, width=3, heads=1, vocabulary=5))
    outcomes = run(6, lambda comm: spoiled_run(comm, job, STEPS))
    assert outcomes == [train_alone(job, STEPS)] * 6


@pytest.mark.parametrize("name", ["param", "exp_avg", "exp_avg_sq"])
def test_nan_in_one_element_is_seen(name: str) -> None:
    """The same spoiling one element further, in a parameter or a moment, reaches checksum or loss."""

    def body(comm: Communicator) -> tuple[float, str]:
        spoiler = Spoiler(comm, JOB)
        spoiler.engine.step(JOB.feed(0), lr=JOB.lr)
        spoiler.spoil()
        if comm.rank == 1:
            part = spoiler.engine.state["h.1"]
            slot = part.layout.slots[-3]  # of the matrix that holds most of the block
            inside = slice(max(slot.offset, part.start), min(slot.offset + slot.size, part.stop))
            assert inside.start < inside.stop
            part.arrays[name][inside.start - part.start] = np.nan
        result = spoiler.engine.step(JOB.feed(1), lr=JOB.lr)
        return result.loss, spoiler.engine.checksum()

    expected = train_alone(JOB, 2)
    for loss, checksum in run(2, body):
        assert checksum != expected.checksum
        assert np.isnan(loss) == (name == "param")
