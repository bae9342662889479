"""The measuring programs: what they see of processes, and what the processes of a training job hold beside the plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.measuring import ROOT, module

process, jobs, plan_memory, table = (module(name) for name in ("process", "jobs", "plan_memory", "table"))
MIB = process.MIB

GROWS = """
import sys
from pathlib import Path
from measure.process import MIB, Marks, forget_peak
marks = Marks(Path(sys.argv[1]), 0)
marks("start")
held = bytearray(96 * MIB)
del held
marks("middle")
forget_peak()
kept = bytearray(32 * MIB)
marks("end")
"""


def watched(folder: Path, code: str) -> Any:
    jobs.run([[sys.executable, "-c", code, str(folder)]], [jobs.environment()], folder, 60)
    return process.read_marks(folder)


def test_the_peak_of_a_process_is_found_though_it_was_given_back(tmp_path: Path) -> None:
    [rank] = watched(tmp_path, GROWS)
    start = rank.mark("start").held.proportional
    assert rank.peak("middle") - start == pytest.approx(96 * MIB, abs=2 * MIB)
    assert rank.peak("end") - start == pytest.approx(32 * MIB, abs=2 * MIB)
    assert rank.mark("middle").held.proportional - start == pytest.approx(0, abs=2 * MIB)
    first, last = (rank.mark(name).kinds["anonymous"] for name in ("start", "end"))
    assert last - first == pytest.approx(32 * MIB, abs=2 * MIB)


def test_shared_memory_counts_in_parts(tmp_path: Path) -> None:
    """Two processes that map the same pages hold half of them each; resident sizes count them twice."""
    code = """
import mmap, os, sys, time
from pathlib import Path
from measure.process import MIB, Marks, reading
shared = mmap.mmap(-1, 64 * MIB)
before = reading().resident
shared.write(b"1" * (64 * MIB))
(end, far), begun = os.pipe(), os.pipe()
if os.fork() == 0:
    shared.seek(0)
    shared.read()
    os.write(begun[1], b"1")
    os.read(end, 1)
    os._exit(0)
os.read(begun[0], 1)
marks = Marks(Path(sys.argv[1]), 0)
marks("end", resident=reading().resident - before)
os.write(far, b"1")
"""
    [rank] = watched(tmp_path, code)
    end = rank.mark("end")
    assert end.kinds["shared"] == pytest.approx(32 * MIB, abs=MIB)
    assert end.held.others > 32 * MIB - MIB
    assert end.more["resident"] == pytest.approx(64 * MIB, abs=2 * MIB)


def test_a_job_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(jobs.JobError, match=r"(?s)exit code 3.*last words"):
        watched(tmp_path, "import sys; print('last words'); sys.exit(3)")


def test_a_job_that_does_not_end_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
    with pytest.raises(jobs.JobError, match="not done after 1 s"):
        jobs.run([command], [jobs.environment()], tmp_path, 1.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "log").read_text()), 0)


# --- mpishard's processes


@pytest.mark.jobs
@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_of_the_processes_is_the_plan(ranks: int) -> None:
    """50 million parameters in fp32: the growth of each process is within 5 % of the plan."""
    for number, rank in enumerate(jobs.ours(ranks, plan_memory.SIZES, 3, 1, {"device": "cpu"})):
        peak = table.Peak(rank)
        planned = sum(peak.plan.values())
        assert planned > 500 * MIB
        told = f"rank {number}: {peak.above / MIB:.1f} MiB above its start, {planned / MIB:.1f} planned"
        assert peak.above == pytest.approx(planned, rel=plan_memory.BAR), told


@pytest.mark.jobs
def test_the_program_tells_and_judges(tmp_path: Path) -> None:
    """A plan that is not kept is exit code 1."""
    code = "import sys\nfrom measure import plan_memory\nplan_memory.BAR = float(sys.argv[1])\n"
    code += "plan_memory.SIZES = plan_memory.Gpt2(layers=2, width=64, heads=4, sequence=32, vocabulary=1000)\n"
    code += "sys.exit(plan_memory.main(['--ranks', '2', '--steps', '1', '--json', sys.argv[2]]))"
    out = tmp_path / "found.json"
    for bar, expected in (("1000", 0), ("1e-9", 1)):
        command = [sys.executable, "-c", code, bar, str(out)]
        done = subprocess.run(command, env=jobs.environment(), capture_output=True, text=True, timeout=120)
        assert done.returncode == expected, done.stdout + done.stderr
        assert ("ABOVE" in done.stdout) == bool(expected)
    [first, _] = json.loads(out.read_text())["2"]
    assert first["above"] == first["whole"] - first["start"]
    # so small a model (5 MB) is no measurement: pages that were free at the start are used again
    assert 0 < sum(first["plan"].values()) < 2 * first["above"]


@pytest.mark.jobs
def test_a_rank_of_a_large_world_holds_its_plan(tmp_path: Path) -> None:
    """Rank 5 of 64, two blocks of a width at which buffers are large, alone in one process."""
    settings = {"model.layers": 2, "model.width": 1024, "model.heads": 16, "model.sequence": 64}
    settings |= {"model.positions": 0, "model.vocabulary": 20000, "train.global_batch": 64, "train.micro_batch": 1}
    words = [word for setting in settings.items() for word in ("--set", "{}={}".format(*setting))]
    out = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "scripts" / "check_large_world"), "--as-rank", "5/64", "--json", str(out)]
    command += ["--preset", "gpt2-124m", "--most", "0.8", *words]
    done = subprocess.run(command, env=jobs.environment(), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["bytes"] == found["bytes_planned"]
    assert (found["rank"], found["ranks"]) == (5, 64)
    assert found["peak"] > sum(found["bytes"].values()) > 250 * MIB
    command[command.index("0.8")] = "0.1"
    done = subprocess.run(command, env=jobs.environment(), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "it held more than 0.1 GB" in done.stdout
