"""The control exchange: ranks update, skip, go on and stop alike, and one that differs is named on all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpishard.array.constants import IGNORE
from mpishard.array.dtypes import Array
from mpishard.comm.base import Communicator
from mpishard.comm.threads import run
from mpishard.errors import CommError
from mpishard.models.gpt2 import gpt2
from mpishard.optim.adamw import AdamW
from mpishard.shard.control import Report, combine, compare
from mpishard.shard.engine import Engine
from mpishard.shard.exact import ExactSum
from mpishard.shard.schedule import Settings
from tests.shard.damaged_ops import Burst
from tests.shard.training import SMALL, Job

JOB = Job(micros=6)
RANKS = 3


def everywhere(body: Callable[[Communicator], object]) -> list[str]:
    """Run ``body``, which must raise CommError, and return the messages of all ranks."""

    def caught(comm: Communicator) -> str:
        with pytest.raises(CommError) as error:
            body(comm)
        comm.barrier()  # the transport still works: nobody was left inside a collective
        return str(error.value)

    return run(RANKS, caught)


DIFFERENT: dict[str, Job] = {
    "seed": replace(JOB, seed=6),
    "prefetch": JOB.with_settings(prefetch=0),
    "recompute": JOB.with_settings(recompute="block"),
    "strategy": JOB.with_settings(strategy="no_shard"),
    "strategy of alike lists": JOB.with_settings(strategy="hybrid_shard"),
    "accumulation": JOB.with_settings(accumulate="no_sync"),
    "releases": JOB.with_settings(reshard_after_forward=False),
    "recomputed blocks": JOB.with_settings(recompute="block", recompute_every=2),
    "micro-batches": replace(JOB, micros=12),
    "micro-batch": replace(JOB, micro_batch=1, micros=12),
    "layers": replace(JOB, sizes=replace(JOB.sizes, layers=3)),
    "shapes": replace(JOB, sizes=replace(JOB.sizes, vocabulary=30)),
}


@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_that_was_told_another_thing(what: str, odd: int) -> None:
    """It is named before anything is bound; where rank 0 differs, the others are what differs from it."""
    messages = everywhere(lambda comm: (DIFFERENT[what] if comm.rank == odd else JOB).engine(comm))
    named = 2 if odd == 2 else 1
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"rank {named} has schedules ")
    assert messages[0].endswith("all ranks need the same model, settings, optimiser, batch and seed")


def test_a_rank_that_takes_another_schedule_of_the_same_collectives() -> None:
    """Such as one that computes in another order, with the same gathers and reductions."""

    def body(comm: Communicator) -> None:
        engine = JOB.engine(comm)
        steps = list(engine.schedule)
        if comm.rank == 1:
            steps[-1], steps[-2] = steps[-2], steps[-1]
        JOB.engine(comm, schedule=tuple(steps))

    messages = everywhere(body)
    assert len(set(messages)) == 1
    assert messages[0].startswith("rank 1 has schedules")


def test_a_rank_at_another_step() -> None:
    def body(comm: Communicator) -> None:
        engine = JOB.engine(comm)
        engine.steps += comm.rank == 2
        engine.step(JOB.feed(0), lr=0.1)

    told = "rank 2 is at step 1, rank 0 at step 0; every rank must make the same calls in the same order"
    assert everywhere(body) == [told] * RANKS


def test_a_rank_that_ran_other_collectives() -> None:
    def body(comm: Communicator) -> None:
        engine = JOB.engine(comm)
        if comm.rank == 1:
            at = next(i for i, action in enumerate(engine._train) if action.mark)
            engine._train[at] = engine._train[at]._replace(mark=b"gather something else")
        engine.step(JOB.feed(0), lr=0.1)

    messages = everywhere(body)
    assert len(set(messages)) == 1
    assert messages[0].startswith("rank 1 ran collectives and rates ")


def test_a_rank_that_reports_another_schedule() -> None:
    job = JOB.with_settings(strategy="no_shard")

    def body(comm: Communicator) -> None:
        engine = job.engine(comm)
        if comm.rank == 1:
            engine._digests[0] = engine._digests[1]
        engine.step(job.feed(0), lr=0.1)

    messages = everywhere(body)
    assert len(set(messages)) == 1
    assert messages[0].startswith("rank 1 was given schedule ")


def moments(engine: Engine) -> list[bytes]:
    return [
        part.arrays[name].tobytes() for part in engine.state.values() for name in ("param", "exp_avg", "exp_avg_sq")
    ]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "shard_grad_op", "shard_optimizer", "hybrid_shard"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_gradient_that_is_not_finite_skips_the_update_everywhere(bad: float, strategy: str) -> None:
    """Nothing moves, Adam's count too, and training goes on with the bits of a run without that step's data."""
    job = JOB.with_settings(strategy=strategy)

    def body(comm: Communicator) -> tuple[object, ...]:
        engine = job.engine(comm)
        engine.step(job.feed(0), lr=job.lr)
        before = moments(engine)
        if comm.rank == 1:
            comm.ops.bad = bad
        skipped = engine.step(job.feed(1), lr=job.lr)
        assert moments(engine) == before
        assert (engine.steps, engine.updates) == (2, 1)
        after = engine.step(job.feed(2), lr=job.lr)
        assert (engine.steps, engine.updates) == (3, 2)
        return (
            skipped.updated,
            math.isnan(skipped.grad_norm),
            after.updated,
            after.loss,
            after.grad_norm,
            engine.checksum(),
        )

    def without(comm: Communicator) -> tuple[object, ...]:
        engine = job.engine(comm)
        engine.step(job.feed(0), lr=job.lr)
        engine.steps = 2  # dropout draws by the number of the step
        after = engine.step(job.feed(2), lr=job.lr)
        return False, True, True, after.loss, after.grad_norm, engine.checksum()

    results = run(RANKS, body, Burst)
    assert results == run(1, without) * RANKS


def test_signals() -> None:
    """``more=False`` or ``stop=True`` on any one rank is seen by all, in that step and no other."""

    def body(comm: Communicator) -> list[tuple[bool, bool]]:
        engine, seen = JOB.engine(comm), []
        for step, (more, stop) in enumerate([(-1, -1), (2, -1), (-1, 1), (0, 0), (-1, -1)]):
            result = engine.step(JOB.feed(step), lr=JOB.lr, more=comm.rank != more, stop=comm.rank == stop)
            seen.append((result.more, result.stop))
        return seen

    assert run(RANKS, body) == [[(True, False), (False, False), (True, True), (False, True), (True, False)]] * RANKS


def ignoring(job: Job, step: int, micros: set[int]) -> Callable[[int, Array, Array], None]:
    def fill(micro: int, inputs: Array, targets: Array) -> None:
        job.feed(step)(micro, inputs, targets)
        if micro in micros:
            targets[...] = IGNORE

    return fill


def test_no_target_counts() -> None:
    """A step without targets is skipped; one in which some ranks have none is not."""

    def body(comm: Communicator) -> tuple[object, ...]:
        engine = JOB.engine(comm)
        before = moments(engine)
        empty = engine.step(ignoring(JOB, 0, set(range(6))), lr=JOB.lr)
        assert moments(engine) == before
        assert (engine.steps, engine.updates) == (1, 0)
        assert math.isnan(empty.loss)
        assert math.isnan(empty.grad_norm)
        assert (empty.tokens, empty.updated) == (0, False)
        partly = engine.step(ignoring(JOB, 1, {1, 4}), lr=JOB.lr)
        assert partly.updated
        assert engine.evaluate(ignoring(JOB, 1, set(range(6)))).tokens == 0
        return partly.loss, partly.tokens, engine.checksum()

    results = run(RANKS, body) + run(1, body) + run(6, body)
    assert results == [results[0]] * len(results)
    assert math.isfinite(results[0][0])


def test_clipping_divides_by_the_global_norm() -> None:
    """Without momentum the first moment is the clipped gradient itself."""
    job = Job(micros=4)
    for limit in (1e-3, 1e9, 0.0):
        optimizer = AdamW(beta1=0.0, limit=limit)

        def body(comm: Communicator, optimizer: AdamW = optimizer) -> tuple[float, float]:
            engine = job.engine(comm, optimizer=optimizer)
            result = engine.step(job.feed(0), lr=job.lr)
            squares = sum(
                float((part.slice_of("exp_avg").astype(np.float64) ** 2).sum()) for part in engine.state.values()
            )
            return result.grad_norm, squares

        results = run(2, body)
        norm = results[0][0]
        clipped = math.sqrt(sum(squares for _, squares in results))
        assert norm > 0.1
        assert clipped == pytest.approx(min(norm, limit) if limit else norm, rel=1e-5)


# --- the records


def report(**changes: object) -> Report:
    squares, loss = ExactSum(), ExactSum()
    squares.add(np.array([2.0, 0.25]))
    loss.add(np.array([-1.5]))
    fields = {"schedule": b"schedule", "executed": b"executed", "step": 7, "tokens": 11, "more": True, "stop": False}
    return Report(**{**fields, "squares": squares, "loss": loss, **changes})


def test_records_survive_packing() -> None:
    for changes in ({}, {"more": False, "stop": True}, {"tokens": 2**40}, {"squares": ExactSum(5, False)}):
        record = report(**changes).pack()
        assert len(record) == len(report().pack())
        assert Report.unpack(record).pack() == record
    one = combine([report(stop=True).pack(), report(more=False, tokens=1).pack()])
    assert (one.squares, one.loss, one.tokens) == (4.5, -3.0, 12)
    assert (one.finite, one.more, one.stop) == (True, False, True)
    assert not combine([report().pack(), report(loss=ExactSum(0, False)).pack()]).finite


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 8}, "rank 3 is at step 8, rank 0 7;"),
        ({"schedule": b"SCHEDULE"}, "rank 3 was given schedule 5343484544554c45, rank 0 7363686564756c65;"),
        ({"executed": b"EXECUTED"}, "rank 3 ran collectives and rates 4558454355544544, rank 0 6578656375746564;"),
    ],
)
def test_combine_names_the_rank(changes: dict[str, object], message: str) -> None:
    records = [report().pack()] * 3 + [report(**changes).pack()] + [report(step=99).pack()]
    with pytest.raises(CommError, match=message):
        combine(records)


def test_compare_names_the_rank() -> None:
    compare([b"a"] * 4)
    with pytest.raises(CommError, match="rank 2 has schedules 62, rank 0 61;"):
        compare([b"a", b"a", b"b", b"c"])


@pytest.mark.parametrize(
    "change",
    [{"decay": 0.2}, {"limit": 0.5}, {"beta2": 0.9}],
    ids=["decay", "clip", "beta2"],
)
def test_ranks_with_other_optimisers_are_named(change: dict[str, float]) -> None:
    def main(comm: Communicator) -> None:
        optimizer = AdamW(**(change if comm.rank == 2 else {}))
        Engine(gpt2(SMALL), comm, comm.ops, optimizer, Settings(), micro_batch=1, global_batch=3, seed=0)

    with pytest.raises(CommError, match="rank 2 has schedules"):
        run(3, main)


@pytest.mark.parametrize("change", [{"heads": 1}, {"dropout": 0.2}, {"gelu_tanh": False}], ids=str)
def test_ranks_with_layers_of_other_settings_are_named(change: dict[str, Any]) -> None:
    def main(comm: Communicator) -> None:
        model = gpt2(replace(SMALL, **(change if comm.rank == 1 else {})))
        Engine(model, comm, comm.ops, AdamW(), Settings(), micro_batch=1, global_batch=3, seed=0)

    with pytest.raises(CommError, match="rank 1 has schedules"):
        run(3, main)


def test_ranks_with_other_learning_rates_are_named() -> None:
    def main(comm: Communicator) -> None:
        engine = Engine(gpt2(SMALL), comm, comm.ops, AdamW(), Settings(), micro_batch=1, global_batch=2, seed=0)
        engine.step(None, lr=0.1 * (1 + comm.rank))

    with pytest.raises(CommError, match="rank 1 ran collectives and rates"):
        run(2, main)
