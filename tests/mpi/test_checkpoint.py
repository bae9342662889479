"""Checkpoints in processes: saved on N ranks and resumed on M, where the larger is the launch's number of ranks."""

from __future__ import annotations

import errno
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.checkpoint import load, load_weights, newest, save
from mpishard.checkpoint.agree import from_rank_zero
from mpishard.comm.base import Communicator
from mpishard.errors import CheckpointError
from tests.checkpoint.runs import BASE, UNREADABLE, resume, second_half, train_and_save, unreadable
from tests.shard.training import MICROS, Job

pytestmark = pytest.mark.mpi

SHARED = ("full_shard", "no_shard")


@pytest.fixture(scope="module")
def comm() -> Iterator[Communicator]:
    from mpi4py import MPI

    from mpishard.comm.mpi import MpiCommunicator

    made = MpiCommunicator(MPI.COMM_WORLD, NumpyOps())
    yield made
    made.close()


@pytest.fixture
def folder(comm: Communicator, tmp_path: Path) -> Path:
    """One folder for all ranks: pytest's are each rank's own."""
    return Path(os.fsdecode(from_rank_zero(comm, lambda: os.fsencode(tmp_path))))


def on_first(comm: Communicator, ranks: int) -> tuple[Communicator, bool]:
    """A communicator whose first group is the first ranks, and whether this rank is in it."""
    group = comm.split([list(range(ranks)), *([rank] for rank in range(ranks, comm.size))])
    return group, comm.rank < ranks


def test_other_numbers_of_ranks(comm: Communicator, folder: Path) -> None:
    """Launches of 1, 2, 3 and 4 ranks together go from each number to each."""
    counts = [ranks for ranks in range(1, comm.size + 1) if MICROS % ranks == 0]
    jobs = dict(zip(counts, itertools.cycle([BASE, BASE.with_settings(strategy="no_shard")])))
    for before, job in jobs.items():
        group, inside = on_first(comm, before)
        if inside:
            train_and_save(group, folder / f"{before}" / "step-3", job)
        group.close()
    comm.barrier()
    for after in counts:
        group, inside = on_first(comm, after)
        if inside:
            for before in counts if after == comm.size else [comm.size]:
                assert resume(group, folder / f"{before}" / "step-3") == second_half(), (before, after)
        group.close()


@pytest.mark.parametrize("strategy", SHARED)
def test_all_ranks_twice_in_a_row(comm: Communicator, folder: Path, strategy: str) -> None:
    job: Job = BASE.with_settings(strategy=strategy)
    for _ in range(2):
        train_and_save(comm, folder / "step-3", job)
        assert newest(folder) == folder / "step-3"
        assert resume(comm, folder / "step-3", job) == second_half()


def test_a_full_disk_on_one_rank(comm: Communicator, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_and_save(comm, folder / "step-3")
    failing = min(1, comm.size - 1)
    engine = BASE.engine(comm)
    engine.steps = 3

    def pwrite(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if comm.rank == failing:
            patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(CheckpointError, match=f"by rank {failing} on .* make room"):
            save(engine, folder / "step-3", configuration={})
    assert [path.name for path in folder.iterdir()] == ["step-3"]
    comm.barrier()
    assert resume(comm, folder / "step-3") == second_half()


def test_folders_that_the_ranks_do_not_share(comm: Communicator) -> None:
    with tempfile.TemporaryDirectory(prefix=f"own-{comm.rank}-") as own:
        if comm.size > 1:
            with pytest.raises(
                CheckpointError, match=r"by rank 1 on .* must lie on a file system that all nodes share"
            ):
                save(BASE.engine(comm), Path(own) / "x", configuration={})
            assert list(Path(own).iterdir()) == []
        else:
            save(BASE.engine(comm), Path(own) / "x", configuration={})


def test_damage_in_one_ranks_part(comm: Communicator, folder: Path) -> None:
    train_and_save(comm, folder / "step-3")
    if comm.rank == 0:
        with (folder / "step-3" / "exp_avg.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
    comm.barrier()
    with pytest.raises(CheckpointError, match=r"is damaged .*transformer\.h\.3\.mlp\.c_proj\.bias"):
        load(BASE.engine(comm), folder / "step-3")


@pytest.mark.parametrize("kind", UNREADABLE)
def test_no_rank_waits_for_what_is_no_file(comm: Communicator, folder: Path, kind: str) -> None:
    engine = BASE.engine(comm)
    save(engine, folder / "x", configuration={})
    for name in ("exp_avg.safetensors", "model.safetensors", "manifest.json"):
        if comm.rank == 0:
            unreadable(folder / "x" / name, kind)
        comm.barrier()
        with pytest.raises(CheckpointError, match=f"{name}: is no regular file; "):
            load(engine, folder / "x")
        if name == "model.safetensors":
            given_itself = [folder / "x" / name] if kind != "folder" else []
            for given in (folder / "x", *given_itself):
                with pytest.raises(CheckpointError, match=f"{name}: is no regular file; "):
                    load_weights(engine, given)


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_no_file_has(comm: Communicator, folder: Path, name: str) -> None:
    engine = BASE.engine(comm)
    for action in (lambda path: save(engine, path, configuration={}), lambda path: load(engine, path)):
        with pytest.raises(CheckpointError, match="cannot be the name of a file; use another"):
            action(folder / name)
