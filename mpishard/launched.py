"""What the launcher has told this process in its environment. Needs the standard library alone, so that every
rank can ask.

SLURM sets ``SLURM_PROCID`` and ``SLURM_NTASKS`` in a batch script too, where one plain process runs; only a
step, which ``srun`` makes, says how many processes there are.
"""

from __future__ import annotations

import contextlib
import os
import subprocess

__all__ = [
    "abort_before_mpi",
    "abort_stopped",
    "environment_local_rank",
    "environment_rank",
    "environment_size",
    "in_step",
]

#: Local ranks of Open MPI's mpiexec; of those that speak PMI: MPICH's, Cray's, MVAPICH2's.
_OMPI, _PMI = "OMPI_COMM_WORLD_LOCAL_RANK", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
_NONE = (None, None, None)


def _number(*names: str) -> int | None:
    """Return the first of the variables that holds a number."""
    for name in names:
        value = os.environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return None


def in_step() -> bool:
    """Return whether ``srun`` has started this process."""
    return _number("SLURM_STEP_ID") is not None and _number("SLURM_STEP_NUM_TASKS") is not None


def _launches() -> list[tuple[int, int | None, int | None]]:
    """Return (size, rank, local rank) of each launcher that has left its variables; the largest first.

    A launcher may run inside another one's job, whose variables are inherited: one process of ``srun`` or of Open
    MPI's mpiexec starts MPICH's mpiexec, say. The larger job is the inner one; a job of one holds no other.
    """
    found = [
        (_number("OMPI_COMM_WORLD_SIZE"), _number("OMPI_COMM_WORLD_RANK", "PMIX_RANK"), _number(_OMPI)),
        (_number("PMI_SIZE"), _number("PMI_RANK"), _number(*_PMI)),
        (_number("SLURM_STEP_NUM_TASKS"), _number("SLURM_PROCID"), _number("SLURM_LOCALID")) if in_step() else _NONE,
    ]
    told = [(size, rank, local) for size, rank, local in found if size is not None]
    return sorted(told, key=lambda launch: -launch[0])


def environment_rank() -> int | None:
    """Return the rank that the launcher gave this process; None without a launcher. Starts no MPI."""
    for _, rank, _ in _launches():
        return rank
    return _number("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def environment_local_rank() -> int | None:
    """Return this process's number among those of its machine; None where the launcher does not say. Starts no MPI.

    Under ``srun`` it is SLURM that says it for whatever MPI has the rank from it.
    """
    launches = _launches()
    for launch in launches:
        if launch[:2] == launches[0][:2] and launch[2] is not None:
            return launch[2]
    return None if launches else _number(_OMPI, *_PMI)


def environment_size() -> int | None:
    """Return how many processes the launcher started; None where it does not say. Starts no MPI."""
    return _launches()[0][0] if _launches() else None


def abort_before_mpi(code: int) -> None:
    """Ask the launcher to end all ranks, from one that cannot start MPI and for which the others wait.

    A rank that exits before it has started MPI leaves the others to wait under MPICH's launcher, and under ``srun``
    without ``--kill-on-bad-exit``. SLURM is asked by ``scancel``, where it is there; MPICH's launcher by the command
    ``abort`` of PMI 1.1 on the descriptor ``PMI_FD`` (Balaji et al. 2010, "PMI: A scalable parallel process-management
    interface"). Others end the job by themselves.
    """
    if in_step():
        step = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"
        with contextlib.suppress(OSError):
            subprocess.run(["scancel", "--signal=KILL", step], check=False, capture_output=True)
    else:
        _abort_by_pmi("cmd=init pmi_version=1 pmi_subversion=1\n", code)


def abort_stopped(code: int) -> None:
    """Ask MPICH's launcher to end all ranks, from a thread of one whose MPI cannot be called; others are not asked.

    It ends a rank that is stopped on another host only when it is asked. Returns where it does not end this process.
    """
    if not in_step():
        _abort_by_pmi("", code)


def _abort_by_pmi(before: str, code: int) -> None:
    if (descriptor := os.environ.get("PMI_FD", "")).isdecimal():
        with contextlib.suppress(OSError):  # the launcher may be gone, and so will be the others
            os.write(int(descriptor), f"{before}cmd=abort exitcode={code}\n".encode())
