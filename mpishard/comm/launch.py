"""How this process was launched, the communicator that follows from it, and how a failure ends the whole job.

[Note: what a launcher tells]
``mpiexec`` and ``srun`` number the processes in the environment. A process that reads another MPI's numbers
still starts, alone, as a world of one rank, and N such processes would each train by themselves and exit with
0. So the launcher's number of processes is compared with MPI's, and a difference is an error.

SLURM sets ``SLURM_PROCID`` and ``SLURM_NTASKS`` in a batch script too, where one plain process runs; only a
step, which ``srun`` makes, says how many processes there are.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from types import TracebackType

from mpishard.array.ops import Ops
from mpishard.comm.base import Communicator
from mpishard.comm.local import LocalCommunicator
from mpishard.errors import ConfigError

__all__ = ["environment_rank", "environment_size", "install_abort_hook", "world"]

#: Seconds that srun gets to drain standard error before the job is ended; it loses the last lines otherwise.
_DRAIN = 1.0

_NO_MPI = "install one with: pip install 'mpishard[mpich]', or load the cluster's MPI module"


def _number(*names: str) -> int | None:
    """Return the first of the variables that holds a number."""
    for name in names:
        value = os.environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return None


def _in_step() -> bool:
    return _number("SLURM_STEP_ID") is not None and _number("SLURM_STEP_NUM_TASKS") is not None


def environment_rank() -> int | None:
    """Return the rank that the launcher gave this process; None without a launcher. Starts no MPI."""
    rank = _number("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
    return _number("SLURM_PROCID") if rank is None and _in_step() else rank


def environment_size() -> int | None:
    """Return how many processes the launcher started; None where it does not say. Starts no MPI."""
    size = _number("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    return _number("SLURM_STEP_NUM_TASKS") if size is None and _in_step() else size


def world(ops: Ops, transport: str = "auto") -> Communicator:
    """Return the communicator of all processes of this job.

    Args:
        ops: operations on the arrays that will be communicated.
        transport: "mpi"; "local", one rank alone; or "auto", MPI where more than one process was launched.

    Raises:
        ConfigError: the name is unknown, MPI is needed and cannot be loaded, or its world is not the launcher's.
    """
    if transport not in ("auto", "local", "mpi"):
        raise ConfigError(f"transport {transport!r} is not known; choose one of auto, local, mpi")
    size, rank = environment_size(), environment_rank()
    if transport == "local" and ((size or 1) > 1 or (rank or 0) > 0):
        raise ConfigError(
            f"the launcher started {size or 'several'} processes and transport 'local' is one rank alone; "
            "use transport 'mpi' or 'auto', or start one process"
        )
    if transport == "local" or (transport == "auto" and size == 1):
        return LocalCommunicator(ops)
    launched = size is not None or rank is not None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        if transport == "auto" and not launched:
            return LocalCommunicator(ops)
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"transport {transport!r} needs MPI here, which cannot be loaded ({reason}); {_NO_MPI}"
        ) from error
    if not MPI.Is_initialized():
        raise ConfigError("mpi4py has not started MPI (MPI4PY_RC_INITIALIZE is off?); unset it, or call MPI.Init()")
    found = MPI.COMM_WORLD.Get_size()
    if found == 1 and ((size or 1) > 1 or (rank or 0) > 0):
        library = MPI.get_vendor()[0]
        raise ConfigError(
            f"the world of {library} holds 1 process and the launcher started {size or 'several'}, so the launcher is "
            f"another MPI's; use the mpiexec of {library}, or srun --mpi=pmi2 for MPICH, --mpi=pmix for Open MPI"
        )
    if found == 1 and transport == "auto":
        return LocalCommunicator(ops)
    from mpishard.comm.mpi import MpiCommunicator

    return MpiCommunicator(MPI.COMM_WORLD, ops)


def install_abort_hook(comm: Communicator) -> None:
    """Make an exception that nobody catches, in any thread of this process, end every rank of the job.

    Without it the other ranks would wait for this one for ever. ``sys.exit`` is no such exception.
    """
    alone = threading.Lock()  # kept by the first failure, so that a second neither prints nor ends the process

    def end(kind: type[BaseException], value: BaseException | None, trace: TracebackType | None, where: str) -> None:
        with alone:
            lines = "".join(traceback.format_exception(kind, value, trace)).rstrip().split("\n")
            head = f"[rank {comm.rank}] "
            text = "\n".join(head + line for line in [f"uncaught exception{where}; ending all ranks", *lines])
            if _in_step():
                print(text, file=sys.stderr, flush=True)
                time.sleep(_DRAIN)
                text = head + "aborts"
            comm.abort(text, 1)

    def in_main(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        end(kind, value, trace, "")

    def in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            name = args.thread.name if args.thread is not None else "?"
            end(args.exc_type, args.exc_value, args.exc_traceback, f" in thread {name!r}")

    sys.excepthook = in_main
    threading.excepthook = in_thread
