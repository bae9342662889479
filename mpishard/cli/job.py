"""What the commands that run on several ranks share: how the ranks meet, and how one that leaves ends them all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpishard.array.ops import Ops
    from mpishard.comm.base import Communicator
    from mpishard.errors import ConfigError

__all__ = ["ending_all", "start"]


def start(
    transport: str, device: str, *, share: bool = False, tf32: bool = False, problem: ConfigError | None = None
) -> Communicator:
    """Return the communicator of this job, whose uncaught exceptions end all ranks.

    Args:
        transport: as in :func:`mpishard.comm.launch.world`.
        device: ``auto``, ``cpu`` or ``cuda``.
        share: let ranks share a GPU.
        tf32: let a GPU round the factors of fp32 matrix products to TF32.
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
        comm = world(make_ops, "auto" if several and transport == "local" else transport, share_device=share)
    except KeyboardInterrupt:
        abort_world("mpishard: interrupted; ending all ranks", 1)
        raise
    install_abort_hook(comm)
    leave_together(comm)
    return comm


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
