"""Training with each algorithm of a reduce-scatter: the ordered ones change no bit, and what was measured is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.processes import mpiexec
from tests.cli.small_runs import training

pytestmark = pytest.mark.jobs


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def run(folder: Path, *settings: str) -> str:
    folder.mkdir(exist_ok=True)
    done = mpiexec("-m", "mpishard", *training(folder, "comm.transport=mpi", *settings))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_table_is_kept_and_used_by_the_run_that_goes_on(tmp_path):
    found = {}
    for algorithm in ("auto", "alltoall", "pairwise", "ring", "native"):
        said = run(tmp_path / algorithm, f"comm.algorithm={algorithm}")
        assert (f"reduce-scatter {algorithm}" in said) == (algorithm != "alltoall")
        assert (tmp_path / algorithm / "run" / "tuning.json").exists() == (algorithm == "auto")
        found[algorithm] = losses(tmp_path / algorithm)
    assert found["auto"] == found["alltoall"] == found["pairwise"]
    for algorithm in ("ring", "native"):
        assert found[algorithm] == pytest.approx(found["auto"], rel=1e-4)
    file = tmp_path / "auto" / "run" / "tuning.json"
    table = json.loads(file.read_text())
    assert table["ranks"] == 2
    assert table["rows"]
    table["rows"] = table["rows"][:1]
    table["rows"][0]["bytes"] = 12345
    file.write_text(json.dumps(table))
    goes_on = ["train", "--resume", str(tmp_path / "auto" / "run"), "--set", "train.steps=3"]
    done = mpiexec("-m", "mpishard", *goes_on)
    assert done.returncode == 0, done.stderr
    assert [row["bytes"] for row in json.loads(file.read_text())["rows"]] == [12345]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            ["comm.algorithm=ring"],
            "algorithm 'ring' is for arrays in host memory that transport 'mpi' carries, and here",
        ),
        (["comm.algorithm=native", "precision.compute=bf16"], "MPI's own sums are of fp32: set precision.reduce"),
    ],
)
def test_an_algorithm_that_does_not_fit_is_refused_in_one_line(tmp_path, settings, told):
    done = mpiexec("-m", "mpishard", *training(tmp_path, *settings))
    assert done.returncode == 2
    assert done.stderr.count(told) == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_transport_without_a_choice_measures_nothing(tmp_path):
    done = mpiexec("-m", "mpishard", *training(tmp_path, "comm.transport=node"))
    assert done.returncode == 0, done.stderr
    assert "reduce-scatter" not in done.stdout
    assert not (tmp_path / "run" / "tuning.json").exists()
