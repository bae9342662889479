"""One checksum for each precision: whatever the strategy, the ranks, the recomputation; 16 bits as 32."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.threads import run
from mpishard.shard.engine import Engine
from mpishard.shard.loss_scale import LossScale
from tests.shard.training import SMALL, Job, Outcome, train

JOB = Job(replace(SMALL, layers=2), micro_batch=1)
STEPS = 2
#: name -> (element type, what gradients travel in)
TYPES = {
    "fp32": ("float32", ""),
    "bf16": ("bfloat16", ""),
    "fp16": ("float16", ""),
    "fp32, bf16 on the wire": ("float32", "bfloat16"),
    "bf16, fp32 on the wire": ("bfloat16", "float32"),
}
WAYS: dict[str, dict[str, object]] = {
    **{name: {"strategy": name} for name in ("full_shard", "shard_grad_op", "shard_optimizer", "no_shard")},
    "kept": {"strategy": "full_shard", "reshard_after_forward": False},
    "one group": {"strategy": "hybrid_shard"},
}
#: beside each way, so that together they meet everything
BESIDE: list[dict[str, object]] = [
    {},
    {"prefetch": 0, "recompute": "block"},
    {"prefetch": 2, "recompute": "block", "recompute_every": 2},
]


def options(precision: str) -> dict[str, Any]:
    kind, wire = TYPES[precision]
    scale = LossScale(1024.0) if "float16" in (kind, wire) else None
    return {"dtype_name": kind, "reduce_dtype": wire, "loss_scale": scale}


@functools.cache
def expected(precision: str) -> Outcome:
    return train(JOB.engine(LocalCommunicator(NumpyOps()), **options(precision)), JOB, STEPS)


def test_precisions_differ_and_learn() -> None:
    outcomes = {precision: expected(precision) for precision in TYPES}
    assert len({outcome.checksum for outcome in outcomes.values()}) == len(TYPES)
    for outcome in outcomes.values():
        assert outcome.losses[-1] < outcome.losses[0]
        np.testing.assert_allclose(outcome.losses, outcomes["fp32"].losses, rtol=0.02)


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("way", WAYS)
def test_one_checksum(way: str, precision: str) -> None:
    every = (1, 2, 3, 4, 6) if precision in ("fp32", "bf16", "fp16") and way != "one group" else (3,)
    for n, ranks in enumerate(every):
        changes = WAYS[way] | BESIDE[(n + list(WAYS).index(way)) % len(BESIDE)]
        job = replace(JOB, poison=ranks == 3).with_settings(**changes)

        def body(comm: Any, job: Job = job) -> Outcome:
            return train(job.engine(comm, **options(precision)), job, STEPS)

        assert run(ranks, body) == [expected(precision)] * ranks, ranks


def gradients(changes: dict[str, object], precision: str, step: int = 0, **sizes: Any) -> dict[str, bytes]:
    job = replace(JOB, sizes=replace(JOB.sizes, **sizes), micros=3).with_settings(**changes)
    engine: Engine = job.engine(LocalCommunicator(NumpyOps()), **options(precision))
    engine.steps = step
    engine.step(job.feed(0), lr=0.0)
    return {name: part.arrays["grad"].tobytes() for name, part in engine.state.items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputation_changes_no_bit_of_the_gradients(dropout: float, precision: str) -> None:
    plain = gradients({}, precision, dropout=dropout)
    for every, prefetch in itertools.product((1, 2), (0, 2)):
        changes = {"recompute": "block", "recompute_every": every, "prefetch": prefetch}
        assert gradients(changes, precision, dropout=dropout) == plain
    assert gradients({"recompute": "block"}, precision, dropout=dropout, recompute_attention=True) == plain
    assert gradients({}, precision, dropout=dropout, recompute_attention=True) == plain
    # Dropout is drawn by the number of the step, so it is there, and is seen.
    assert (gradients({}, precision, step=1, dropout=dropout) == plain) == (dropout == 0.0)
