"""In which order MPI is loaded, a device chosen, and MPI started; and that mpi4py's settings hold all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from mpishard.comm.launch import environment_rank
from tests.cli.processes import ROOT, mpiexec

#: Makes operations (on the CPU, or on the stand-in's device), and tells what was the case before and after.
PROGRAM = """
import json, sys
{before}
import mpi4py
seen = {{}}

def between():
    MPI = sys.modules["mpi4py.MPI"]
    seen["started"] = MPI.Is_initialized()

from mpishard.comm.starting import load_mpi
MPI = load_mpi({between})
seen["after"] = MPI.Is_initialized()
if seen["after"]:
    seen["level"] = MPI.Query_thread()
    seen["levels"] = [MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE]
seen["rc"] = [mpi4py.rc.initialize, mpi4py.rc.finalize]
print(json.dumps(seen))
"""

#: Every rank chooses a device before MPI starts, and ends without a word to MPI.
JOB = """
import sys
from tests.standin import installed

with installed(devices={devices}):
    from mpishard.array.device import operations
    from mpishard.comm import world
    from mpishard.errors import ConfigError

    def make(local_rank):
        MPI = sys.modules["mpi4py.MPI"]
        there = "mpishard.array.cupy_ops" in sys.modules
        # In one write, since the launcher mixes the ranks' lines.
        sys.stdout.write(f"rank on its machine {{local_rank}}, MPI started {{MPI.Is_initialized()}}, "
                         f"CuPy is there {{there}}\\n")
        sys.stdout.flush()
        return operations("cuda", local_rank)

    try:
        comm = world(make, "{transport}")
    except ConfigError as error:
        print(error)
        sys.exit(2)
    print(f"{{comm.rank}} of {{comm.size}}: {{comm.describe()}} on {{comm.ops.device}}")
    comm.close()
"""


def told(between: str, before: str = "", **variables: str) -> dict[str, Any]:
    """Run the program without a launcher."""
    code = PROGRAM.format(between=between, before=before)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MPI4PY_RC_")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


alone = pytest.mark.skipif(environment_rank() is not None, reason="an MPI job cannot start another one everywhere")


@alone
def test_mpi_starts_after_what_comes_between() -> None:
    found = told("between")
    assert (found["started"], found["after"], found["rc"]) == (False, True, [True, None])
    assert found == told("") | {"started": False}  # the level, too, is that of an import like any other


@alone
@pytest.mark.parametrize(("name", "place"), [("serialized", 2), ("single", 0)])
@pytest.mark.parametrize("by", ["environment", "rc"])
def test_the_thread_level_is_the_one_that_was_asked_for(name: str, place: int, by: str) -> None:
    before = f"import mpi4py; mpi4py.rc.thread_level = '{name}'" if by == "rc" else ""
    variables = {} if by == "rc" else {"MPI4PY_RC_THREAD_LEVEL": name}
    found = told("between", before, **variables)
    assert found["level"] == told("", before, **variables)["level"]
    assert found["level"] in found["levels"][place:]


@alone
@pytest.mark.parametrize("by", ["environment", "rc"])
def test_a_program_that_starts_mpi_itself_is_left_to_do_so(by: str) -> None:
    before = "import mpi4py; mpi4py.rc.initialize = False" if by == "rc" else ""
    found = told("between", before, **({} if by == "rc" else {"MPI4PY_RC_INITIALIZE": "no"}))
    assert (found["started"], found["after"]) == (False, False)


@alone
def test_what_is_loaded_already_stays_as_it_is() -> None:
    found = told("between", "from mpi4py import MPI")
    assert (found["started"], found["after"]) == (True, True)


@alone
@pytest.mark.jobs
def test_every_rank_chooses_its_device_before_mpi_starts() -> None:
    done = mpiexec("-c", JOB.format(devices=2, transport="auto"))
    assert done.returncode == 0, done.stdout + done.stderr  # Open MPI's launcher tells who did not finalise
    assert "finalize" not in done.stderr
    for rank in range(2):
        assert f"rank on its machine {rank}, MPI started False, CuPy is there False" in done.stdout
        assert f"{rank} of 2: staged, " in done.stdout and f"on cuda:{rank} Stand-in" in done.stdout


@alone
@pytest.mark.jobs
def test_two_ranks_on_one_gpu_end_together() -> None:
    done = mpiexec("-c", JOB.format(devices=1, transport="auto"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout.count("ranks 0 and 1 use one GPU") == 2
