"""The program in processes of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mpishard

ROOT = Path(mpishard.__file__).parents[1]


def fresh(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def mpiexec(*arguments):
    """Two ranks of this interpreter under its environment's own launcher."""
    launcher = Path(sys.executable).with_name("mpiexec")
    if not launcher.exists():
        pytest.skip("no mpiexec beside the interpreter: the MPI is the system's")
    command = [launcher, "-n", "2", sys.executable, *arguments]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
