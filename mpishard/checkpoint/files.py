"""What is looked at before a file is opened: whether its name can be one, and whether it can be read to an end.

Opening a FIFO waits for somebody who writes, for ever where nobody does; a device may have no end. One rank that waits
there holds up all.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from mpishard.errors import CheckpointError

__all__ = ["check_name", "open_regular", "read_small"]

#: No manifest or configuration is longer; one rank that lacks the memory for it would fail alone.
_LONGEST = 100_000_000


def check_name(path: Path | str) -> None:
    """Refuse a name that no file can have, for which the system calls raise a ValueError.

    Raises:
        CheckpointError: it holds a zero byte or a character that file names cannot.
    """
    try:
        held = os.fsencode(path)
    except UnicodeEncodeError:
        held = b"\0"
    if b"\0" in held:
        raise CheckpointError(f"{os.fspath(path)!r} cannot be the name of a file; use another")


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; a link to a file is one.

    Raises:
        CheckpointError: it is a directory, FIFO, socket or device, or its name cannot be one.
        OSError: it is not there, or cannot be opened.
    """
    check_name(path)
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path}: is no regular file; name one that is, or copy it again")
    return path.open("rb")


def read_small(path: Path) -> bytes:
    """Return what a file holds that is no longer than manifests and configurations are.

    Raises:
        CheckpointError: as in :func:`open_regular`, or it is longer.
        OSError: it is not there, or cannot be read.
    """
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > _LONGEST:
            raise CheckpointError(f"{path}: holds {size} bytes, {_LONGEST} are the most; take another")
        return file.read(_LONGEST)
