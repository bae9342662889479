"""What one rank fails at while it reads or writes files is everybody's CheckpointError."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from mpishard.comm.base import Communicator
from mpishard.comm.together import on_rank_zero, together
from mpishard.errors import CheckpointError, ConfigError

__all__ = ["agreed", "by_rank_zero", "from_rank_zero", "system_errors"]

_Result = TypeVar("_Result")


def agreed(comm: Communicator, action: Callable[[], _Result]) -> _Result:
    """Run ``action`` on every rank and return its result. Collective.

    Raises:
        CheckpointError: on all ranks, with the first failing rank's message.
    """
    with _renamed():
        return together(comm, action)


def by_rank_zero(comm: Communicator, action: Callable[[], _Result]) -> _Result | None:
    """Run ``action`` on rank 0 alone; return its result there and None on the others. Collective.

    Raises:
        CheckpointError: on all ranks, when it failed.
    """
    with _renamed():
        return on_rank_zero(comm, action)


def from_rank_zero(comm: Communicator, read: Callable[[], bytes]) -> bytes:
    """Return on every rank the bytes that rank 0 has read. Collective.

    So all ranks judge the same bytes, and a file system is asked once.

    Raises:
        CheckpointError: on all ranks, when rank 0 could not read.
    """
    found = by_rank_zero(comm, read)
    sizes = comm.exchange(len(found or b"").to_bytes(8, "little"), "the size of what rank 0 has read")
    size = int.from_bytes(sizes[0], "little")
    if not size:
        return b""
    array = comm.ops.empty(size, np.dtype(np.uint8))
    if found:
        comm.ops.upload(np.frombuffer(found, np.uint8), array)
    comm.broadcast(array)
    return comm.ops.fetch(array).tobytes()


@contextmanager
def _renamed() -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


@contextmanager
def system_errors(path: Path, rank: int, *, writing: bool) -> Iterator[None]:
    """Make a CheckpointError of the system's errors, with the rank and the machine where it happened.

    Args:
        path: what is read or written; errors of open files do not name it.
        rank: who does it.
    """
    try:
        yield
    except OSError as error:
        verb = "written" if writing else "read"
        remedy = "choose a folder that can be"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "make room, or choose another folder"
        elif error.errno == errno.ENOENT:
            remedy = "it must lie on a file system that all nodes share" if rank else "look for its right name"
        reason = error.strerror or str(error)
        where = f"rank {rank} on {socket.gethostname()}"
        raise CheckpointError(f"{os.fspath(path)}: cannot be {verb} by {where} ({reason}); {remedy}") from None
