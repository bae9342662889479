"""Pinned host memory of CUDA, and copies that run beside the kernels.

[Note: what waits for what]
Copies to the device and copies from it have a stream each, so that both directions of the bus are used at once. A slot
has three events, each the last of its kind: *came*, for which the stream of the operations waits; *used*, recorded on
it, for which the copy back waits; *left*, for which the slot's next copy in waits. An array that always passes through
the same slot is therefore never read before it has come back. Copies back follow one another, and each of them what was
copied in for it; so when the stream of copies back has nothing left to do, nothing is under way.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np

from mpishard.array.cupy_gpu import Counters, Gpu
from mpishard.array.dtypes import Array, address
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.pinned import SLOTS, Pairs, PinnedHost

__all__ = ["CupyPinnedHost"]


class _Pinned:
    """Owner of memory of cudaHostAlloc: given back with the last array that lies in it, once no copy is under way.

    Not CuPy's pinned memory, whose pool would hand it out again while a copy still runs.
    """

    def __init__(self, gpu: Gpu, nbytes: int, streams: tuple[Any, ...]) -> None:
        self.ptr = 0
        self._runtime, self._streams = gpu.runtime, streams
        gpu.use()
        self.ptr = int(gpu.runtime.hostAlloc(nbytes, 0))
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (self.ptr, False), "version": 3}

    def __del__(self) -> None:
        # Not while the process ends: the copies may wait for a rank that is gone.
        if self.ptr and not sys.is_finalizing():
            with contextlib.suppress(Exception):  # after a fault of the device nothing can be freed any more
                for stream in self._streams:
                    stream.synchronize()
                self._runtime.freeHost(self.ptr)


class _Slot:
    """The events of a slot; see the note above."""

    def __init__(self, cuda: Any) -> None:
        self.came, self.used, self.left = (cuda.Event(disable_timing=True) for _ in range(3))


class CupyPinnedHost(PinnedHost):
    """Host memory beside one GPU. One object serves one thread at a time.

    Args:
        stream: that of the operations.
    """

    def __init__(self, gpu: Gpu, stream: Any, counters: Counters) -> None:
        super().__init__(NumpyOps())
        self._gpu, self._stream, self._counters = gpu, stream, counters
        gpu.use()
        cuda = gpu.cupy.cuda
        self._in, self._out = (cuda.Stream(non_blocking=True) for _ in range(2))
        self._slots = [_Slot(cuda) for _ in range(SLOTS)]

    def _allocate(self, nbytes: int) -> Array:
        try:
            owner = _Pinned(self._gpu, max(64, nbytes), (self._out,))
        except self._gpu.runtime.CUDARuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise MemoryError(f"{nbytes} bytes of pinned host memory were asked of CUDA: {reason}") from None
        found: Array = np.asarray(owner)[:nbytes]
        return found

    def copy_in(self, slot: int, pairs: Pairs) -> None:
        """As the base class says."""
        events = self._slots[slot]
        self._gpu.use()
        self._in.wait_event(events.left)
        for host, device in pairs:
            self._copy(address(device), address(host), host.nbytes, self._gpu.runtime.memcpyHostToDevice, self._in)
        events.came.record(self._in)
        self._stream.wait_event(events.came)

    def copy_out(self, slot: int, pairs: Pairs) -> None:
        """As the base class says."""
        events = self._slots[slot]
        self._gpu.use()
        events.used.record(self._stream)
        self._out.wait_event(events.used)
        for host, device in pairs:
            self._copy(address(host), address(device), host.nbytes, self._gpu.runtime.memcpyDeviceToHost, self._out)
        events.left.record(self._out)

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: Any) -> None:
        self._gpu.runtime.memcpyAsync(target, source, nbytes, kind, stream.ptr)
        self._counters.copies += 1

    def settle(self) -> None:
        """As the base class says."""
        if not self._out.done:
            self._counters.waits += 1
        self._out.synchronize()
