"""How this process was launched, the communicator that follows from it, and how a failure ends the whole job.

[Note: what a launcher tells]
``mpiexec`` and ``srun`` number the processes in the environment. A process that reads another MPI's numbers
still starts, alone, as a world of one rank, and N such processes would each train by themselves and exit with
0. So the launcher's number of processes is compared with MPI's, and a difference is an error.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from mpishard.array.ops import Ops
from mpishard.comm.base import Communicator
from mpishard.comm.choice import TRANSPORTS, connect, made
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.segments import check_algorithm
from mpishard.comm.starting import load_mpi, meeting
from mpishard.errors import CommError, ConfigError, LaunchError
from mpishard.launched import environment_local_rank, environment_rank, environment_size, in_step

__all__ = [
    "abort_world",
    "communicator",
    "environment_local_rank",
    "environment_rank",
    "environment_size",
    "install_abort_hook",
    "leave_together",
    "world",
]

#: Seconds that srun gets to drain standard error before the job is ended; it loses the last lines otherwise.
_DRAIN = 1.0

_NO_MPI = "install one with: pip install mpich, or load the cluster's MPI module"


def world(
    make_ops: Ops | Callable[[int | None], Ops],
    transport: str = "auto",
    *,
    share_device: bool = False,
    algorithm: str = "alltoall",
) -> Communicator:
    """Return the communicator of all processes of this job.

    Args:
        make_ops: operations on the arrays that will be communicated; or what makes them, called once with this
            process's number on its machine (None without a launcher). So a GPU is chosen before MPI starts.
        transport: "local", one rank alone; "node", memory that the ranks of one host share; "mpi", which a GPU-aware
            MPI is for on a GPU; "staged", by way of host memory, and "nccl", for GPUs; or "auto": local for one
            process; else node on the CPUs of one host, mpi on those of several, and on a GPU mpi, or staged where MPI
            does not say that it takes its memory.
        share_device: let ranks share a GPU, which NCCL does not.
        algorithm: how a reduce-scatter of transport mpi goes (:mod:`mpishard.comm.segments`).

    Raises:
        ConfigError: the name is unknown, or the world is not the launcher's; on all ranks, when the transport does
            not fit the device, or two ranks use one GPU.
        LaunchError: MPI is needed and cannot be loaded.
    """
    if transport not in TRANSPORTS:
        raise ConfigError(f"transport {transport!r} is not known; choose one of {', '.join(TRANSPORTS)}")
    if algorithm != "tree":  # which is of hierarchical alone
        check_algorithm(algorithm)
    size, rank = environment_size(), environment_rank()
    if transport == "local" and ((size or 1) > 1 or (rank or 0) > 0):
        raise ConfigError(
            f"the launcher started {size or 'several'} processes and transport 'local' is one rank alone; "
            "use transport 'mpi' or 'auto', or start one process"
        )
    if transport == "local" or (transport == "auto" and size == 1):
        return LocalCommunicator(made(make_ops, environment_local_rank()))
    with meeting((size or 1) > 1):
        return _world(_Later(make_ops), transport, size, rank, share_device, algorithm)


class _Later:
    """Operations that are made at most once. What goes wrong before MPI has started waits for all ranks to hear it."""

    def __init__(self, make_ops: Ops | Callable[[int | None], Ops]) -> None:
        self._make_ops = make_ops
        self._error: Exception | None = None

    @property
    def early(self) -> Callable[[], None] | None:
        """What is to be done before MPI starts: choosing a device, where the launcher tells which."""
        known = environment_local_rank() is not None
        return self._before_start if known and not isinstance(self._make_ops, Ops) else None

    def _before_start(self) -> None:
        try:
            self._make_ops = made(self._make_ops, environment_local_rank())
        except Exception as error:
            self._error = error

    def __call__(self, local_rank: int | None) -> Ops:
        if self._error is not None:
            raise self._error
        return made(self._make_ops, local_rank)


def _world(
    ops: _Later, transport: str, size: int | None, rank: int | None, share_device: bool, algorithm: str
) -> Communicator:
    try:
        MPI = load_mpi(ops.early)
    except (ImportError, RuntimeError, OSError) as error:
        if transport == "auto" and size is None and rank is None:
            return LocalCommunicator(ops(None))
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
        return LocalCommunicator(ops(None))
    return connect(MPI.COMM_WORLD, ops, transport, share_device=share_device, algorithm=algorithm)


def communicator(
    comm: object,
    make_ops: Ops | Callable[[int | None], Ops],
    transport: str = "auto",
    *,
    share_device: bool = False,
) -> Communicator:
    """Return a Communicator over what a program has.

    Args:
        comm: an mpi4py intracommunicator (it is duplicated, which is collective); a Communicator, which is returned
            as it is; or None, one rank without MPI.
        make_ops, transport, share_device: as in :func:`world`; an intracommunicator of one rank is ``local`` under
            ``auto``.

    Raises:
        ConfigError: ``comm`` is none of these, or None in one of several processes; on all ranks, when the transport
            does not fit the device, or two ranks use one GPU.
    """
    if transport not in TRANSPORTS and not _several(comm):  # several tell each other, in connect
        raise ConfigError(f"transport {transport!r} is not known; choose one of {', '.join(TRANSPORTS)}")
    if isinstance(comm, Communicator):
        if transport != "auto":
            raise ConfigError(f"transport is {transport!r} and comm is a Communicator, which has its own; leave it out")
        return comm
    size, rank = environment_size(), environment_rank()
    if comm is None:
        if (size or 1) > 1 or (rank or 0) > 0:
            raise ConfigError(
                f"comm is None, one rank alone, and the launcher started {size or 'several'} processes; "
                "give MPI.COMM_WORLD, or MPI.COMM_SELF where each process is to work alone"
            )
        if transport not in ("auto", "local"):
            raise ConfigError(f"transport is {transport!r} and comm is None, one rank alone; give MPI.COMM_WORLD")
        return LocalCommunicator(made(make_ops, environment_local_rank()))
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
    if comm.Get_size() == 1 and transport in ("auto", "local"):
        return LocalCommunicator(made(make_ops, environment_local_rank()))
    return connect(comm, make_ops, transport, share_device=share_device)


def _several(comm: object) -> bool:
    """Return whether ``comm`` is an intracommunicator of more than one rank."""
    if "mpi4py.MPI" not in sys.modules:
        return False
    from mpi4py import MPI

    return isinstance(comm, MPI.Intracomm) and comm != MPI.COMM_NULL and comm.Get_size() > 1


#: that the end of the process closes, and the last one that was closed before
_open: list[Communicator] = []


def leave_together(comm: Communicator) -> None:
    """Make the end of this process, in order or not, a meeting of all ranks that have not closed ``comm`` before.

    A rank that ends while others go on would leave them waiting for ever; so they are told.
    """
    if comm.transport in ("node", "mpi", "hierarchical", "staged", "nccl"):
        if not _open:
            atexit.register(_meet)  # before mpi4py finalises MPI, which is later than any such function
        _open[:] = [*(one for one in _open if not one.closed), comm]


def _meet() -> None:
    from mpi4py import MPI

    for comm in reversed(_open):
        if not (comm.closed or MPI.Is_finalized()):
            try:
                comm.meet("the end of the program")
            except CommError as error:
                print(f"mpishard: {error}", file=sys.stderr, flush=True)


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
