"""How this process was launched, the communicator that follows from it, and how a failure ends the whole job.

[Note: what a launcher tells]
``mpiexec`` and ``srun`` number the processes in the environment. A process that reads another MPI's numbers
still starts, alone, as a world of one rank, and N such processes would each train by themselves and exit with
0. So the launcher's number of processes is compared with MPI's, and a difference is an error.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from mpishard.array.ops import Ops
from mpishard.comm.base import Communicator
from mpishard.comm.local import LocalCommunicator
from mpishard.errors import CommError, ConfigError, LaunchError
from mpishard.launched import environment_rank, environment_size, in_step

__all__ = [
    "abort_world",
    "communicator",
    "environment_rank",
    "environment_size",
    "install_abort_hook",
    "leave_together",
    "world",
]

#: Seconds in which all ranks must have started MPI; then the process ends with a traceback of where it waited.
_MEETING = 300.0
#: Seconds that srun gets to drain standard error before the job is ended; it loses the last lines otherwise.
_DRAIN = 1.0

_NO_MPI = "install one with: pip install 'mpishard[mpich]', or load the cluster's MPI module"


def world(ops: Ops, transport: str = "auto") -> Communicator:
    """Return the communicator of all processes of this job.

    Args:
        ops: operations on the arrays that will be communicated.
        transport: "mpi"; "local", one rank alone; or "auto", MPI where more than one process was launched.

    Raises:
        ConfigError: the name is unknown, or the world is not the launcher's.
        LaunchError: MPI is needed and cannot be loaded.
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
    with _meeting((size or 1) > 1):
        return _world(ops, transport, size, rank)


@contextmanager
def _meeting(several: bool) -> Iterator[None]:
    """End this process where MPI's start takes too long: it waits for all ranks, also for one that cannot start."""
    if not several or "mpi4py.MPI" in sys.modules:
        yield
        return
    faulthandler.dump_traceback_later(_MEETING, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _world(ops: Ops, transport: str, size: int | None, rank: int | None) -> Communicator:
    # Open MPI does not start where no home directory is told; it only looks for settings there.
    os.environ.setdefault("HOME", tempfile.gettempdir())
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        if transport == "auto" and size is None and rank is None:
            return LocalCommunicator(ops)
        reason = str(error).strip().partition("\n")[0]
        raise LaunchError(
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


def communicator(comm: object, ops: Ops) -> Communicator:
    """Return a Communicator over what a program has.

    Args:
        comm: an mpi4py intracommunicator (it is duplicated, which is collective); a Communicator, which is returned
            as it is; or None, one rank without MPI.
        ops: operations on the arrays that will be communicated.

    Raises:
        ConfigError: ``comm`` is none of these, or None in one of several processes.
    """
    if isinstance(comm, Communicator):
        return comm
    size, rank = environment_size(), environment_rank()
    if comm is None:
        if (size or 1) > 1 or (rank or 0) > 0:
            raise ConfigError(
                f"comm is None, one rank alone, and the launcher started {size or 'several'} processes; "
                "give MPI.COMM_WORLD, or MPI.COMM_SELF where each process is to work alone"
            )
        return LocalCommunicator(ops)
    wrong = ConfigError(
        f"comm is a {type(comm).__name__}; give an intracommunicator of mpi4py (MPI.COMM_WORLD, say), "
        "a Communicator of mpishard, or None"
    )
    if "mpi4py.MPI" not in sys.modules:
        raise wrong
    from mpi4py import MPI

    if not isinstance(comm, MPI.Comm):
        raise wrong
    if comm == MPI.COMM_NULL:
        raise ConfigError("comm is MPI.COMM_NULL: this process is in no group of the split; it has no part in the work")
    if comm.Is_inter() or not isinstance(comm, MPI.Intracomm):
        raise ConfigError("comm is an intercommunicator; merge it first (comm.Merge()), an intracommunicator is needed")
    if comm.Get_size() == 1:
        return LocalCommunicator(ops)
    from mpishard.comm.mpi import MpiCommunicator

    return MpiCommunicator(comm, ops)


def leave_together(comm: Communicator) -> None:
    """Make the end of this process, in order or not, a meeting of all ranks that have not closed ``comm`` before.

    A rank that ends while others go on would leave them waiting for ever; so they are told.
    """

    def meet() -> None:
        from mpi4py import MPI

        if not (comm.closed or MPI.Is_finalized()):
            try:
                comm.meet("the end of the program")
            except CommError as error:
                print(f"mpishard: {error}", file=sys.stderr, flush=True)

    if comm.transport == "mpi":
        atexit.register(meet)  # before mpi4py finalises MPI, which is later than any such function


def abort_world(message: str, code: int) -> None:
    """End every rank of the job from one that has started MPI, or not yet, and has no communicator."""
    if "mpi4py.MPI" not in sys.modules:
        return
    from mpi4py import MPI

    if MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.Get_size() > 1:
        print(message, file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(code)


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
            if in_step():
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
