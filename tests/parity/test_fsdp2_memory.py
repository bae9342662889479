"""scripts/compare_fsdp2_memory: mpishard's processes beside those of PyTorch's FSDP2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.measuring import ROOT, module

jobs, fsdp2_memory = module("jobs"), module("fsdp2_memory")


def compare(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    out = folder / "found.json"
    command = [sys.executable, str(ROOT / "scripts" / "compare_fsdp2_memory"), "--json", str(out), *arguments]
    done = subprocess.run(command, env=jobs.environment(), capture_output=True, text=True, timeout=800)
    assert out.exists(), done.stdout + done.stderr
    return done, json.loads(out.read_text())


@pytest.mark.jobs
def test_both_run_and_are_told(tmp_path: Path) -> None:
    done, found = compare(tmp_path, "--model", "tiny", "--ranks", "2", "--steps", "2")
    ours, theirs = found["mpishard"], found["fsdp2"]
    assert len(ours) == len(theirs) == 2
    for what, side in fsdp2_memory.SIDES.items():
        mean = sum(rank[side] for rank in theirs) / 2
        assert found["ratios"][what][0] == pytest.approx(max(rank[side] for rank in ours) / mean)
        assert all(rank[side] > 0 for rank in (*ours, *theirs))
    over = any(found["ratios"][what][0] > bar for what, bar in fsdp2_memory.BARS.items())
    assert done.returncode == over
    assert "FSDP2: PyTorch" in done.stdout


@pytest.mark.jobs
@pytest.mark.slow
def test_gpt2_takes_less_than_in_fsdp2(tmp_path: Path) -> None:
    """GPT-2 124M in bf16 on 4 ranks: at most 0.65 above the start and 0.6 whole."""
    done, found = compare(tmp_path)
    assert (len(found["fsdp2"]), done.returncode) == (4, 0), done.stdout
