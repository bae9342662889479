"""Saved on N ranks and resumed on M, in any strategy: the bits of the run that never stopped."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from mpishard.checkpoint import load, read_manifest, save
from mpishard.comm.threads import run
from mpishard.errors import CheckpointError
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
    ],
)
def test_strategies(saved: dict[tuple[int, str], Path], before: int, strategy: str, after: int, other: str) -> None:
    job = BASE.with_settings(strategy=other)
    outcomes = run(after, lambda comm: resume(comm, saved[before, strategy], job))
    assert outcomes == [second_half()] * after


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
