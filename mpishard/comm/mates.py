"""The processes of other ranks that can be seen from here: which has ended, and where each of them was.

[Note: a few milliseconds]
A launcher may end all ranks as soon as it sees that one has died (:mod:`mpishard.comm.reprieve`); what was not printed
by then is lost. So what is needed to tell who has died is open before: a handle of each process, which becomes readable
when it has ended (``pidfd_open``, Linux 5.3), and a mapping of each record, which is read without a system call. The
thread that tells competes with the main thread for the interpreter's lock. It gives it up in each system call, and
gets it back only when the other one was asked for it for 5 ms; :func:`hurried` shortens that.

A process that is killed gives its memory back first, which takes some 10 ms for each 100 MB, and is said to have ended
last. In between MPI may find it gone, and raise in a rank that is well: :meth:`Mates.ending` tells these errors apart.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpishard.comm.record import RecordView, Snapshot, State, process_start, read_record, record_path

__all__ = ["Mates", "hurried", "is_gone"]

#: seconds after which a thread that wants the interpreter's lock asks for it, while a death is told
_HURRY = 1e-4
#: ranks of which is told where they were
_SHOWN = 8


class Mates:
    """Waits for the end of processes, and reads their ranks' records.

    Where the kernel gives no handle, or the process was not there any more, its end is not waited for.

    Args:
        folder: where the records lie; those of ``seen`` and ``own`` are there.
        own: this rank.
        seen: of each rank whose process can be seen from here, its pid and start time.
    """

    def __init__(self, folder: Path, own: int, seen: dict[int, tuple[int, int]]) -> None:
        self._folder = folder
        self._views: dict[int, RecordView] = {}
        for rank in sorted({own, *seen}):
            with contextlib.suppress(OSError, ValueError):
                self._views[rank] = RecordView(record_path(folder, rank))
        self._ranks: dict[int, int] = {}
        self._pids = {rank: pid for rank, (pid, started) in seen.items()}
        self._poll = select.poll()
        self._heard, self._bell = os.pipe()
        self._poll.register(self._heard, select.POLLIN)
        for rank, (pid, started) in seen.items():
            handle = _handle(pid)
            if handle is None:
                continue
            if is_gone(pid, started):  # and the handle may be another process's
                os.close(handle)
                continue
            self._ranks[handle] = rank
            self._poll.register(handle, select.POLLIN)

    def wait(self, seconds: float) -> tuple[bool, list[int]]:
        """Sleep until a process ends; return whether :meth:`ring` was called, and the ranks that have ended."""
        ready = [handle for handle, _ in self._poll.poll(1000 * max(0.0, seconds))]
        ended = []
        for handle in ready:
            if handle != self._heard:
                self._poll.unregister(handle)
                ended.append(self._ranks.pop(handle))
                os.close(handle)
        return self._heard in ready, ended

    def ring(self) -> None:
        """End a wait of another thread, or the next one."""
        os.write(self._bell, b"!")

    def read(self, rank: int) -> Snapshot | None:
        """Return what a rank's record says, from its mapping or else from the file; None where it cannot be read."""
        view = self._views.get(rank)
        with contextlib.suppress(OSError):
            return view.read() if view is not None else read_record(record_path(self._folder, rank))
        return None

    def ending(self) -> int | None:
        """Return a rank whose process ends or has ended, and whose record does not say so; None for none."""
        for rank, pid in self._pids.items():
            if _has_no_memory(pid) and (snapshot := self.read(rank)) is not None and snapshot.state is State.RUNNING:
                return rank
        return None

    def places(self, without: int) -> str:
        """Say where the ranks that can be seen from here are, but for one: ``; rank 0 was in step 3, ...; ...``."""
        found = [(rank, view.read()) for rank, view in self._views.items() if rank != without]
        told = [f"; rank {rank} was {snapshot}" for rank, snapshot in found[:_SHOWN] if snapshot is not None]
        return "".join(told) + (f"; {len(found) - _SHOWN} ranks more are here" if len(found) > _SHOWN else "")

    def close(self) -> None:
        """Give back handles and mappings."""
        for handle in (*self._ranks, self._heard, self._bell):
            os.close(handle)
        self._ranks.clear()
        for view in self._views.values():
            view.close()
        self._views.clear()


@contextmanager
def hurried() -> Iterator[None]:
    """Let threads of this process get the interpreter's lock soon after they ask for it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_HURRY)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def is_gone(pid: int, started: int) -> bool:
    """Return whether a process that began at ``started`` has ended; False where the kernel does not tell."""
    try:
        return process_start(pid) != started
    except OSError:
        return False


def _has_no_memory(pid: int) -> bool:
    """Return whether a process has given its memory back, which it does first when it ends, or is not there."""
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:
            return (file.read(64) or b"0").split()[0] == b"0"
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False


def _handle(pid: int) -> int | None:
    """Return a descriptor that becomes readable when a process has ended; None where the kernel has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
