"""Saved on N ranks and resumed on M, in any strategy: the bits of the run that never stopped."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.checkpoint import load, load_weights, read_manifest, save
from mpishard.comm.base import Communicator
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.threads import run
from mpishard.errors import CheckpointError
from mpishard.nn.model import freeze
from mpishard.optim import LossScale
from tests.checkpoint.runs import BASE, END, MIDDLE, alone, expected, resume, second_half, train_and_save
from tests.shard.training import train

RANKS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Path]:
    """One checkpoint for each number of ranks and strategy."""
    folder = tmp_path_factory.mktemp("saved")
    paths = {}
    for ranks, strategy in itertools.product(RANKS, ["full_shard", "no_shard"]):
        path = paths[ranks, strategy] = folder / f"{strategy}-{ranks}" / f"step-{MIDDLE}"
        job = BASE.with_settings(strategy=strategy)
        run(ranks, lambda comm, path=path, job=job: train_and_save(comm, path, job))
    return paths


@pytest.mark.parametrize(("before", "after"), list(itertools.product(RANKS, RANKS)))
def test_ranks(saved: dict[tuple[int, str], Path], before: int, after: int) -> None:
    path = saved[before, "full_shard"]
    assert run(after, lambda comm: resume(comm, path)) == [second_half()] * after


@pytest.mark.parametrize(
    ("before", "strategy", "after", "other"),
    [
        (3, "full_shard", 2, "no_shard"),
        (2, "no_shard", 4, "full_shard"),
        (4, "no_shard", 3, "no_shard"),
        (1, "no_shard", 1, "full_shard"),
        (3, "full_shard", 2, "shard_grad_op"),
        (2, "full_shard", 3, "shard_optimizer"),
    ],
)
def test_strategies(saved: dict[tuple[int, str], Path], before: int, strategy: str, after: int, other: str) -> None:
    job = BASE.with_settings(strategy=other)
    outcomes = run(after, lambda comm: resume(comm, saved[before, strategy], job))
    assert outcomes == [second_half()] * after


STRATEGIES = [
    ("shard_grad_op", {}, 3),
    ("shard_optimizer", {}, 2),
    ("hybrid_shard", {"group": 1}, 2),
    ("hybrid_shard", {"group": 2}, 4),
]


@pytest.mark.parametrize(("strategy", "more", "ranks"), STRATEGIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_other_strategies_hold_is_saved_and_loaded(
    tmp_path: Path, strategy: str, more: dict[str, int], ranks: int, dtype: str
) -> None:
    """Where ranks hold copies, each saves a part of them; loading brings all copies up to date."""
    job = BASE.with_settings(strategy=strategy, **more)

    def body(comm: Communicator) -> str:
        engine = job.engine(comm, dtype_name=dtype)
        train(engine, job, 2)
        save(engine, tmp_path / "x", configuration={})
        other = job.engine(comm, dtype_name=dtype)
        for part in other.state.values():
            for array in [*part.arrays.values(), *([] if part.resident is None else [part.resident])]:
                array.fill(np.nan)
        load(other, tmp_path / "x")
        assert other.evaluate(job.feed(50)) == engine.evaluate(job.feed(50))
        outcome = train(engine, job, 1, first=2)
        assert train(other, job, 1, first=2) == outcome
        return read_manifest(tmp_path / "x").checksum

    (checksum,) = set(run(ranks, body))
    one = alone(dtype_name=dtype, seed=99)
    load(one, tmp_path / "x")
    assert one.checksum() == checksum


@pytest.mark.parametrize("strategy", ["shard_grad_op", "hybrid_shard"])
def test_weights_reach_every_copy(tmp_path: Path, saved: dict[tuple[int, str], Path], strategy: str) -> None:
    reference = alone(seed=99)
    load_weights(reference, saved[1, "full_shard"])
    want = reference.evaluate(BASE.feed(50))
    job = BASE.with_settings(strategy=strategy, group=int(strategy == "hybrid_shard"))

    def body(comm: Communicator) -> object:
        engine = job.engine(comm, seed=7)
        load_weights(engine, saved[1, "full_shard"])
        return engine.evaluate(job.feed(50))

    assert run(2, body) == [want] * 2


def test_the_loss_scale_is_saved_and_restored(tmp_path: Path) -> None:
    engine = alone(dtype_name="float16", loss_scale=LossScale(2.0**12, every=2))
    train(engine, BASE, 3)
    assert engine.loss_scale is not None
    save(engine, tmp_path / "x", configuration={})
    assert read_manifest(tmp_path / "x").loss_scale == engine.loss_scale.state() == {"scale": 2.0**13, "good": 1}
    others = {
        "goes on": alone(dtype_name="float16", loss_scale=LossScale(2.0, every=2)),
        "fixed": alone(dtype_name="float16", loss_scale=LossScale(2.0, dynamic=False)),
        "none": alone(),
    }
    for other in others.values():
        load(other, tmp_path / "x")
    assert others["goes on"].loss_scale.state() == engine.loss_scale.state()
    assert others["fixed"].loss_scale.state() == {"scale": 2.0, "good": 0}
    assert train(others["goes on"], BASE, 2, first=3) == train(engine, BASE, 2, first=3)
    save(others["none"], tmp_path / "y", configuration={})
    assert read_manifest(tmp_path / "y").loss_scale is None
    load(others["goes on"], tmp_path / "y")
    assert others["goes on"].loss_scale.scale == engine.loss_scale.scale


def test_frozen_parameters_have_no_states_in_files(tmp_path: Path) -> None:
    frozen = freeze(BASE.model, ["wte.*", "h.1.*", "h.0.mlp.*.bias"])

    def body(comm: Communicator) -> object:
        engine = BASE.engine(comm, model=frozen)
        train(engine, BASE, 2)
        save(engine, tmp_path / "x", configuration={})
        other = BASE.engine(comm, model=frozen)
        for part in other.state.values():
            part.arrays["param"].fill(np.nan)
        load(other, tmp_path / "x")
        assert other.checksum() == engine.checksum()
        return train(engine, BASE, 2, first=2), train(other, BASE, 2, first=2)

    one, two = {outcome for outcomes in run(3, body) for outcome in outcomes}, run(1, body)[0]
    assert one == set(two)
    manifest = read_manifest(tmp_path / "x")
    held = {tensor.name.removeprefix("transformer.") for tensor in manifest.tensors if len(tensor.checksums) == 3}
    names = {tensor.name.removeprefix("transformer.") for tensor in manifest.tensors}
    assert names - held == {
        name for name in names if name.startswith(("wte.", "h.1.")) or (name.startswith("h.0.mlp") and "bias" in name)
    }
    whole = alone(seed=99)
    for part in whole.state.values():
        part.arrays["exp_avg"].fill(np.nan)
    load(whole, tmp_path / "x")  # what was frozen begins at zero
    assert whole.checksum() != manifest.checksum
    part = whole.state["h.1"]
    assert not any(part.arrays["exp_avg"][piece.offset : piece.end].any() for piece in part.pieces)
    save(whole, tmp_path / "y", configuration={})
    engine = BASE.engine(LocalCommunicator(NumpyOps()), model=frozen)
    load(engine, tmp_path / "y")
    assert engine.checksum() == manifest.checksum


def test_files_do_not_depend_on_ranks_and_strategy(saved: dict[tuple[int, str], Path]) -> None:
    found = {
        tuple((path / f"{name}.safetensors").read_bytes() for name in ("model", "exp_avg", "exp_avg_sq"))
        for path in saved.values()
    }
    assert len(found) == 1
    manifests = [read_manifest(path) for path in saved.values()]
    assert all(replace(m, configuration={}) == replace(manifests[0], configuration={}) for m in manifests)
    assert manifests[0].checksum == expected(MIDDLE).checksum
    assert (manifests[0].step, manifests[0].samples) == (MIDDLE, MIDDLE * BASE.micros * BASE.micro_batch)


def test_poisoned_memory_is_not_saved(tmp_path: Path, saved: dict[tuple[int, str], Path]) -> None:
    """Padding, released and unarrived memory is NaN; none of it reaches a file or comes from one."""
    job = replace(BASE, poison=True).with_settings(prefetch=2)
    run(3, lambda comm: train_and_save(comm, tmp_path / "x", job))
    for name in ("model", "exp_avg", "exp_avg_sq"):
        path = saved[1, "full_shard"] / f"{name}.safetensors"
        assert (tmp_path / "x" / path.name).read_bytes() == path.read_bytes()
    assert run(2, lambda comm: resume(comm, tmp_path / "x", job)) == [second_half()] * 2


def test_training_goes_on_after_a_save(tmp_path: Path) -> None:
    engine = alone()
    losses = []
    for step in range(END):
        losses += train(engine, BASE, 1, first=step).losses
        save(engine, tmp_path / "same-name", configuration={})
    assert tuple(losses) == expected().losses
    assert read_manifest(tmp_path / "same-name").checksum == expected().checksum
    assert [path.name for path in tmp_path.iterdir()] == ["same-name"]


def test_an_engine_without_optimiser_takes_the_parameters(saved: dict[tuple[int, str], Path]) -> None:
    reference = alone()
    load(reference, saved[2, "full_shard"])
    want = reference.evaluate(BASE.feed(50))

    def body(comm: object) -> object:
        engine = BASE.engine(comm, optimizer=None, seed=99)
        load(engine, saved[3, "full_shard"])
        return engine.evaluate(BASE.feed(50)), engine.steps

    assert run(2, body) == [(want, MIDDLE)] * 2


def test_parameters_alone_are_saved_and_loaded(tmp_path: Path) -> None:
    run(2, lambda comm: save(BASE.engine(comm, optimizer=None), tmp_path / "x", configuration={}))
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["manifest.json", "model.safetensors"]
    engine = alone(optimizer=None, seed=99)
    load(engine, tmp_path / "x")
    assert engine.checksum() == read_manifest(tmp_path / "x").checksum
    with pytest.raises(CheckpointError) as error:
        load(alone(), tmp_path / "x")
    assert str(error.value) == (
        f"{tmp_path / 'x'}: holds model, the optimiser also needs exp_avg, exp_avg_sq; "
        "take a checkpoint of training, or begin anew with its weights"
    )


def test_float64_stays_exact(tmp_path: Path) -> None:
    engine = alone(dtype_name="float64")
    train(engine, BASE, 2)
    save(engine, tmp_path / "x", configuration={})
    other = alone(dtype_name="float64", seed=99)
    load(other, tmp_path / "x")
    assert other.checksum() == engine.checksum()
    with pytest.raises(CheckpointError, match="holds float64, the engine float32; load it into one of its own type"):
        load(alone(), tmp_path / "x")
