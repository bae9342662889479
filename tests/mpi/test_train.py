"""The training loop over MPI, on any number of ranks."""

import json

import numpy as np
import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.local import LocalCommunicator
from mpishard.data.tokens import write_tokens
from mpishard.errors import ConfigError
from mpishard.train import start
from mpishard.train.config import load

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def comm():
    from mpi4py import MPI

    from mpishard.comm.mpi import MpiCommunicator

    communicator = MpiCommunicator(MPI.COMM_WORLD, NumpyOps())
    yield communicator
    communicator.close()


@pytest.fixture
def folder(comm, tmp_path):
    """One directory for all ranks: rank 0's."""
    name = str(tmp_path).encode().ljust(1024, b"\0")
    from pathlib import Path

    return Path(comm.exchange(name)[0].rstrip(b"\0").decode())


def settings(folder, *more):
    tokens = (np.cumsum(np.random.default_rng(1).integers(0, 3, 500)) % 31).astype(np.uint8)
    for name in ("train", "heldout"):
        if not (folder / f"{name}.tokens").exists():
            write_tokens(folder / f"{name}.tokens", [tokens], 31)
    return load(
        None,
        None,
        [
            "model.layers=2", "model.width=10", "model.heads=2", "model.sequence=7", "model.vocabulary=31",
            "train.global_batch=12", "train.micro_batch=1", "train.steps=4", "train.heldout_every=2",
            f"data.train={folder}/train.tokens", f"data.heldout={folder}/heldout.tokens", *more,
        ],
    )  # fmt: skip


def test_a_run_over_mpi_equals_one_of_one_rank(comm, folder):
    if comm.rank == 0:
        config = settings(folder)
        start.run(config, folder / "alone", LocalCommunicator(NumpyOps()))
    comm.barrier()
    assert start.run(settings(folder), folder / "together", comm) == 0
    if comm.rank == 0:
        reports = [json.loads((folder / name / "report.json").read_text()) for name in ("alone", "together")]
        assert reports[0]["checksum"] == reports[1]["checksum"]
        assert reports[0]["heldout_loss"] == reports[1]["heldout_loss"]
        assert len(reports[1]["bytes"]) == comm.size
        lines = [
            [json.loads(line)["loss"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
            for name in ("alone", "together")
        ]
        assert lines[0] == lines[1]


def test_the_end_of_the_data_is_agreed(comm, folder):
    if comm.rank == 0:
        settings(folder)
    comm.barrier()
    # 71 windows of 7 tokens: 5 steps of 12
    assert start.run(settings(folder, "data.epochs=1", "train.steps=50"), folder / "run", comm) == 0
    if comm.rank == 0:
        assert json.loads((folder / "run" / "report.json").read_text())["steps"] == 5


def test_a_mistake_raises_on_every_rank(comm, folder):
    if comm.rank == 0:
        settings(folder)
    comm.barrier()
    config = settings(folder, "data.train=/nowhere/a.tokens")
    with pytest.raises(ConfigError, match="nowhere"):
        start.run(config, folder / "run", comm)
    comm.barrier()
