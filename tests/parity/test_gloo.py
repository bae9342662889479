"""scripts/compare_gloo: our collectives beside those of PyTorch's gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.measuring import ROOT, module

jobs = module("jobs")
COMMAND = [sys.executable, str(ROOT / "scripts" / "compare_gloo")]


@pytest.mark.jobs
def test_all_are_measured_and_right(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    arguments = ("--min", "64KiB", "--max", "256KiB", "--seconds", "0.001", "--json", str(out))
    done = subprocess.run([*COMMAND, *arguments], env=jobs.environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    found = {(row["op"], row["transport"], row["algorithm"]) for row in rows if row["correct"]}
    variants = (("mpi", "native"), ("mpi", "auto"), ("node", "auto"), ("gloo", "auto"))
    ops = ("all_gather", "reduce_scatter", "all_reduce")
    assert found == {(op, *variant) for op in ops for variant in variants}
    assert len(rows) == len(found) * 2
    assert all(row["vs_baseline"] == 1 for row in rows if row["transport"] == "gloo")
    assert "node/gloo" in done.stdout
    assert "Warning" not in done.stderr


def test_bad_sizes_are_refused() -> None:
    done = subprocess.run([*COMMAND, "--min", "4"], env=jobs.environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "compare_gloo: --min is '4', without a unit; write 4KiB (2**10 bytes) or 4MiB\n"
