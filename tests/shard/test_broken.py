"""An engine broken on purpose: each damage is refused, or seen in its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import mpishard.shard.steps
from mpishard.array.constants import IGNORE
from mpishard.array.dtypes import Array
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.base import Communicator
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.threads import run
from mpishard.errors import ScheduleError
from mpishard.shard.engine import Engine, StepResult, outline_of
from mpishard.shard.instructions import Await, Backward, Forward, Gather, Instruction, Release
from mpishard.shard.schedule import build_step
from tests.shard.damaged_ops import Apart, MeanOfMeans, Reversed
from tests.shard.training import MICROS, SMALL, Job, train, train_alone, train_threads

STEPS = 4
POISONED = replace(Job(micros=4), poison=True)

# --- schedules


def legal(job: Job, ranks: int) -> list[Instruction]:
    return list(build_step(outline_of(job.model), replace(job.settings, micros=job.micros // ranks)))


def read_when_released(steps: list[Instruction]) -> None:
    """Forward of h.1 reads what was released just before."""
    at = steps.index(Forward("h.1", 0))
    end = next(i for i in range(at, len(steps)) if steps[i] == Release("h.1"))
    steps.insert(at, steps.pop(end))


def read_when_released_in_backward(steps: list[Instruction]) -> None:
    at = steps.index(Backward("h.1", 0))
    end = next(i for i in range(at, len(steps)) if steps[i] == Release("h.1"))
    steps.insert(at, steps.pop(end))


def never_awaited(steps: list[Instruction]) -> None:
    """The last time in the step: earlier ones are also caught when the collective starts again."""
    del steps[max(i for i, step in enumerate(steps) if step == Await("h.2"))]


def gather_skipped(steps: list[Instruction]) -> None:
    """Backward of h.1 without gathering it again."""
    at = steps.index(Backward("h.1", 0))
    start = max(i for i in range(at) if steps[i] == Gather("h.1"))
    end = next(i for i in range(at, len(steps)) if steps[i] == Release("h.1"))
    arrival = max(i for i in range(at) if steps[i] == Await("h.1"))
    for i in sorted((start, arrival, end), reverse=True):
        del steps[i]


DAMAGES = [read_when_released, read_when_released_in_backward, never_awaited, gather_skipped]


@pytest.mark.parametrize("damage", DAMAGES)
def test_refused_before_it_runs(damage: Callable[[list[Instruction]], None]) -> None:
    steps = legal(POISONED, 2)
    POISONED.engine(LocalCommunicator(NumpyOps()), schedule=tuple(legal(POISONED, 1)))
    damage(steps)
    with pytest.raises(ScheduleError, match=r"it reads unit h\.., which is"):
        run(2, lambda comm: POISONED.engine(comm, schedule=tuple(steps)))


@pytest.mark.parametrize("damage", DAMAGES)
def test_poison_finds_what_is_not_checked(
    damage: Callable[[list[Instruction]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check the schedule runs, and its numbers are NaN on every rank: nothing is updated."""
    steps = legal(POISONED, 2)
    damage(steps)
    monkeypatch.setattr(mpishard.shard.steps, "check", lambda *_: None)

    def body(comm: Communicator) -> tuple[StepResult, bool]:
        engine = POISONED.engine(comm, schedule=tuple(steps))
        before = engine.checksum()
        return engine.step(POISONED.feed(0), lr=0.01), engine.checksum() == before

    for result, unchanged in run(2, body):
        assert math.isnan(result.grad_norm)
        assert math.isnan(result.loss)
        assert not result.updated
        assert unchanged


def test_a_legal_schedule_of_ones_own_runs() -> None:
    """The parameter by which the damages above came in gives the same bits with an undamaged schedule."""
    steps = tuple(legal(POISONED, 2))
    assert train_threads(2, POISONED, STEPS, schedule=steps) == [train_alone(POISONED, STEPS)] * 2


# --- sums


@pytest.mark.parametrize("make", [Reversed, Apart])
def test_a_reduction_out_of_order_gives_other_bits(make: Callable[[], NumpyOps]) -> None:
    job = Job()
    expected = train_alone(job, STEPS)
    outcomes = run(3, lambda comm: train(job.engine(comm), job, STEPS), make)
    assert outcomes == [outcomes[0]] * 3
    assert outcomes[0].checksum != expected.checksum
    assert outcomes[0].losses == pytest.approx(expected.losses, rel=1e-5)


def test_round_after_round_is_the_order() -> None:
    """The same micro-batches dealt in blocks, not in turn, are added in another order."""
    job = Job()

    def body(comm: Communicator) -> str:
        engine = job.engine(comm)
        fill = job.feed(0)
        local = MICROS // comm.size

        def dealt(micro: int, inputs: Array, targets: Array) -> None:
            turn, rank = divmod(micro, comm.size)
            fill(rank * local + turn, inputs, targets)

        engine.step(dealt, lr=job.lr)
        return engine.checksum()

    assert run(3, body)[0] != run(1, body)[0]


# --- means


def gradients(engine: Engine, result: StepResult) -> dict[str, Array]:
    """Parameters' mean gradients of an engine of one rank."""
    found = {}
    for unit, part in engine.state.items():
        for slot in part.layout.slots:
            grad = part.arrays["grad"][slot.offset : slot.offset + slot.size]
            found[f"{unit}.{slot.name}"] = grad.astype(np.float64) / (engine._scale * result.tokens)
    return found


def big_batch(job: Job) -> tuple[StepResult, dict[str, Array]]:
    """The whole batch as one micro-batch."""
    whole = replace(job, micro_batch=job.micro_batch * job.micros, micros=1)
    engine = whole.engine(LocalCommunicator(NumpyOps()))
    fill = job.feed(0)

    def together(_: int, inputs: Array, targets: Array) -> None:
        for micro in range(job.micros):
            rows = slice(micro * job.micro_batch, (micro + 1) * job.micro_batch)
            fill(micro, inputs[rows], targets[rows])

    result = engine.step(together, lr=0.0)
    return result, gradients(engine, result)


def counts(job: Job) -> list[int]:
    inputs, targets = np.zeros((2, job.micro_batch, SMALL.sequence), np.int64)
    found = []
    for micro in range(job.micros):
        job.feed(0)(micro, inputs, targets)
        found.append(int((targets != IGNORE).sum()))
    return found


def distance(mine: dict[str, Array], reference: dict[str, Array]) -> float:
    norm = math.sqrt(sum(float((g**2).sum()) for g in reference.values()))
    return math.sqrt(sum(float(((mine[name] - g) ** 2).sum()) for name, g in reference.items())) / norm


def test_the_loss_is_that_of_one_big_batch() -> None:
    """Micro-batches of unequal numbers of targets: their sum rule is the big batch's, in float64 almost exactly."""
    job = Job()
    reference, wanted = big_batch(job)
    ops = MeanOfMeans()
    engine = job.engine(LocalCommunicator(ops))
    result = engine.step(job.feed(0), lr=0.0)
    assert result.tokens == reference.tokens == sum(counts(job))
    assert result.loss == pytest.approx(reference.loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(reference.grad_norm, rel=1e-5)
    assert distance(gradients(engine, result), wanted) < 1e-5
    norm = math.sqrt(sum(float((g**2).sum()) for g in wanted.values()))
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_norm_is_that_of_the_mean_loss(ranks: int) -> None:
    """In float64 a small step along the mean gradient changes the mean loss by the norm's square times the step."""
    job = Job(replace(SMALL, dropout=0.0))
    small = 1e-5

    def body(comm: Communicator) -> tuple[float, float]:
        engine = job.engine(comm, dtype_name="float64")
        result = engine.step(job.feed(0), lr=0.0)
        for part in engine.state.values():
            part.arrays["param"][...] += small * part.arrays["grad"] / (engine._scale * result.tokens)
        return result.grad_norm, (engine.evaluate(job.feed(0)).loss - result.loss) / small

    for norm, slope in run(ranks, body):
        assert slope == pytest.approx(norm**2, rel=1e-3)


def test_a_mean_of_means_is_seen() -> None:
    job = Job()
    reference, wanted = big_batch(job)
    ops, valid = MeanOfMeans(), counts(job)
    engine = job.engine(LocalCommunicator(ops))

    def feed(micro: int, inputs: Array, targets: Array) -> None:
        job.feed(0)(micro, inputs, targets)
        ops.weight = sum(valid) / (job.micros * valid[micro])

    result = engine.step(feed, lr=0.0)
    assert result.loss != pytest.approx(reference.loss, rel=1e-5)
    assert distance(gradients(engine, result), wanted) > 0.01
