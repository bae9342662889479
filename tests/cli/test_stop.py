"""Real runs that are told to stop, interrupted or killed: what was saved goes on with the same numbers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpishard.comm.record import process_start, read_record, record_path
from tests.cli.processes import ROOT, launcher, mpiexec
from tests.cli.small_runs import tokens, training

pytestmark = pytest.mark.jobs



@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    return {name: tokens(folder, name) for name in ("train", "heldout")}


def arguments(run: Path, data: dict[str, Path]) -> list[str]:
    """A run of a second or two."""
    settings = ["train.steps=120", "train.global_batch=12", "train.micro_batch=2", "checkpoint.every=20"]
    return [*training(run.parent, *settings, "model.layers=2", "model.width=20", **data)[1:-1], str(run)]



@contextmanager
def job(ranks: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [*(launcher(ranks) if ranks > 1 else []), sys.executable, "-m", "mpishard", "train", *arguments]
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # the launcher ends its ranks
            process.wait(10)


def until(path: Path, lines: int) -> None:
    """Wait until a run has written so many lines of metrics."""
    deadline = time.monotonic() + 30
    while not path.exists() or path.read_text().count("\n") < lines:
        assert time.monotonic() < deadline, f"{path} has not grown"
        time.sleep(0.01)


def pid_of(run: Path, rank: int) -> int:
    return read_record(record_path(run / "ranks", rank)).pid


def ended(process: subprocess.Popen[str], within: float = 10.0) -> tuple[int, str]:
    """Return the exit code and what was printed; it must end in time."""
    begin = time.monotonic()
    printed = process.communicate(timeout=40)[0]
    assert time.monotonic() - begin < within, printed
    return process.returncode, printed


@pytest.fixture(scope="module")
def straight(tmp_path_factory, data):
    run = tmp_path_factory.mktemp("straight") / "run"
    with job(1, *arguments(run, data)) as process:
        assert ended(process, 40)[0] == 0
    return run


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def goes_on_as(run: Path, straight: Path, ranks: int) -> None:
    with job(ranks, "--resume", str(run)) as process:
        code, printed = ended(process, 40)
    assert code == 0, printed
    assert losses(run) == losses(straight)
    found = [json.loads((folder / "report.json").read_text())["checksum"] for folder in (run, straight)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("ranks", "told", "number", "then"),
    [(1, 0, signal.SIGTERM, 3), (2, 1, signal.SIGUSR1, 1), (3, 2, signal.SIGTERM, 2), (2, 0, signal.SIGUSR1, 3)],
)
def test_a_signal_to_a_rank_saves_and_ends_the_run(tmp_path, data, straight, ranks, told, number, then):
    run = tmp_path / "run"
    with job(ranks, *arguments(run, data)) as process:
        until(run / "metrics.jsonl", 30)
        os.kill(pid_of(run, told), number)
        code, printed = ended(process)
    assert code == 0, printed
    assert f"stopped by {number.name} (rank {told}) after step" in printed
    assert (run / "stopped").exists()
    assert not (run / "report.json").exists()
    goes_on_as(run, straight, then)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_killed_rank_ends_the_others_and_the_last_checkpoint_goes_on(tmp_path, data, straight, ranks):
    run = tmp_path / "run"
    with job(ranks, *arguments(run, data)) as process:
        until(run / "metrics.jsonl", 50)
        os.kill(pid_of(run, ranks - 1), signal.SIGKILL)
        code, printed = ended(process)
        assert code != 0, printed
        for rank in range(ranks):
            assert process_start(pid_of(run, rank)) is None, f"rank {rank} is still there"
    goes_on_as(run, straight, 2)


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_interrupt_ends_cleanly(tmp_path, data, ranks):
    run = tmp_path / "run"
    with job(ranks, *arguments(run, data)) as process:
        until(run / "metrics.jsonl", 5)
        process.send_signal(signal.SIGINT)
        code, printed = ended(process)
    assert code != 0
    assert "Traceback" not in printed
    if ranks == 1:
        assert code == 130


FAILS = """
import sys
from mpishard.cli import main
from mpishard.comm.launch import environment_rank
from mpishard.data.loader import Batches
read = Batches.read
def fails(self, step, micro, *arrays):
    if step == 5 and environment_rank() == 1:
        raise ValueError("broken")
    return read(self, step, micro, *arrays)
Batches.read = fails
main(sys.argv[1:])
"""


def test_an_exception_of_one_rank_ends_all_with_its_traceback_once(tmp_path, data):
    (tmp_path / "fails.py").write_text(FAILS)
    command = [*launcher(3), sys.executable, str(tmp_path / "fails.py"), "train", *arguments(tmp_path / "r", data)]
    begin = time.monotonic()
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=40
    )
    assert time.monotonic() - begin < 15
    assert done.returncode != 0
    assert done.stderr.count("[rank 1] ValueError: broken") == 1
    assert done.stderr.count("Traceback") == 1


IMPORTS = """
import sys
from mpishard.comm.launch import environment_rank
if environment_rank() == 1:
    sys.modules["{module}"] = None
from mpishard.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("module", ["pydantic", "mpi4py"])
def test_a_rank_that_cannot_import_is_named(tmp_path, data, module):
    (tmp_path / "imports.py").write_text(IMPORTS.format(module=module))
    command = [*launcher(2), sys.executable, str(tmp_path / "imports.py"), "train", *arguments(tmp_path / "r", data)]
    begin = time.monotonic()
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=40
    )
    assert time.monotonic() - begin < 15
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("mpishard: ")]
    assert line.startswith("mpishard: rank 1 on ")
    assert module in line
    assert "install" in line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "r").exists()


APART = """
import sys
import numpy as np
from mpi4py import MPI
import mpishard
from pathlib import Path
from mpishard.checkpoint import save
from mpishard.models.mlp import MlpClassifier, mlp_classifier
from mpishard.optim import AdamW
model = mlp_classifier(MlpClassifier(features=4, classes=3))
engine = mpishard.full_shard(model, AdamW(), MPI.COMM_WORLD, global_batch=6)
mpishard.install_abort_hook(engine.comm)
points = np.zeros((6, 4))
for step in range(4 + engine.comm.rank):
    engine.step(mpishard.batch(points, np.zeros(6, int)), lr=0.1)
{then}
"""


@pytest.mark.parametrize(
    ("then", "where"),
    [
        ("engine.checksum()", "a checksum"),
        ("engine.evaluate(mpishard.batch(points, np.zeros(6, int)))", "an evaluation before step 4"),
        ("engine.predict(points[0], 0)", "a prediction"),
        ("engine.parameter('anything')", "reading a parameter"),
        ("save(engine, Path('x'), configuration={})", "saving a checkpoint"),
        ("engine.close()", "closing the engine"),
        ("", "the end of the program"),
    ],
)
def test_ranks_of_a_loop_that_go_different_ways_are_told(tmp_path, then, where):
    (tmp_path / "apart.py").write_text(APART.format(then=then))
    done = mpiexec(str(tmp_path / "apart.py"), cwd=tmp_path)
    assert done.returncode != 0
    assert f"rank 1 is at step 4, rank 0 at {where}; every rank must make the same calls" in done.stderr
    assert not list(tmp_path.glob("x*"))
