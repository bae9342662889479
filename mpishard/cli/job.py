"""What the commands that run on several ranks share: how the ranks meet, and how one that leaves ends them all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpishard.array.ops import Ops
    from mpishard.comm.base import Communicator
    from mpishard.errors import ConfigError

__all__ = ["MOST_RANKS", "ending_all", "rank_of", "start", "start_alone"]

#: ranks of a job that one process may play a rank of
MOST_RANKS = 1_000_000


def start(
    transport: str,
    device: str,
    *,
    share: bool = False,
    tf32: bool = False,
    algorithm: str = "alltoall",
    problem: ConfigError | None = None,
) -> Communicator:
    """Return the communicator of this job, whose uncaught exceptions end all ranks.

    Args:
        transport: as in :func:`mpishard.comm.launch.world`.
        device: ``auto``, ``cpu`` or ``cuda``.
        share: let ranks share a GPU.
        tf32: let a GPU round the factors of fp32 matrix products to TF32.
        algorithm: of reduce-scatters, as in :func:`mpishard.comm.launch.world`.
        problem: what this rank cannot start with; it is then raised on all of them.

    Raises:
        ConfigError: MPI or the device cannot be used as asked, or something that a rank needs cannot be imported.
    """
    from mpishard.array.device import operations
    from mpishard.comm.launch import abort_world, install_abort_hook, leave_together, world
    from mpishard.launched import environment_size

    def make_ops(local_rank: int | None) -> Ops:
        if problem is not None:
            raise problem
        return operations(device, local_rank, tf32=tf32)

    # Until ranks have compared their settings, one rank's must not keep it from meeting the others.
    several = (environment_size() or 1) > 1
    try:
        name = "auto" if several and transport == "local" else transport
        comm = world(make_ops, name, share_device=share, algorithm=algorithm)
    except KeyboardInterrupt:
        abort_world("mpishard: interrupted; ending all ranks", 1)
        raise
    install_abort_hook(comm)
    leave_together(comm)
    return comm


def rank_of(text: str) -> tuple[int, int]:
    """Return the rank and the number of ranks that ``--as-rank`` names.

    Raises:
        ConfigError: it names none, or this process is one of several.
    """
    from mpishard.errors import ConfigError
    from mpishard.launched import environment_size

    rank, slash, size = (part.strip() for part in text.partition("/"))
    if not (slash and _is_number(rank) and _is_number(size)):
        raise ConfigError(f"--as-rank is {text!r}; it must be a rank and a number of ranks, as in 5/1024")
    if not 1 <= int(size) <= MOST_RANKS:
        raise ConfigError(f"--as-rank is {text!r}; the number of ranks must be at least 1 and at most {MOST_RANKS}")
    if int(rank) >= int(size):
        raise ConfigError(f"--as-rank is {text!r}; the ranks of {int(size)} are 0 to {int(size) - 1}")
    if (launched := environment_size() or 1) > 1:
        raise ConfigError(
            f"--as-rank is one process that plays a rank of {int(size)}, and the launcher started {launched}; start it "
            "without mpiexec or srun"
        )
    return int(rank), int(size)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 18


def start_alone(
    rank: int,
    size: int,
    transport: str,
    device: str,
    *,
    node: int = 0,
    tf32: bool = False,
    algorithm: str = "alltoall",
) -> Communicator:
    """Return the communicator of one rank of a job that is not there: it answers collectives by itself.

    Args:
        transport: the one that the job would use; ``auto`` is mpi on a CPU, and staged on a GPU.
        node: ranks of a node; 0 for all on one.

    Raises:
        ConfigError: the transport or the device cannot be used as asked.
    """
    from mpishard.array.device import operations
    from mpishard.comm.alone import AloneCommunicator
    from mpishard.comm.choice import Candidate, choose
    from mpishard.errors import ConfigError

    if transport == "local":
        raise ConfigError(
            "comm.transport is local, which is one rank alone, and --as-rank names one of several; use auto"
        )
    ops = operations(device, None, tf32=tf32)
    if transport == "auto":
        transport = "mpi" if ops.device == "cpu" else "staged"
    elif ops.device == "cpu":
        transport, _ = choose([Candidate()], transport)
    return AloneCommunicator(rank, size, ops, transport, node or None, algorithm)


@contextmanager
def ending_all(comm: Communicator) -> Iterator[None]:
    """End all ranks where this one leaves quietly: the others would wait for it for ever."""
    try:
        yield
    except (KeyboardInterrupt, EOFError, BrokenPipeError, SystemExit) as error:
        if comm.size > 1:
            closed = isinstance(error, BrokenPipeError)
            comm.abort(f"mpishard: {'standard output was closed' if closed else 'interrupted'}; ending all ranks", 1)
        raise
    except OSError as error:
        if comm.size > 1 and error.filename is None:  # else it is no output, but a bug
            comm.abort(f"mpishard: the output cannot be written ({error.strerror}); ending all ranks", 2)
        raise
