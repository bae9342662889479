"""Real jobs on the stand-in, whose record shows whether every access to a buffer is ordered behind the last one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpishard.comm.launch import environment_rank
from tests.cli.processes import mpiexec

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.skipif(environment_rank() is not None, reason="an MPI job cannot start another one everywhere"),
]

PROGRAM = """
import sys
from mpishard.array.cupy_ops import CupyOps
from mpishard.comm.launch import communicator
from mpishard.testing import communicator as suite
from mpi4py import MPI

comm = communicator(MPI.COMM_WORLD, CupyOps(MPI.COMM_WORLD.rank), sys.argv[1])
for name in ("skewed_ranks", "several_in_flight", "input_is_free_only_after_wait_inputs", "all_reduce", "broadcast"):
    suite.CHECKS[name](comm)
print(comm.describe())
comm.close()
"""


@pytest.mark.parametrize("transport", ["mpi", "staged", "nccl"], ids="by-{}".format)  # "mpi" alone is a mark
def test_everything_is_ordered(tmp_path: Path, transport: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    variables = {"STANDIN_TRACE": str(tmp_path), "STANDIN_LATE": "others", "MPISHARD_GPU_AWARE": "1"}
    arguments = ["-m", "tests.standin.run", str(tmp_path / "program.py"), transport]
    done = mpiexec(*arguments, env=dict(os.environ) | variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"{transport}, ") == 2
