"""Modules of this package run as ranks in hosts, for what they find."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

from two_hosts.launching import ROOT
from two_hosts.outside import LIBRARY, Hosts, run

__all__ = ["JobError", "ranks"]


class JobError(Exception):
    """The ranks did not come to their end; the message is one line."""


def ranks(hosts: Hosts, module: str, task: dict[str, Any], limit: float) -> Any:
    """Run ``two_hosts.module`` on ranks in all hosts; return the JSON text that rank 0 printed as its last line.

    Raises:
        JobError: they failed, or were not done after ``limit`` seconds.
    """
    paths = os.pathsep.join([str(ROOT), str(LIBRARY), *filter(None, [os.environ.get("PYTHONPATH")])])
    # An exception of one rank ends all of them.
    command = [hosts.installed.python, "-m", "mpi4py", "-m", f"two_hosts.{module}", json.dumps(task)]
    with tempfile.TemporaryFile("w+") as stdout:
        done = run(hosts, command, limit=limit, quiet=True, stdout=stdout, variables={"PYTHONPATH": paths})
        stdout.seek(0)
        said = stdout.read().replace("\0", "").strip().splitlines()
    if done.code or not said:
        raise JobError(f"the ranks ended with exit code {done.code}")
    return json.loads(said[-1])
