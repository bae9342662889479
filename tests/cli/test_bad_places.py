"""Places and moments that are against a run: nothing is lost, and one line says what to do."""

from __future__ import annotations

import fcntl
import json
import os

import pytest

from tests.cli.processes import fresh, mpiexec, program
from tests.cli.small_runs import finished, snapshot, training, weights

pytestmark = pytest.mark.jobs


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_directory_in_use(tmp_path, ranks):
    run = finished(tmp_path)
    before = snapshot(tmp_path)
    with (run / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = program(ranks, ["train", "--resume", str(run), "--set", "train.steps=9"])
    assert done.returncode == 2
    assert done.stderr.count("is being used by another run") == 1
    assert snapshot(tmp_path) == before


def test_more_ranks_than_sequences(tmp_path):
    done = mpiexec("-m", "mpishard", *training(tmp_path, "train.global_batch=1"))
    assert done.returncode == 2
    assert done.stderr.count("1 micro-batch a step (train.global_batch 1 / train.micro_batch 1) cannot be dealt") == 1
    assert done.stderr.count("evenly to 2 ranks; use 1 rank, or change the batches") == 1
    assert not (tmp_path / "run").exists()


def test_a_batch_that_two_ranks_cannot_share(tmp_path):
    done = mpiexec("-m", "mpishard", *training(tmp_path, "train.global_batch=3"))
    assert done.returncode == 2
    assert done.stderr.count("3 micro-batches a step") == 1
    assert done.stderr.count("cannot be dealt evenly to 2 ranks; use 1 or 3 ranks") == 1


DISK = """
import os, sys
from mpishard.cli import main
from mpishard.comm.launch import environment_rank
from mpishard.train.keeper import Keeper
save = Keeper.save
def full(*arguments):
    raise OSError(28, "No space left on device")
def second(self):
    if self.engine.steps == 2 and (environment_rank() or 0) == self.engine.comm.size - 1:
        os.pwrite = full
    return save(self)
Keeper.save = second
main(sys.argv[1:])
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path, ranks):
    script = tmp_path / "full.py"
    script.write_text(DISK)
    arguments = training(tmp_path, "checkpoint.every=1", "train.steps=3")
    done = (fresh if ranks == 1 else mpiexec)(str(script), *arguments)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("mpishard: ")]
    assert "No space left on device" in line
    assert "step-00000002" in line
    kept = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert kept == ["step-00000001"]
    again = program(ranks, ["train", "--resume", str(tmp_path / "run")])
    assert again.returncode == 0, again.stderr
    straight = fresh("-m", "mpishard", *training(tmp_path, "train.steps=3")[:-1], str(tmp_path / "straight"))
    assert straight.returncode == 0, straight.stderr
    found = [json.loads((tmp_path / name / "report.json").read_text())["checksum"] for name in ("run", "straight")]
    assert found[0] == found[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_odd_places_and_poor_environments_work(tmp_path, ranks):
    """Spaces and letters beyond ASCII in every path, no HOME, locale C, and nothing to write to around."""
    folder = tmp_path / "naïve läufe ∑"
    folder.mkdir()
    arguments = [*training(folder), "--init-from", str(weights(folder))]
    environment = {k: v for k, v in os.environ.items() if k not in ("LANG", "PYTHONIOENCODING")} | {"LC_ALL": "C"}
    if ranks == 1:
        del environment["HOME"]
        done = fresh("-m", "mpishard", *arguments, cwd="/proc", env=environment)
    else:  # Open MPI's mpiexec itself does not start without a home directory
        through = ("env", "-u", "HOME")
        done = mpiexec("-m", "mpishard", *arguments, cwd="/proc", env=environment, through=through)
    assert done.returncode == 0, done.stderr
    assert (folder / "run" / "report.json").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_run_directory_and_nowhere_to_make_one(tmp_path, ranks):
    arguments = training(tmp_path)[:-2]
    done = (fresh if ranks == 1 else mpiexec)("-m", "mpishard", *arguments, cwd="/proc")
    assert done.returncode == 2
    assert done.stderr.count("runs: cannot be made (") == 1
    assert done.stderr.count("choose another with --run-dir") == 1
