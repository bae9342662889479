"""Frames: what every exchange of records begins with.

[Note: frames]
Every exchange begins with a frame of one size that says what it is for, and how long its record is; a short record
travels in it. So ranks that went different ways (one takes a step, another saves) meet in calls that MPI can match,
and learn it, instead of reading each other's bytes as something else or waiting for ever. What a caller begins, a
step say, begins with :meth:`Communicator.meet` for the same reason.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from mpishard.errors import CommError

__all__ = ["FRAME_BYTES", "INLINE", "beginnings", "frame"]

#: bytes of a record that travel in its frame
INLINE = 256
#: what the exchange is for, the length of its record, and the record's beginning
_FRAME = struct.Struct(f"<56sq{INLINE}s")
#: bytes that a frame sends to each other rank
FRAME_BYTES = _FRAME.size


def frame(what: str, record: bytes) -> bytes:
    """Return the frame of one rank's record."""
    return _FRAME.pack(what.encode()[:56], len(record), record[:INLINE])


def beginnings(frames: Sequence[bytes]) -> list[bytes]:
    """Return the beginnings of the ranks' records, from their frames.

    Raises:
        CommError: the ranks are at different exchanges, or their records differ in length; the first rank that
            differs from rank 0 is named.
    """
    first, length, _ = _FRAME.unpack(frames[0])
    records = []
    for rank, one in enumerate(frames):
        what, its, record = _FRAME.unpack(one)
        if what != first:
            raise CommError(
                f"rank {rank} is at {_text(what)}, rank 0 at {_text(first)}; "
                "every rank must make the same calls in the same order"
            )
        if its != length:
            raise CommError(
                f"{_text(what)}: rank {rank} has a record of {its} bytes, rank 0 one of {length}; "
                "records must be of one length"
            )
        records.append(record[:length])
    return records


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")
