"""What a rank leaves for others to read when it cannot speak: one small mapped file of fixed layout.

[Note: the layout of a record]
512 bytes in the byte order of the machine, fields at multiples of 8. The first part is written once:

======  =====  ===========================================================================
offset  bytes  field
======  =====  ===========================================================================
0       8      magic, ``mpishard``; written last, so a file that has it is whole
8       8      version of the layout, 2
16      8      rank
24      8      size, the number of ranks
32      8      pid, in the rank's own PID namespace
40      8      start time of the process, field 22 of ``/proc/self/stat``, in clock ticks
48      16     the kernel and the PID namespace, hashed (:func:`kernel_identity`)
64      64     host name, padded with zeros
======  =====  ===========================================================================

The rest changes:

======  =====  ===========================================================================
128     8      state: 1 running, 2 ended, 3 failed
136     8      beats so far
144     8      the step, signed; -1 before the first
152     8      operations noted so far
160     8 x 40 the last operations: number (8 bytes, from 1) and name (32 bytes, cut or padded);
               operation ``n`` stands in slot ``n % 8``
480     8      milliseconds in the last operation
488     8      milliseconds without progress (:mod:`mpishard.comm.stall`)
496     8      the same of the rank of its node that has the fewest, as far as this rank has looked
======  =====  ===========================================================================

A whole number is stored by one copy of 8 aligned bytes, so a reader never sees half of one. A name may be read
while it is being written; the number beside it says which operation it belongs to.

[Note: lifetime of a record]
The mapping belongs to the kernel: what was written is there for others at once on the same machine, and stays
when the process is killed. Another machine sees it once it was flushed to a file system that both share.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import mmap
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "RankRecord",
    "RecordView",
    "Snapshot",
    "State",
    "kernel_identity",
    "process_start",
    "process_stopped",
    "read_record",
    "record_path",
]

_MAGIC = b"mpishard"
_VERSION = 2
_BYTES = 512
_HEAD = struct.Struct("=8sqqqqq16s64s")
_LIVE = struct.Struct("=qqqq")
_SLOT = struct.Struct("=q32s")
_SLOTS = 8
_RING = _HEAD.size + _LIVE.size
#: places of the changing whole numbers, in units of 8 bytes
_STATE, _BEATS, _STEP, _NOTED = (_HEAD.size // 8 + place for place in range(4))
_STANDS = struct.Struct("=qqq")
_STANDING = _RING + _SLOTS * _SLOT.size
_INSIDE, _STILL, _NODE = (_STANDING // 8 + place for place in range(3))


class State(enum.IntEnum):
    """What a rank says of itself."""

    RUNNING = 1
    ENDED = 2
    FAILED = 3


@dataclass(frozen=True)
class Snapshot:
    """A record as it was read."""

    rank: int
    size: int
    pid: int
    #: clock ticks after the machine's start
    started: int
    #: which kernel and PID namespace the pid belongs to
    identity: bytes
    host: str
    state: State
    beats: int
    #: -1 before the first
    step: int
    #: the last operations as (number, name), oldest first; at most 8
    operations: tuple[tuple[int, str], ...]
    #: operations noted so far
    noted: int = 0
    #: seconds in the last operation, without progress, and the least without progress in its node, as it said itself
    inside: float = 0.0
    still: float = 0.0
    node_still: float = 0.0

    def __str__(self) -> str:
        step = f"in step {self.step}" if self.step >= 0 else "before the first step"
        return f"{step}, {f'last operation {self.operations[-1][1]}' if self.operations else 'no operation noted'}"


class RankRecord:
    """This rank's record; makes ``folder/rank-00000`` anew.

    Args:
        folder: where the records of all ranks lie; it must exist.
        rank: this rank.
        size: the number of ranks.

    Raises:
        OSError: the file cannot be written or mapped.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.path = record_path(folder, rank)
        host = socket.gethostname().encode(errors="replace")[:64]
        head = (_VERSION, rank, size, os.getpid(), process_start(os.getpid()) or 0, kernel_identity(), host)
        text = _HEAD.pack(bytes(8), *head) + _LIVE.pack(State.RUNNING, 0, -1, 0)
        try:
            with open(self.path, "w+b", buffering=0) as file:
                # Written and not only stretched: a full disk is an error here, and a fatal signal when a page of
                # the mapping finds no place.
                file.write(text.ljust(_BYTES, b"\0"))
                self._map = mmap.mmap(file.fileno(), _BYTES)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._words = memoryview(self._map).cast("q")
        self._noted = 0
        self._map[: len(_MAGIC)] = _MAGIC
        self._map.flush()

    def note(self, name: bytes) -> None:
        """Say which operation begins; a name is cut after 32 bytes. Takes a fraction of a microsecond."""
        self._noted = number = self._noted + 1
        _SLOT.pack_into(self._map, _RING + number % _SLOTS * _SLOT.size, number, name)
        self._words[_NOTED] = number

    def at_step(self, step: int) -> None:
        """Say which step begins."""
        self._words[_STEP] = step

    def beat(self, flush: bool = False) -> None:
        """Give a sign of life. ``flush`` hands it to the file system, for readers on other machines; may block.

        Raises:
            OSError: the file system did not take it.
        """
        self._words[_BEATS] += 1
        if flush:
            self._map.flush()

    @property
    def noted(self) -> int:
        """Operations noted so far."""
        return self._noted

    @property
    def operation(self) -> bytes:
        """The name of the last one, as it was cut; empty before the first."""
        at = _RING + self._noted % _SLOTS * _SLOT.size + 8
        return self._map[at : at + 32].rstrip(b"\0")

    def stand(self, inside: float, still: float, node_still: float) -> None:
        """Say for how many seconds this rank has been in its operation, and without progress."""
        self._words[_INSIDE] = round(1000 * inside)
        self._words[_STILL] = round(1000 * still)
        self._words[_NODE] = round(1000 * node_still)

    def fail(self) -> None:
        """Say that this rank ends with a failure that it tells itself; for any thread, at any time."""
        with contextlib.suppress(ValueError):  # closed
            self._words[_STATE] = State.FAILED

    def close(self, state: State) -> None:
        """Leave ``state`` and give the mapping back; nothing may be noted afterwards. Again is free."""
        if not self._map.closed:
            self._words[_STATE] = state
            self._words.release()
            try:
                self._map.flush()
            finally:
                self._map.close()


def record_path(folder: Path, rank: int) -> Path:
    """Return where the record of a rank lies."""
    return folder / f"rank-{rank:05d}"


def read_record(path: Path) -> Snapshot | None:
    """Return what a record says; None where there is no whole record of this layout.

    The file is opened and read anew: over NFS an open asks the server, a mapping does not.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            data = file.read(_BYTES)
    except FileNotFoundError:
        return None
    return _snapshot(data) if data is not None and len(data) >= _BYTES else None


class RecordView:
    """A record of a rank on this machine, mapped before it is needed.

    Raises:
        OSError: the file is not there, or cannot be mapped.
        ValueError: it is too short.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "rb", buffering=0) as file:
            self._map = mmap.mmap(file.fileno(), _BYTES, access=mmap.ACCESS_READ)

    def read(self) -> Snapshot | None:
        """Return what it says, without a system call; None where it is no whole record of this layout."""
        return _snapshot(self._map[:])

    def close(self) -> None:
        """Give the mapping back."""
        self._map.close()


def _snapshot(data: bytes) -> Snapshot | None:
    magic, version, rank, size, pid, started, identity, host = _HEAD.unpack_from(data)
    state, beats, step, noted = _LIVE.unpack_from(data, _HEAD.size)
    if magic != _MAGIC or version != _VERSION or state not in list(State):
        return None
    slots = (_SLOT.unpack_from(data, _RING + slot * _SLOT.size) for slot in range(_SLOTS))
    # An operation that begins while this is read stands in place of the oldest one.
    operations = sorted((number, _text(name)) for number, name in slots if number > max(0, noted - _SLOTS))
    seconds = (each / 1000 for each in _STANDS.unpack_from(data, _STANDING))
    return Snapshot(
        rank, size, pid, started, identity, _text(host), State(state), beats, step, tuple(operations), noted, *seconds
    )


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")


def kernel_identity() -> bytes:
    """Return 16 bytes that are equal in processes that see each other's pids: one kernel, one PID namespace.

    Where the kernel does not say, they are random, equal to nobody's.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        namespace = os.stat("/proc/self/ns/pid")
    except OSError:
        return os.urandom(16)
    text = boot + f"{namespace.st_dev} {namespace.st_ino}".encode()
    return hashlib.blake2b(text, digest_size=16).digest()


def process_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger; False where the kernel does not tell."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read(1024)
    except OSError:
        return False
    return (text or b"").rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"])


def process_start(pid: int) -> int | None:
    """Return the start time of a process, in clock ticks after the machine's; None when it has ended.

    A process that has ended and was not waited for yet (a zombie) has ended. With its start time a pid names one
    process for good: pids are used again.

    Raises:
        OSError: the kernel does not tell.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read(1024)
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in parentheses, which may hold anything.
    fields = (text or b"").rpartition(b")")[2].split()
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19])
