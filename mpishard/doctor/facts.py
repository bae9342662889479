"""What one rank can say of itself and of its machine, as plain data; and how all ranks come to hold everybody's."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Mapping
from glob import glob
from pathlib import Path
from typing import Any

from mpishard.comm.base import Communicator
from mpishard.comm.diagnose import gpus
from mpishard.comm.shared import gives_large_pages
from mpishard.launched import environment_local_rank, environment_rank, environment_size, in_step
from mpishard.train.room import room, thread_warning

__all__ = ["Facts", "everybody", "launcher", "of_rank"]

Facts = dict[str, Any]

_SHARED = Path("/dev/shm")
#: Variables that say which launcher it was, and to how many; not those that only pass a socket.
_TELLING = (
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "PMI_SIZE",
    "PMI_RANK",
    "PMIX_RANK",
    "PMI_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_MPI_TYPE",
    "SLURM_CPU_BIND",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND",
    "CUDA_VISIBLE_DEVICES",
)
#: Settings that change how MPI goes about its work.
_SETTINGS = ("UCX_", "OMPI_MCA_", "MPIR_CVAR_", "MPICH_", "FI_", "NCCL_", "PRTE_MCA_", "PMIX_MCA_", "MPI4PY_RC_")
_INTERNAL = ("OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs")
_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


def launcher(environment: Mapping[str, str]) -> Facts:
    """Return which launcher has left its variables, and those that tell something."""
    if "OMPI_COMM_WORLD_SIZE" in environment:
        name = "mpiexec of Open MPI"
    elif "HYDI_CONTROL_FD" in environment:
        name = "mpiexec of MPICH (Hydra)"
    elif in_step():
        name = "srun"
    elif "PMI_RANK" in environment or "PMIX_RANK" in environment:
        name = "a launcher that speaks PMI"
    else:
        name = ""
    settings = {key: value for key, value in environment.items() if key.startswith(_SETTINGS) and key not in _INTERNAL}
    return {
        "name": name,
        "size": environment_size(),
        "rank": environment_rank(),
        "local_rank": environment_local_rank(),
        "variables": {key: environment[key] for key in _TELLING if key in environment},
        "settings": dict(sorted(settings.items())),
    }


def of_rank(comm: Communicator, mpi: Facts) -> Facts:
    """Return this rank's facts: where it runs, on which cores and GPUs, and under which limits."""
    node = comm.node
    return {
        "rank": comm.rank,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "node": node.index,
        "local_rank": node.local_rank,
        "local_size": node.local_size,
        "mpi": mpi,
        "launcher": launcher(os.environ),
        "cores": sorted(os.sched_getaffinity(0)),
        "cpus": os.cpu_count() or 1,
        "threads": {key: os.environ[key] for key in _THREADS if key in os.environ},
        "thread_warning": thread_warning(node.local_size),
        "limits": {name: _limit(which) for name, which in _limits().items()},
        "memory": room(),
        "shared_memory": _free(_SHARED),
        "large_pages": gives_large_pages(),
        "infiniband": bool(glob("/sys/class/infiniband/*")),
        "gpus": gpus(),
    }


def _limits() -> dict[str, int]:
    return {
        "address_space": resource.RLIMIT_AS,
        "locked": resource.RLIMIT_MEMLOCK,
        "files": resource.RLIMIT_NOFILE,
        "stack": resource.RLIMIT_STACK,
    }


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _free(path: Path) -> Facts | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return {"total": usage.total, "free": usage.free}


def everybody(comm: Communicator, facts: Any) -> list[Any]:
    """Return what each rank gave, by rank; anything that JSON holds. Collective."""
    text = json.dumps(facts).encode()
    lengths = [int.from_bytes(one, "little") for one in comm.exchange(len(text).to_bytes(8, "little"), "facts")]
    records = comm.exchange(text.ljust(max(lengths)), "facts")
    return [json.loads(record[:length]) for record, length in zip(records, lengths, strict=True)]
