"""Both commands on the stand-in for GPUs: what is on a stream is waited for before a sample ends."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mpishard.launched import environment_rank
from tests.cli.processes import mpiexec

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.skipif(environment_rank() is not None, reason="an MPI job cannot start another one everywhere"),
]


def bench(out: Path, *arguments: str) -> dict:
    more = ("--device", "cuda", "--transports", "staged,nccl", "--json", str(out))
    variables = dict(os.environ) | {"STANDIN_LATE": "others"}
    done = mpiexec("-m", "tests.standin.run", "-m", "mpishard", "bench", *arguments, *more, env=variables, seconds=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


def test_collectives_of_gpus(tmp_path: Path) -> None:
    found = bench(tmp_path / "found.json", "collectives", "--min", "4KiB", "--max", "4KiB", "--seconds", "0.001")
    assert {row["transport"] for row in found["rows"]} == {"staged", "nccl"}
    assert len(found["rows"]) == 2 * 3 * 2
    assert all(row["correct"] for row in found["rows"])


def test_steps_of_gpus(tmp_path: Path) -> None:
    found = bench(tmp_path / "found.json", "step", "--preset", "tiny", "--steps", "1")
    assert [row["transport"] for row in found["rows"]] == ["staged", "nccl"]
    assert all(row["same_bits"] for row in found["rows"])
