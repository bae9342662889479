"""What the commands that run on several ranks share: how the ranks meet, and how one that leaves ends them all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpishard.comm.base import Communicator

__all__ = ["ending_all", "start"]


def start(transport: str) -> Communicator:
    """Return the communicator of this job, whose uncaught exceptions end all ranks.

    Raises:
        ConfigError: MPI cannot be used as asked, or something that a rank needs cannot be imported.
    """
    from mpishard.array.numpy_ops import NumpyOps
    from mpishard.comm.launch import abort_world, install_abort_hook, leave_together, world
    from mpishard.launched import environment_size

    # Until ranks have compared their settings, how they meet must not depend on one rank's.
    several = (environment_size() or 1) > 1
    try:
        comm = world(NumpyOps(), transport="auto" if several else transport)
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
