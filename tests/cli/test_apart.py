"""Ranks that differ before they have met: launchers inside launchers, interrupts and mistakes of one rank alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.cli.processes import ROOT, launcher, mpiexec
from tests.cli.small_runs import training

pytestmark = pytest.mark.jobs


def job(ranks, *arguments):
    """Run to the end, which must come soon; return exit code, output and errors."""
    begin = time.monotonic()
    done = subprocess.run(
        [*launcher(ranks), sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert time.monotonic() - begin < 20
    return done


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD", "PMI"])
def test_variables_of_a_launcher_outside_do_not_part_the_ranks(tmp_path, name):
    outside = os.environ | {f"{name}_RANK": "0", f"{name}_SIZE": "1"}
    done = mpiexec("-m", "mpishard", *training(tmp_path), env=outside)
    assert done.returncode == 0, done.stderr
    assert "2 ranks (node)" in done.stdout
    assert done.stdout.count("checksum") == 1


WHERE = """
import sys
from mpishard.launched import environment_rank
if environment_rank() == 1:
    import {module} as module
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt
    module.{name} = interrupted
from mpishard.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("mpishard.train.config", "load"),  # before MPI
        ("mpishard.comm.mpi", "place"),  # in the first collective call
        ("mpishard.cli.train", "settings_text"),  # before the run
        ("mpishard.train.prepare", "planned"),
    ],
)
def test_an_interrupt_of_one_rank_before_the_first_step(tmp_path, module, name):
    (tmp_path / "where.py").write_text(WHERE.format(module=module, name=name))
    done = job(3, str(tmp_path / "where.py"), *training(tmp_path, "train.global_batch=12"))
    assert done.returncode != 0
    assert "interrupted" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["train", "--sett", "x"], ["generate", "--from", "x", "--prompt", "y", "--temperature", "nan"], ["generate"]],
)
@pytest.mark.parametrize("all_ranks", [True, False])
def test_a_mistake_on_the_command_line(tmp_path, arguments, all_ranks):
    """Of one rank alone it is told by that rank, and of all by one; nobody waits."""
    script = tmp_path / "mistake.py"
    script.write_text(
        "import sys\nfrom mpishard.launched import environment_rank\nfrom mpishard.cli import main\n"
        f"main({arguments!r} if {all_ranks} or environment_rank() == 1 else sys.argv[1:])"
    )
    done = job(2, str(script), *training(tmp_path))
    assert done.returncode == 2 or not all_ranks
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("mpishard: ")]
    assert line.startswith("mpishard: rank 1 on ") == (not all_ranks)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_output_without_room(tmp_path, ranks):
    command = [*(launcher(ranks) if ranks > 1 else []), "bash", "-c", 'exec "$@" > /dev/full', "-"]
    command += [sys.executable, "-m", "mpishard", *training(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr
