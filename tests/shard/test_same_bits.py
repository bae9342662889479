"""The same bits of losses, norms, parameters and moments, whatever the ranks, the strategy and the schedule."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest

from mpishard.array.constants import IGNORE
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.threads import run
from mpishard.models.gpt2 import Gpt2
from tests.shard.training import LIMIT, SMALL, Job, Outcome, train_alone, train_threads

STEPS = 50
BASE = Job()
#: one axis varied at a time
VARIED = {
    "no_shard": {"strategy": "no_shard"},
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "shard_optimizer": {"strategy": "shard_optimizer"},
    "one group": {"strategy": "hybrid_shard"},
    "kept": {"reshard_after_forward": False},
    "prefetch 0": {"prefetch": 0},
    "prefetch 2": {"prefetch": 2},
    "recompute": {"recompute": "block"},
    "recompute every other": {"recompute": "block", "recompute_every": 2},
}
#: strategies that change no bit, as settings of their own
WAYS: list[dict[str, object]] = [
    *({"strategy": name} for name in ("full_shard", "no_shard", "shard_grad_op", "shard_optimizer")),
    {"strategy": "full_shard", "reshard_after_forward": False},
]


@functools.cache
def expected(job: Job = BASE, steps: int = STEPS) -> Outcome:
    return train_alone(job, steps)


def test_the_run_is_worth_comparing() -> None:
    """It learns, clips in some steps and not in others, drops out, and ignores unequal numbers of targets."""
    outcome = expected()
    assert outcome.losses[-1] < outcome.losses[0] / 3
    clipped = [norm > LIMIT for norm in outcome.norms]
    assert any(clipped)
    assert not all(clipped)
    assert expected(replace(BASE, sizes=replace(SMALL, dropout=0.0)), 3).losses != outcome.losses[:3]
    inputs, targets = np.zeros((2, BASE.micro_batch, SMALL.sequence), np.int64)
    counts = []
    for micro in range(BASE.micros):
        BASE.feed(0)(micro, inputs, targets)
        counts.append(int((targets != IGNORE).sum()))
    assert len(set(counts)) > 3


def test_dropout_differs_by_step_and_micro_batch() -> None:
    """The same data and parameters, twice in a row and in two micro-batches of a step, lose differently."""
    for rate, different in ((0.1, True), (0.0, False)):
        losses = []
        for micros in (1, 2):
            job = replace(BASE, sizes=replace(SMALL, dropout=rate), micros=micros)
            engine = job.engine(LocalCommunicator(NumpyOps()))
            fill = job.feed(0)
            for _ in range(2):
                result = engine.step(lambda micro, inputs, targets, fill=fill: fill(0, inputs, targets), lr=0.0)
                losses.append(result.loss)
        assert len(set(losses)) == (4 if different else 1)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_ranks(ranks: int) -> None:
    assert train_threads(ranks, BASE, STEPS) == [expected()] * ranks


def test_one_rank_of_a_transport_with_many() -> None:
    assert train_threads(1, BASE, 10) == [expected(steps=10)]


@pytest.mark.parametrize("axis", VARIED)
def test_settings_alone(axis: str) -> None:
    assert train_alone(BASE.with_settings(**VARIED[axis]), 5) == expected(steps=5)


@pytest.mark.parametrize("axis", VARIED)
def test_settings_on_ranks(axis: str) -> None:
    steps = 20 if axis in ("no_shard", "prefetch 0", "prefetch 2", "recompute") else 8
    assert train_threads(3, BASE.with_settings(**VARIED[axis]), steps) == [expected(steps=steps)] * 3


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_poison(way: dict[str, object]) -> None:
    """Released and not yet arrived memory is NaN, and nothing reads it."""
    job = replace(BASE, poison=True).with_settings(prefetch=2, recompute="block", **way)
    assert train_threads(2, job, 5) == [expected(steps=5)] * 2


def test_another_seed_gives_other_bits() -> None:
    other = expected(replace(BASE, seed=6), 2)
    assert other.checksum != expected(steps=2).checksum
    assert set(other.losses).isdisjoint(expected(steps=2).losses)


@pytest.mark.parametrize(
    "sizes",
    [
        Gpt2(layers=0, width=6, heads=2, sequence=5, vocabulary=11, dropout=0.2),
        Gpt2(layers=1, width=33, heads=11, sequence=13, vocabulary=101, dropout=0.1, gelu_tanh=False, head_chunk=7),
        Gpt2(layers=5, width=14, heads=2, sequence=3, vocabulary=7, attention_block=0),
    ],
    ids=["no blocks", "one block", "five blocks"],
)
def test_other_models(sizes: Gpt2) -> None:
    """float64 too: its gradients are summed in float64."""
    job = Job(sizes, micro_batch=1, micros=6).with_settings(prefetch=2)
    alone = expected(job, 5)
    assert train_threads(3, job, 5) == [alone] * 3
    assert train_threads(2, job.with_settings(strategy="no_shard", recompute="block"), 5) == [alone] * 2
    wide = {tuple(train_threads(n, job, 4, dtype_name="float64")) for n in (1, 2)}
    assert len({outcome for outcomes in wide for outcome in outcomes}) == 1


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_evaluation_and_prediction(way: dict[str, object]) -> None:
    """They give one loss and one set of logits on any ranks, and training goes on as if they had not been."""
    sample = np.arange(SMALL.sequence) % SMALL.vocabulary

    def body(comm: object) -> tuple[object, ...]:
        job = BASE.with_settings(**way)
        engine = job.engine(comm)
        losses = [engine.step(job.feed(0), lr=job.lr).loss]
        before = engine.checksum()
        evaluation = engine.evaluate(job.feed(77))
        logits = engine.predict(sample, 4).tobytes()
        assert engine.checksum() == before
        losses += [engine.step(job.feed(step), lr=job.lr).loss for step in (1, 2)]
        return losses, evaluation, logits, engine.checksum()

    results = [result for ranks in (1, 2, 4) for result in run(ranks, body, NumpyOps)]
    assert all(result == results[0] for result in results)
    losses, evaluation, logits, checksum = results[0]
    assert tuple(losses) == expected(steps=3).losses
    assert checksum == expected(steps=3).checksum
    assert np.isfinite(evaluation.loss)
    assert np.isfinite(np.frombuffer(logits, np.float32)).all()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(
    ("way", "prefetch", "recompute"), list(itertools.product(WAYS, [0, 1, 2], ["none", "block"])), ids=str
)
def test_full_product(ranks: int, way: dict[str, object], prefetch: int, recompute: str) -> None:
    job = BASE.with_settings(prefetch=prefetch, recompute=recompute, **way)
    assert train_threads(ranks, job, STEPS) == [expected()] * ranks
