"""Where a measurement was made: what somebody must know to compare it with another one."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpishard import __version__
from mpishard.comm.base import Communicator

__all__ = ["available", "described", "settings"]

_RECORD = 512
#: beginnings of names of environment variables that change what is measured
_TELLING = ("UCX_", "OMPI_MCA_", "PRTE_MCA_", "MPICH_", "MPIR_CVAR_", "NCCL_", "FI_", "MPI4PY_RC_")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
#: no settings: what a launcher tells its ranks
_TOLD = ("OMPI_MCA_ess", "OMPI_MCA_orte", "OMPI_MCA_pmix", "PRTE_MCA_ess", "OMPI_MCA_initial", "OMPI_MCA_prte")


def described(comm: Communicator, library: str, transports: Mapping[str, Communicator]) -> dict[str, Any]:
    """Return what is known of the machines, the software and the ranks' places, on every rank. Collective.

    Args:
        library: the MPI library and its version.
        transports: what was measured, by name.
    """
    mine = {"host": platform.node()[:64], "cores": len(os.sched_getaffinity(0)), "device": comm.ops.device[:128]}
    records = comm.exchange(json.dumps(mine).encode()[:_RECORD].ljust(_RECORD), "the places of ranks")
    return {
        "ranks": comm.size,
        "hosts": comm.node.count,
        "places": [json.loads(record) for record in records],
        "processor": _processor(),
        "system": platform.platform(),
        "mpi": library,
        "transports": {name: one.describe() for name, one in transports.items()},
        "mpishard": __version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "environment": settings(os.environ),
    }


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change what is measured."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if (name.startswith(_TELLING) and not name.startswith(_TOLD)) or name in _THREADS
    }


def available() -> int:
    """Return the bytes of memory that can still be had on this machine; 0 where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.machine()}, {os.cpu_count()} cores"
