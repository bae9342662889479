"""Sums in another order: groups of ``hybrid_shard``, and gradients that are reduced once a step."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.base import Communicator
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.threads import run
from mpishard.errors import ConfigError
from tests.shard.spoiling import spoiled_run
from tests.shard.training import SMALL, Job, Outcome, train, train_alone

#: below which the losses of another order must lie, from those of full_shard, in 50 steps
CLOSE, STEPS, RATE = 1e-5, 50, 1e-3
JOB = Job(replace(SMALL, layers=1), micro_batch=1, micros=8, lr=RATE)


@functools.cache
def expected() -> Outcome:
    return train_alone(JOB, STEPS)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (4, {"strategy": "hybrid_shard", "group": 2}),
        (4, {"strategy": "hybrid_shard", "group": 1, "prefetch": 0}),
        (2, {"strategy": "hybrid_shard", "group": 1, "recompute": "block"}),
        (1, {"accumulate": "no_sync"}),
        (4, {"accumulate": "no_sync"}),
        (2, {"strategy": "no_shard", "accumulate": "no_sync"}),
        (4, {"strategy": "hybrid_shard", "group": 2, "accumulate": "no_sync", "reshard_after_forward": False}),
    ],
    ids=str,
)
def test_losses_stay_close(ranks: int, changes: dict[str, object]) -> None:
    job = JOB.with_settings(**changes)
    outcomes = run(ranks, lambda comm: train(job.engine(comm), job, STEPS))
    assert outcomes == [outcomes[0]] * ranks
    np.testing.assert_allclose(outcomes[0].losses, expected().losses, rtol=CLOSE)
    assert outcomes[0].losses != expected().losses  # the sums are in another order
    assert outcomes[0].losses[-1] < 0.9 * outcomes[0].losses[0]


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize(("ranks", "group"), [(4, 2), (4, 1), (6, 2), (6, 3), (4, 4)])
def test_groups_are_brackets_of_full_shard(ranks: int, group: int, kind: str) -> None:
    """With one micro-batch a rank, a sum by groups is full_shard's with the brackets that a communicator can have."""
    job = replace(JOB, micros=ranks, lr=0.01)
    grouped = job.with_settings(strategy="hybrid_shard", group=group)

    def bracketed(comm: Communicator) -> Outcome:
        comm.bracket = group
        return train(job.engine(comm, dtype_name=kind), job, 4)

    outcomes = run(ranks, lambda comm: train(grouped.engine(comm, dtype_name=kind), grouped, 4))
    assert outcomes == run(ranks, bracketed)
    flat = run(ranks, lambda comm: train(job.engine(comm, dtype_name=kind), job, 4))
    if group in (1, ranks):  # groups of one, and one group, change no order
        assert outcomes == flat
    elif kind == "float32":  # sums of a few numbers of 8 bits are exact in any order
        assert outcomes != flat


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "shard_grad_op", "shard_optimizer", "hybrid_shard"])
def test_reducing_once_gives_the_bits_of_no_strategy_but_of_the_ranks(strategy: str) -> None:
    """Each rank adds up its own micro-batches first, so the sum depends on how many ranks there are and on no more."""
    job = JOB.with_settings(accumulate="no_sync")
    other = job.with_settings(strategy=strategy, prefetch=0, recompute="block")
    for ranks in (2, 4):
        ours = run(ranks, lambda comm: train(other.engine(comm), other, 4))
        assert ours == run(ranks, lambda comm: train(job.engine(comm), job, 4))
    single = replace(JOB, micros=2)
    once = single.with_settings(strategy=strategy, accumulate="no_sync")
    # With one micro-batch a rank there is nothing to add up before.
    assert run(2, lambda comm: train(once.engine(comm), once, 4)) == [train_alone(single, 4)] * 2


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_nan_in_holes_of_groups_changes_nothing(kind: str) -> None:
    job = replace(JOB, micros=4).with_settings(strategy="hybrid_shard", group=2)
    clean = run(4, lambda comm: train(job.engine(comm, dtype_name=kind), job, 3))
    assert run(4, lambda comm: spoiled_run(comm, job, 3, dtype_name=kind)) == clean
    poisoned = replace(job, poison=True)
    assert run(4, lambda comm: train(poisoned.engine(comm, dtype_name=kind), poisoned, 3)) == clean


@pytest.mark.parametrize("group", [1, 2, 3, 6])
def test_parameters_and_checksum_of_groups(group: int) -> None:
    """Each element is counted once, though each group holds it, and every rank can be given the whole."""
    job = replace(JOB, micros=6).with_settings(strategy="hybrid_shard", group=group)
    alone = replace(JOB, micros=6).engine(LocalCommunicator(NumpyOps()))

    def body(comm: Communicator) -> tuple[Any, ...]:
        engine = job.engine(comm)
        names = ("wte.weight", "h.0.mlp.c_fc.weight", "ln_f.bias")
        return engine.checksum(), *(engine.parameter(name).tobytes() for name in names)

    names = ("wte.weight", "h.0.mlp.c_fc.weight", "ln_f.bias")
    assert run(6, body) == [(alone.checksum(), *(alone.parameter(name).tobytes() for name in names))] * 6


def test_groups_that_do_not_divide_the_ranks() -> None:
    job = replace(JOB, micros=4).with_settings(strategy="hybrid_shard", group=3)
    with pytest.raises(ConfigError, match=r"shard\.group is 3 and does not divide 4 ranks; set shard\.group to 1"):
        run(4, lambda comm: job.engine(comm))
