"""Real jobs of three ranks of which one dies, stops or leaves: none may hang, and none may end without a reason."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpishard.comm.launch import environment_rank
from mpishard.comm.record import Snapshot, State, read_record, record_path

MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.skipif(MPIEXEC is None, reason="needs mpiexec"),
    pytest.mark.skipif(environment_rank() is not None, reason="an MPI job cannot start another one everywhere"),
]

#: The ranks exchange records until a file "enough" appears; rank 0 decides for all.
PROGRAM = """
import os, sys, time
from pathlib import Path
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm import world
from mpishard.comm.launch import install_abort_hook
from mpishard.comm.watch import Watch

folder, fails = Path(sys.argv[1]), sys.argv[2:]
comm = world(NumpyOps(), "mpi")
install_abort_hook(comm)
with Watch(comm, folder, silence=0) as watch:
    step, enough = 0, False
    while not enough:
        watch.at_step(step)
        watch.note(b"exchange")
        enough = comm.exchange(bytes([(folder / "enough").exists()]))[0] == b"\\1"
        if fails and step == 5 and comm.rank == 1:
            if fails == ["abort"]:
                comm.abort("mpishard: enough of it", 2)
            raise KeyboardInterrupt if fails == ["interrupt"] else ValueError("broken")
        step += 1
        time.sleep(0.01)
comm.close()
"""


@contextmanager
def job(folder: Path, *arguments: str, program: str | None = PROGRAM) -> Iterator[subprocess.Popen[str]]:
    """Start a program of three ranks on ``folder``, or mpishard itself."""
    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OPENBLAS_NUM_THREADS": "1",
    }
    assert MPIEXEC is not None
    ranks = ["-m", "mpishard"] if program is None else ["-c", program, str(folder)]
    command = [MPIEXEC, "-n", "3", sys.executable, *ranks, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    ) as started:
        try:
            yield started
        except BaseException:
            started.terminate()  # the launcher ends its ranks
            raise


def look(folder: Path, rank: int) -> Snapshot | None:
    return read_record(record_path(folder, rank))


def wait_for_step(folder: Path, rank: int, step: int) -> Snapshot:
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        found = look(folder, rank)
        if found is not None and found.step >= step:
            return found
        time.sleep(0.02)
    raise AssertionError(f"rank {rank} has not reached step {step}: {found}")


def end_of(started: subprocess.Popen[str], seconds: float) -> tuple[str, float]:
    begin = time.monotonic()
    return started.communicate(timeout=seconds)[0], time.monotonic() - begin


def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    with job(tmp_path) as started:
        victim = wait_for_step(tmp_path, 1, 3)
        os.kill(victim.pid, signal.SIGKILL)
        printed, seconds = end_of(started, 20)
    assert started.returncode != 0, printed
    named = rf"mpishard: rank 1 \(host \S+, pid {victim.pid}, in step \d+, last operation exchange\) is gone; .*"
    others = r"; rank [02] was in step \d+, last operation exchange" * 2
    assert len(re.findall(named + others, printed)) == 1, printed
    assert printed.count("is gone") == 1, printed
    assert seconds < 10
    left = look(tmp_path, 1)
    assert left is not None
    assert left.state is State.RUNNING
    assert left.step >= victim.step
    assert left.operations[-1][1] == "exchange"


def test_the_others_end_by_themselves_where_the_launcher_does_not_act(tmp_path: Path) -> None:
    # The launcher is stopped before the rank dies, so it ends nobody.
    with job(tmp_path) as started:
        pids = [wait_for_step(tmp_path, rank, 3).pid for rank in range(3)]
        launchers = {parent(pid) for pid in pids} | {started.pid}
        begin = time.monotonic()
        try:
            for launcher in launchers:
                os.kill(launcher, signal.SIGSTOP)
            os.kill(pids[2], signal.SIGKILL)
            while any(lives(pid) for pid in pids) and time.monotonic() < begin + 20:
                time.sleep(0.05)
            seconds = time.monotonic() - begin
        finally:
            for launcher in launchers:
                os.kill(launcher, signal.SIGCONT)
        printed, _ = end_of(started, 20)
    assert seconds < 10, printed
    assert printed.count("rank 2 (host") == 1, printed
    assert "last operation exchange) is gone; the other ranks end with exit code 3" in printed
    assert started.returncode != 0


def test_a_stopped_rank_is_waited_for(tmp_path: Path) -> None:
    with job(tmp_path) as started:
        pid = wait_for_step(tmp_path, 1, 3).pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.2)
        stood = wait_for_step(tmp_path, 1, 3).step
        time.sleep(3)  # more than a tick and the time that a failure is given
        assert started.poll() is None
        assert wait_for_step(tmp_path, 1, 3).step == stood
        os.kill(pid, signal.SIGCONT)
        wait_for_step(tmp_path, 1, stood + 2)
        (tmp_path / "enough").touch()
        printed, _ = end_of(started, 20)
    assert started.returncode == 0, printed
    assert printed == ""
    ended = [look(tmp_path, rank) for rank in range(3)]
    assert [found and found.state for found in ended] == [State.ENDED] * 3


def test_an_exception_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    with job(tmp_path, "raise") as started:
        printed, _ = end_of(started, 30)
    # MPICH's launcher may report the SIGKILL by which it ends the other ranks instead of the code of the abort.
    assert started.returncode in (1, 9), printed
    assert printed.count("[rank 1] ValueError: broken") == 1, printed
    left = look(tmp_path, 1)
    assert left is not None
    assert (left.state, left.step) == (State.FAILED, 5)


@pytest.mark.parametrize("how", ["abort", "interrupt"])
def test_a_rank_that_tells_its_end_is_not_gone(how: str, tmp_path: Path) -> None:
    with job(tmp_path, how) as started:
        printed, _ = end_of(started, 30)
    assert started.returncode != 0
    assert ("mpishard: enough of it" if how == "abort" else "KeyboardInterrupt") in printed
    assert "is gone" not in printed
    left = look(tmp_path, 1)
    assert left is not None
    assert (left.state, left.step) == (State.FAILED, 5)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
