"""Memory that the ranks of one host share: one rank takes it, the others map it and read it in place.

[Note: whose memory]
A *segment* is an anonymous file in memory (``memfd_create``) that its owner has mapped. A peer that is told the owner's
pid and the number of the descriptor maps the same pages through ``/proc/PID/fd``. So taking memory is no collective,
nothing has a name that could be left behind, and no limit of ``/dev/shm`` counts. (Windows of MPI-3 are taken by all
ranks at once, and lie in ``/dev/shm``, which in containers is often 64 MB.)

[Note: lifetime of a segment]
The owner keeps the descriptor while any array on the segment is alive; then it is closed and unmapped. A peer's mapping
lives as long as the peer's arrays on it, also when the owner is gone. Small arrays share a segment.

[Note: large pages]
Pages of 4 KiB cost a quarter of the bandwidth, and few systems give shared memory larger ones by themselves
(``shmem_enabled``). So the pages of a large segment are taken at once, and asked to be made large (``MADV_COLLAPSE``,
Linux 6.1, which that setting does not bind unless it is ``deny``). A page is large for a process only where it is
mapped at a multiple of its size. Where the kernel refuses, pages stay small, and all is right but slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import math
import os
import struct
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpishard.array.dtypes import Array, DType, address
from mpishard.errors import ConfigError

__all__ = ["PLACE_BYTES", "Place", "SharedMemory", "gives_large_pages"]

#: bytes of a segment that small arrays share, and of the largest of them
_SLAB, _SMALL = 1 << 20, 1 << 16
_ALIGNMENT = 64
#: bytes of the largest page that is tried for
_TRIED = 1 << 25
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 14, 23, 25
_NO_ACCESS, _READ_WRITE = 0, 3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x1, 0x2, 0x10, 0x20, 0x4000
_PLACE = struct.Struct("=qqqqq")
#: bytes of a packed place
PLACE_BYTES = _PLACE.size


class Place(NamedTuple):
    """Where an array lies: the owner's pid, its descriptor and number of the segment, the segment's bytes, offset."""

    pid: int
    descriptor: int
    number: int
    nbytes: int
    offset: int

    def pack(self) -> bytes:
        """Return PLACE_BYTES bytes."""
        return _PLACE.pack(*self)

    @classmethod
    def unpack(cls, record: bytes) -> Place:
        """Return what :meth:`pack` was called on."""
        return cls(*_PLACE.unpack(record))


def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


@functools.cache
def _large_page() -> int:
    """Return the bytes of a large page, or 0 where the kernel has none."""
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0


def gives_large_pages() -> bool | None:
    """Return whether the kernel makes pages of shared memory large for us, by trying; None where that cannot be."""
    page = _large_page()
    if not 0 < page <= _TRIED:
        return None
    memory = SharedMemory()
    try:
        array = memory.allocate(2 * page, np.dtype(np.uint8))
        return any("ShmemPmdMapped" in line and line.split()[1] != "0" for line in _mapping(address(array)))
    except (MemoryError, OSError):
        return None


def _mapping(at: int) -> list[str]:
    """Return what the kernel says of the mapping that begins at an address, line by line."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"{at:08x}-"))
    return list(itertools.takewhile(lambda line: line.split()[0].endswith(":"), lines[first + 1 :]))


class _Segment:
    """A mapping of ``nbytes`` of a descriptor; unmapped with the last array on it.

    Not :class:`mmap.mmap`, which keeps a descriptor for each mapping: ranks map several segments of each other rank.
    """

    def __init__(self, library: Any, descriptor: int, nbytes: int, keeps: bool) -> None:
        """``keeps``: the descriptor is the segment's from here on, and open as long as it."""
        page = _large_page()
        large = 0 < page <= nbytes
        # Addresses without memory, as many more as it takes to begin at a multiple of a large page.
        room = nbytes + page if large else nbytes
        kind = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        start = _mapped(library, None, room, _NO_ACCESS, kind, -1)
        try:
            self.address = start + (-start % page if large else 0)
            _mapped(library, self.address, nbytes, _READ_WRITE, _MAP_SHARED | _MAP_FIXED, descriptor)
        except OSError:
            library.munmap(start, room)
            raise
        if large:
            library.madvise(self.address, nbytes, _MADV_HUGEPAGE)
        self._library = library
        self.nbytes, self.descriptor = nbytes, descriptor if keeps else -1
        # Arrays may be in use until the very end of the process, so that end unmaps nothing.
        weakref.finalize(self, _drop, library, start, room, self.descriptor).atexit = False
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }

    def take(self, part: int = 0, parts: int = 1) -> None:
        """Take the pages of one of ``parts`` parts, near this process's cores, and as large ones where there are."""
        page = _large_page()
        if not 0 < page <= self.nbytes:
            return
        start, stop = (-(-self.nbytes * each // parts // page) * page for each in (part, part + 1))
        start, stop = min(start, self.nbytes), min(stop, self.nbytes)
        if self._library.madvise(self.address + start, stop - start, _MADV_POPULATE_WRITE) == 0:
            self._library.madvise(self.address + start, (stop - start) // page * page, _MADV_COLLAPSE)


def _mapped(library: Any, at: int | None, nbytes: int, access: int, kind: int, descriptor: int) -> int:
    found = library.mmap(at, nbytes, access, kind, descriptor, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)


def _drop(library: Any, start: int, nbytes: int, descriptor: int) -> None:
    library.munmap(start, nbytes)
    if descriptor >= 0:
        with contextlib.suppress(OSError):
            os.close(descriptor)


class SharedMemory:
    """What this process shares, and what it has mapped of its peers'. For one thread."""

    def __init__(self) -> None:
        self._library = _library()
        self._pid = os.getpid()
        self._taken = 0
        self._own: weakref.WeakValueDictionary[int, _Segment] = weakref.WeakValueDictionary()
        self._peers: weakref.WeakValueDictionary[tuple[int, int], _Segment] = weakref.WeakValueDictionary()
        self._slab: Array | None = None
        self._top = 0

    def allocate(self, count: int, dtype: DType) -> Array:
        """Return a 1-D array that peers can map, at a multiple of 64 bytes; its memory is zero until it is used.

        Raises:
            MemoryError: the system does not give as much, or no further descriptor.
        """
        nbytes = count * dtype.itemsize
        if nbytes > _SMALL:
            segment = self._segment(nbytes)
            segment.take()
            return np.asarray(segment).view(dtype)  # which keeps the segment alive, and so does each view of it
        if self._slab is None or self._top + nbytes > _SLAB:
            self._slab, self._top = np.asarray(self._segment(_SLAB)), 0
        start = self._top
        self._top = math.ceil((start + max(1, nbytes)) / _ALIGNMENT) * _ALIGNMENT
        return self._slab[start : start + nbytes].view(dtype)

    def common(self, nbytes: int) -> Array:
        """Return bytes whose pages are left to those who will :meth:`take` them.

        Raises:
            MemoryError: as :meth:`allocate`.
        """
        return np.asarray(self._segment(nbytes))

    def take(self, array: Array, part: int, parts: int) -> None:
        """Take the pages of one of ``parts`` parts of what a rank got by :meth:`common`, here or in a peer."""
        for segment in (*self._own.values(), *self._peers.values()):
            if segment.address == address(array):
                segment.take(part, parts)

    def _segment(self, nbytes: int) -> _Segment:
        try:
            descriptor = os.memfd_create("mpishard", os.MFD_CLOEXEC)
            try:
                os.ftruncate(descriptor, nbytes)
                segment = _Segment(self._library, descriptor, nbytes, keeps=True)
            except OSError:
                os.close(descriptor)
                raise
        except OSError as error:
            more = "; raise ulimit -n" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
            raise MemoryError(f"{nbytes} bytes of shared memory cannot be had: {error.strerror}{more}") from error
        self._taken += 1
        self._own[self._taken] = segment
        return segment

    def place(self, array: Array) -> Place | None:
        """Return where an array of :meth:`allocate`, or a part of one, lies; None for any other array."""
        start = address(array)
        for number, segment in self._own.items():
            if segment.address <= start and start + array.nbytes <= segment.address + segment.nbytes:
                return Place(self._pid, segment.descriptor, number, segment.nbytes, start - segment.address)
        return None

    def at(self, place: Place, count: int, dtype: DType) -> Array:
        """Return a peer's array.

        Raises:
            ConfigError: its memory cannot be mapped.
        """
        key = (place.pid, place.number)
        segment = self._peers.get(key)
        if segment is None:
            path = f"/proc/{place.pid}/fd/{place.descriptor}"
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    segment = _Segment(self._library, descriptor, place.nbytes, keeps=False)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise ConfigError(
                    f"memory of process {place.pid} of this host cannot be mapped ({path}: {error.strerror}); start "
                    "the ranks of a host as one user and in one container, or use transport mpi"
                ) from error
            self._peers[key] = segment
        part: Array = np.asarray(segment)[place.offset : place.offset + count * dtype.itemsize]
        return part.view(dtype)
