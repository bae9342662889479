"""The program in processes of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mpishard

ROOT = Path(mpishard.__file__).parents[1]


def _run(command, env, cwd, seconds=60):
    env = (dict(os.environ) if env is None else env) | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, errors="replace", timeout=seconds)


def fresh(*arguments, env=None, cwd=None, **variables):
    """One process without a launcher; ``env`` replaces the environment, ``variables`` are added to it."""
    return _run([sys.executable, *arguments], (dict(os.environ) if env is None else env) | variables, cwd)


def launcher(ranks):
    """The words that start so many ranks with the launcher of this interpreter's environment."""
    path = Path(sys.executable).with_name("mpiexec")
    if not path.exists():
        pytest.skip("no mpiexec beside the interpreter: the MPI is the system's")
    return [str(path), "-n", str(ranks)]


def mpiexec(*arguments, ranks=2, env=None, cwd=None, through=(), seconds=60):
    """Some ranks of this interpreter, started through other words."""
    return _run([*launcher(ranks), *through, sys.executable, *arguments], env, cwd, seconds)


def program(ranks, arguments):
    """The program on one rank without a launcher, or on more with it."""
    start = fresh if ranks == 1 else mpiexec
    return start("-m", "mpishard", *arguments)
