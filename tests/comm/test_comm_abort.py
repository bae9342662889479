"""Real jobs of two ranks that fail: none may hang."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpishard.comm.launch import environment_rank

MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.skipif(MPIEXEC is None, reason="needs mpiexec"),
    pytest.mark.skipif(environment_rank() is not None, reason="an MPI job cannot start another one everywhere"),
]

HEAD = """
import sys, threading, time
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm import world
from mpishard.comm.launch import install_abort_hook
comm = world(NumpyOps(), "mpi")
install_abort_hook(comm)
comm.barrier()
"""

#: name -> (program after HEAD, exit code, what is printed once)
JOBS = {
    "exception": ("if comm.rank == 1: raise ValueError('broken')\ncomm.barrier()", 1, "[rank 1] ValueError: broken"),
    "thread": (
        "def f(): raise ValueError('broken')\n"
        "if comm.rank == 1: threading.Thread(target=f).start()\ntime.sleep(0.1)\ncomm.barrier()\ntime.sleep(30)",
        1,
        "[rank 1] ValueError: broken",
    ),
    "abort": ("if comm.rank == 1: comm.abort('enough', 7)\ncomm.barrier()", 7, "enough"),
    # the communication thread is held by a collective that rank 0 never joins
    "held": (
        "if comm.rank == 1:\n"
        "    threading.Thread(target=lambda: comm._split([[0, 1]], [0, 1]), daemon=True).start()\n"
        "    time.sleep(0.2)\n    comm.abort('enough', 7)\ncomm.barrier()\ntime.sleep(30)",
        7,
        "enough",
    ),
}


def start(program: str, size: int = 2) -> tuple[int, str, float]:
    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OPENBLAS_NUM_THREADS": "1",
    }
    begin = time.perf_counter()
    assert MPIEXEC is not None
    command = [MPIEXEC, "-n", str(size), sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    ) as job:
        try:
            printed = job.communicate(timeout=60)[0]
        except subprocess.TimeoutExpired:
            job.terminate()  # the launcher ends its ranks
            raise
    return job.returncode, printed, time.perf_counter() - begin


@pytest.mark.parametrize("name", JOBS)
def test_a_failing_rank_ends_the_job(name: str) -> None:
    program, code, text = JOBS[name]
    returned, printed, seconds = start(HEAD + program)
    # MPICH's launcher may report the SIGKILL by which it ends the other ranks instead of the code of the abort.
    assert returned in (code, 9), printed
    assert printed.count(text) == 1, printed
    assert seconds < 20


def test_a_job_that_closes_ends_well() -> None:
    returned, printed, _ = start(HEAD + "comm.close()\nprint('rank', comm.rank, 'done')")
    assert returned == 0, printed
    assert printed.count("done") == 2


def test_a_job_that_does_not_close_ends_well() -> None:
    returned, printed, _ = start(HEAD + "print('rank', comm.rank, 'done')")
    assert returned == 0, printed
    assert printed.count("done") == 2
