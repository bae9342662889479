"""Training in bfloat16: what is kept in which type, where it is rounded, and the same bits on any number of ranks."""

from __future__ import annotations

import functools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.base import Communicator
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.threads import run
from mpishard.optim.adamw import AdamW
from mpishard.shard.precision import gradient_types, precision
from tests.shard.predicted import predicted
from tests.shard.training import SMALL, Job, Outcome, train, train_alone, train_threads

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
JOB = Job(replace(SMALL, dropout=0.1), micros=6)
STEPS = 6


@functools.cache
def expected() -> Outcome:
    engine = JOB.engine(LocalCommunicator(NumpyOps()), dtype_name="bfloat16")
    return train(engine, JOB, STEPS)


@pytest.mark.parametrize("ranks", [2, 6])
@pytest.mark.parametrize(
    "changes",
    [{}, {"strategy": "no_shard"}, {"prefetch": 0}, {"prefetch": 2, "recompute": "block"}],
    ids=["full_shard", "no_shard", "prefetch 0", "recompute"],
)
def test_same_bits(ranks: int, changes: dict[str, object]) -> None:
    job = JOB.with_settings(**changes)
    for outcome in train_threads(ranks, replace(job, poison=ranks == 2), STEPS, dtype_name="bfloat16"):
        assert outcome == expected()


def test_it_learns_as_in_fp32() -> None:
    plain, mixed = train_alone(JOB, STEPS), expected()
    assert mixed.losses != plain.losses
    np.testing.assert_allclose(mixed.losses, plain.losses, rtol=0.02)
    assert mixed.losses[-1] < mixed.losses[0]


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_what_is_kept(strategy: str) -> None:
    """fp32 masters, gradient shards and moments; 2-byte parameters only where a whole copy stays."""
    ranks = 2

    def body(comm: Communicator) -> dict[str, int]:
        engine = JOB.with_settings(strategy=strategy).engine(comm, dtype_name="bfloat16")
        engine.step(JOB.feed(0), lr=0.01)
        for part in engine.state.values():
            assert {name: array.dtype for name, array in part.arrays.items() if name != "cast"} == dict.fromkeys(
                ("param", "grad", "exp_avg", "exp_avg_sq"), F32
            )
            assert (part.resident is not None) == (strategy != "full_shard")
            if strategy != "full_shard":
                np.testing.assert_array_equal(part.arrays["cast"], part.arrays["param"].astype(BF16))
        assert engine.memory() == predicted(engine, "threads").held
        return engine.memory()

    plain = JOB.with_settings(strategy=strategy).engine(LocalCommunicator(NumpyOps()))
    for held in run(ranks, body):
        share = sum(flat.total for flat in plain.layouts.values())
        share //= ranks if strategy != "no_shard" else 1
        assert held["masters"] == pytest.approx(4 * share, rel=0.2)
        whole = {"full_shard": 0, "shard_grad_op": ranks * held["masters"] // 2, "no_shard": held["masters"] // 2}
        assert held["parameters"] == whole[strategy]
        assert held["gradients"] == held["masters"]
        assert held["optimizer"] == 2 * held["masters"]
        assert held["gathered"] <= plain.memory()["gathered"] / 2 + 64 * 1024


def test_types_of_gradients() -> None:
    """A block writes its gradient once, in 2 bytes; the root, which loss and embedding both write, gathers fp32."""
    engine = JOB.engine(LocalCommunicator(NumpyOps()), dtype_name="bfloat16")
    kinds = gradient_types(engine.outline, engine.schedule, precision("bfloat16"))
    assert kinds.pop("root") == F32
    assert kinds
    assert set(kinds.values()) == {BF16}
    assert set(gradient_types(engine.outline, engine.schedule, precision("float64")).values()) == {np.dtype(np.float64)}


class Recorded(NumpyOps):
    """Types that operations were given, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[tuple[np.dtype, np.dtype]] = []
        self.copies: list[tuple[np.dtype, np.dtype]] = []

    def _ordered_sum(self, blocks, out, add, bracket) -> None:
        self.sums += [(block.dtype, out.dtype) for block in blocks]
        super()._ordered_sum(blocks, out, add, bracket)

    def _copy(self, x, out) -> None:
        self.copies.append((x.dtype, out.dtype))
        super()._copy(x, out)


def test_rounding_points() -> None:
    """Parameters are rounded at each Gather, and every gradient travels in 2 bytes, on one rank too."""
    ops = Recorded()
    engine = JOB.engine(LocalCommunicator(ops), dtype_name="bfloat16")
    ops.sums.clear(), ops.copies.clear()
    engine.step(JOB.feed(0), lr=0.01)
    assert ops.sums
    assert set(ops.sums) == {(BF16, F32)}
    gathers = sum(type(step).__name__ == "Gather" for step in engine.schedule)
    assert ops.copies.count((F32, BF16)) >= gathers + JOB.micros  # and the root's gradient once a micro-batch


def test_masters_keep_what_bfloat16_cannot_hold() -> None:
    """Updates far below the parameters' 2-byte spacing are kept: masters move where their rounded values do not."""
    engine = JOB.engine(LocalCommunicator(NumpyOps()), dtype_name="bfloat16")
    before = {name: part.arrays["param"].copy() for name, part in engine.state.items()}
    for step in range(3):
        engine.step(JOB.feed(step), lr=1e-6)
    for name, part in engine.state.items():
        moved = part.arrays["param"] != before[name]
        rounded = part.arrays["param"].astype(BF16) != before[name].astype(BF16)
        assert moved.mean() > 0.2
        assert rounded.mean() < moved.mean() / 2


def test_predictions_and_parameters_are_fp32() -> None:
    engine = JOB.engine(LocalCommunicator(NumpyOps()), dtype_name="bfloat16")
    tokens = np.zeros(SMALL.sequence, np.int64)
    logits = engine.predict(tokens, 0)
    assert logits.dtype == F32
    assert np.array_equal(logits, logits.astype(BF16).astype(F32))
    plain = JOB.engine(LocalCommunicator(NumpyOps())).predict(tokens, 0)
    np.testing.assert_allclose(logits, plain, atol=0.05 * np.abs(plain).max())
    assert engine.parameter("wte.weight").dtype == F32


class Plain(AdamW):
    """An optimiser of one's own that knows nothing of narrower copies."""

    writes_cast = False

    def update(self, ops, arrays, *rest) -> None:
        super().update(ops, {name: array for name, array in arrays.items() if name != "cast"}, *rest)


def test_an_optimizer_of_ones_own_trains_the_replicated_copies_too() -> None:
    outcomes = set()
    for strategy in ("full_shard", "no_shard", "shard_optimizer"):
        job = JOB.with_settings(strategy=strategy)
        engine = job.engine(LocalCommunicator(NumpyOps()), dtype_name="bfloat16", optimizer=Plain())
        outcomes.add(train(engine, job, 3))
    (outcome,) = outcomes
    assert len(set(outcome.losses)) == 3
