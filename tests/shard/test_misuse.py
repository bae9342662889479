"""An engine used wrongly, on every rank or on one: a line on all of them, nothing moved, and nobody left waiting."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpishard
from mpishard.array.dtypes import Array
from mpishard.array.numpy_ops import NumpyOps
from mpishard.checkpoint import load, save
from mpishard.comm import Communicator, LocalCommunicator, run_threads
from mpishard.errors import ConfigError, DataError, EngineError
from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.models.mlp import MlpClassifier, mlp_classifier
from mpishard.optim import AdamW
from mpishard.shard.engine import Engine

TEXT = gpt2(Gpt2(layers=3, width=6, heads=2, sequence=4, vocabulary=7))
POINTS = mlp_classifier(MlpClassifier(features=5, classes=3))
SAMPLE = np.zeros(4, np.int64)
BATCH = mpishard.batch(np.zeros((6, 4), int), np.zeros((6, 4), int))


def engine(comm: Communicator | None = None, model=TEXT) -> Engine:
    return mpishard.full_shard(model, AdamW(), comm, global_batch=6)


def zeros(micro: int, inputs: Array, targets: Array) -> None:
    inputs[...] = 0
    targets[...] = 0


def refused_by_all(call: Callable[[Engine, bool], object], message: str) -> None:
    """``call(engine, wrong)`` raises the same on all ranks, wrong on all or on one; then the engine goes on."""
    for wrong in ((0, 1, 2), (2,)):

        def main(comm: Communicator, wrong: tuple[int, ...] = wrong) -> tuple[str, float, str]:
            one = engine(comm)
            with pytest.raises(ConfigError, match=message) as caught:
                call(one, comm.rank in wrong)
            assert "\n" not in str(caught.value)
            return str(caught.value), one.step(BATCH, lr=0.1).loss, one.checksum()

        results = run_threads(3, main, deadline=20)
        alone = engine()
        assert set(results) == {(results[0][0], alone.step(BATCH, lr=0.1).loss, alone.checksum())}


RATES: list[tuple[Any, str]] = [
    (float("nan"), "nan"),
    (float("inf"), "inf"),
    (-1e-9, "-1e-09"),
    (10**400, "10000"),
    ("0.1", "'0.1'"),
    (None, "None"),
    (True, "True"),
    (1j, "1j"),
    (Decimal("0.1"), r"Decimal\('0.1'\)"),
    (np.float32("nan"), r"np.float32\(nan\)"),
    (np.array([[0.1], [0.2]]), r"array\(\[\[0\.1\], \[0\.2\]\]\); it must be a finite number"),
]


@pytest.mark.parametrize(("rate", "told"), RATES, ids=[str(n) for n in range(len(RATES))])
def test_what_is_no_learning_rate(rate, told) -> None:
    refused_by_all(lambda one, wrong: one.step(BATCH, lr=rate if wrong else 0.1), f"^lr is {told}")


def test_rates_of_any_type_of_number() -> None:
    for rate in (0, np.float32(0.25), np.int8(1), np.float64(0.5)):
        one, other = engine(), engine()
        result = one.step(BATCH, lr=rate)
        assert result == other.step(BATCH, lr=float(rate))
        assert type(result.lr) is float
        assert one.checksum() == other.checksum()


class Odd:
    inputs = targets = SAMPLE


@pytest.mark.parametrize("feed", [(SAMPLE, SAMPLE), "data", 3, Odd()], ids=["tuple", "str", "int", "Odd"])
def test_what_is_no_feed(feed) -> None:
    kind = type(feed).__name__
    refused_by_all(
        lambda one, wrong: one.step(feed if wrong else BATCH, lr=0.1),
        rf"^the feed is a {kind}; give mpishard\.batch\(inputs, targets\), or a function",
    )
    refused_by_all(lambda one, wrong: one.evaluate(feed if wrong else BATCH), rf"^the feed is a {kind};")


def test_a_batch_of_objects() -> None:
    """Which has no bytes to compare."""
    objects = mpishard.batch(np.full((6, 4), None), BATCH.targets)
    message = r"^inputs of the batch are object; the model takes tokens, such as int64$"
    refused_by_all(lambda one, wrong: one.step(objects if wrong else BATCH, lr=0.1), message)


@pytest.mark.parametrize(("feed", "kind"), [(zeros, "a function"), (None, "no data")])
def test_a_batch_on_one_rank_and_none_on_another(feed, kind) -> None:
    def main(comm: Communicator) -> None:
        one = engine(comm)
        mine, message = (feed, BATCH)[comm.rank // 2], f"^rank 2 gives a batch, rank 0 {kind}; give a batch on every"
        for call in (lambda: one.step(mine, lr=0.1), lambda: one.evaluate(mine)):
            with pytest.raises(ConfigError, match=message):
                call()
        assert one.step(BATCH, lr=0.1).updated

    run_threads(3, main, deadline=20)


SAMPLES: list[tuple[Any, Any, str]] = [
    ([0, 0, 0, 0], 0, r"^the sample is a list; give an array of shape \(4,\)$"),
    (SAMPLE[:3], 0, r"^the sample has shape \(3,\); the model takes \(4,\)$"),
    (SAMPLE[None], 0, r"^the sample has shape \(1, 4\)"),
    (SAMPLE + 0.5, 0, r"^the sample is float64; the model takes tokens, such as int64$"),
    (SAMPLE + 7, 0, r"^an input of the sample is 7; the model knows the tokens 0 to 6$"),
    (SAMPLE - 1, 0, r"^an input of the sample is -1; "),
    (SAMPLE, 4, r"^position is 4; it must be a whole number, 0 to 3$"),
    (SAMPLE, -1, r"^position is -1; "),
    (SAMPLE, 1.0, r"^position is 1\.0; "),
    (SAMPLE, True, r"^position is True; "),
    (SAMPLE, "1", r"^position is '1'; "),
]


@pytest.mark.parametrize(("sample", "position", "message"), SAMPLES, ids=[str(n) for n in range(len(SAMPLES))])
def test_what_cannot_be_predicted(sample, position, message) -> None:
    refused_by_all(
        lambda one, wrong: one.predict(sample, position) if wrong else one.predict(SAMPLE, 0),
        message,
    )


def test_predictions_from_samples_of_other_types() -> None:
    one = engine()
    expected = one.predict(SAMPLE + 2, 3).copy()
    assert (one.predict((SAMPLE + 2).astype(np.uint8), np.int64(3)) == expected).all()
    points = engine(model=POINTS)
    expected = points.predict(np.ones(5, np.float32), 0).copy()
    assert (points.predict(np.ones(5, np.int64), 0) == expected).all()
    with pytest.raises(ConfigError, match=r"^the sample is complex128; the model takes float32$"):
        points.predict(np.ones(5, complex), 0)
    with pytest.raises(ConfigError, match=r"^position is 1; it must be a whole number, 0 to 0$"):
        points.predict(np.ones(5), 1)


@pytest.mark.parametrize("name", [None, 3, b"head.weight", ["head.weight"]])
def test_what_is_no_name(name) -> None:
    refused_by_all(
        lambda one, wrong: one.parameter(name if wrong else "wte.weight"),
        r"^the parameter's name is .*; give a text, such as 'head\.weight'$",
    )


def test_a_long_line_is_cut_and_not_lost() -> None:
    refused_by_all(lambda one, wrong: one.step(BATCH, lr="é" * 500 if wrong else 0.1), "^lr is 'éé*$")


# --- what a feed gives, and what comes after a failure


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (-1, 0, "^the data hold the token -1; the model takes 0 to 6; mend"),
        (7, 0, "^the data hold the token 7;"),
        (0, -1, "^the data hold the target -1; the model takes 0 to 6, or -100 where there is none; mend"),
        (0, 7, "^the data hold the target 7;"),
    ],
)
def test_a_function_that_gives_what_there_is_not(inputs, targets, message) -> None:
    def feed(micro: int, into: Array, goals: Array) -> None:
        zeros(micro, into, goals)
        if micro == 4:
            into[0, 2], goals[0, 1] = inputs, targets

    for call in (lambda one: one.step(feed, lr=0.1), lambda one: one.evaluate(feed)):
        with pytest.raises(DataError, match=message):
            call(engine())


def test_a_class_that_there_is_not() -> None:
    def feed(micro: int, into: Array, goals: Array) -> None:
        zeros(micro, into, goals)
        goals[...] = 3

    with pytest.raises(DataError, match=r"^the data hold the target 3; the model takes 0 to 2, or -100"):
        engine(model=POINTS).step(feed, lr=0.1)


AFTER: dict[str, Callable[[Engine], object]] = {
    "step 1": lambda one: one.step(BATCH, lr=0.1),
    "an evaluation before step 1": lambda one: one.evaluate(BATCH),
    "a prediction": lambda one: one.predict(SAMPLE, 0),
    "a checksum": lambda one: one.checksum(),
    "reading a parameter": lambda one: one.parameter("wte.weight"),
}


@pytest.mark.parametrize("call", ["step", "evaluate"])
@pytest.mark.parametrize("micro", [0, 5])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_a_failure_an_engine_says_so(call, micro, error) -> None:
    def feed(number: int, inputs: Array, targets: Array) -> None:
        zeros(number, inputs, targets)
        if number == micro:
            raise error("the data are gone")

    one = engine()
    one.step(BATCH, lr=0.1)
    failed = "step 1" if call == "step" else "an evaluation before step 1"
    with pytest.raises(error, match="the data are gone"):
        one.step(feed, lr=0.1) if call == "step" else one.evaluate(feed)
    for what, deed in AFTER.items():
        with pytest.raises(EngineError) as caught:
            deed(one)
        assert str(caught.value) == (
            f"{failed} failed, so the engine's state is undefined and {what} is refused; "
            "make another engine and load the last checkpoint into it"
        )
    one.close()
    one.close()
    with pytest.raises(EngineError, match="the engine was closed before step 1"):
        one.step(BATCH, lr=0.1)


def test_a_layer_that_fails_too() -> None:
    class Failing(NumpyOps):
        fails = False

        def _layernorm(self, *arguments: Any) -> None:
            if self.fails:
                raise RuntimeError("no more")
            super()._layernorm(*arguments)

    ops = Failing()
    one = engine(LocalCommunicator(ops))
    ops.fails = True
    with pytest.raises(RuntimeError, match="no more"):
        one.predict(SAMPLE, 0)
    ops.fails = False
    with pytest.raises(EngineError, match=r"^a prediction failed, so the engine's state is undefined and step 0 is "):
        one.step(BATCH, lr=0.1)


def test_a_step_inside_a_step_is_refused() -> None:
    one = engine()

    def feed(micro: int, inputs: Array, targets: Array) -> None:
        one.evaluate(BATCH)

    with pytest.raises(EngineError, match="an evaluation before step 0 is refused"):
        one.step(feed, lr=0.1)


def test_a_rank_that_failed_closes_without_waiting_for_the_others() -> None:
    """The others are in the step; the failure reaches them by the run, and by the abort hook under MPI."""

    def main(comm: Communicator) -> None:
        one = engine(comm)

        def feed(micro: int, inputs: Array, targets: Array) -> None:
            if micro == 1:
                raise ValueError("the data of rank 1 are gone")
            zeros(micro, inputs, targets)

        try:
            one.step(feed, lr=0.1)
        finally:
            if comm.rank == 1:
                one.close()

    with pytest.raises(Exception, match="the data of rank 1 are gone"):
        run_threads(3, main, deadline=20)


def test_nothing_is_saved_from_an_engine_in_which_a_step_failed(tmp_path: Path) -> None:
    one = engine()

    def broken(micro: int, inputs: Array, targets: Array) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        one.step(broken, lr=0.1)
    for room in (lambda: save(one, tmp_path / "x", configuration={}), lambda: load(one, tmp_path)):
        with pytest.raises(EngineError, match="step 0 failed, so the engine's state is undefined"):
            room()
    assert not list(tmp_path.iterdir())


def test_memory_that_one_rank_cannot_get_is_everybodys_error() -> None:
    """Where one rank alone raised, the others would wait for it when they bind their collectives."""

    class Full(NumpyOps):
        def empty(self, count, dtype):
            if count > 1 << 14:
                raise MemoryError("no room for that")
            return super().empty(count, dtype)

    def body(comm: Communicator) -> str:
        if comm.rank == 1:
            comm.ops = Full()
        with pytest.raises(ConfigError, match=r"rank 1 cannot get its memory \(no room for that\); use more ranks"):
            mpishard.full_shard(mlp_classifier(MlpClassifier(99, 3)), AdamW(), comm, global_batch=3)
        return "told"

    assert run_threads(3, body) == ["told"] * 3
