"""The way between host and GPU: through pinned buffers, in chunks, in the order of one stream.

[Note: slots]
A slot is a pinned buffer and the event behind its last copy. The host waits for that event before it touches the
buffer again, and for nothing else: a copy to the GPU never waits for the kernels before it, and a copy from it
waits only for what is on this stream. Copies by CuPy from plain host memory would wait for the whole queue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.array.cupy_gpu import Counters, Gpu
from mpishard.array.dtypes import Array
from mpishard.errors import ShapeError

__all__ = ["SLOT", "Transfers"]

SLOT = 4 << 20  # bytes
_SLOTS = 2
_BYTES = np.dtype(np.uint8)


class _Slot:
    """Pinned memory as NumPy sees it, and an event; ``busy`` while the host has not waited for its last copy."""

    def __init__(self, cuda: Any, nbytes: int) -> None:
        self.memory = cuda.alloc_pinned_memory(nbytes)
        self.ptr: int = self.memory.ptr
        self.bytes: Array = np.frombuffer(self.memory, _BYTES, nbytes)
        self.event = cuda.Event(disable_timing=True)
        self.busy = False


class Transfers:
    """Copies on one stream. One object serves one thread at a time."""

    def __init__(self, gpu: Gpu, stream: Any, counters: Counters) -> None:
        self._gpu, self._stream, self._counters = gpu, stream, counters
        self._slots: list[_Slot] = []
        self._next = 0

    def prepare(self) -> None:
        """Take the pinned memory; again is free."""
        if not self._slots:
            self._gpu.use()
            self._slots = [_Slot(self._gpu.cupy.cuda, SLOT) for _ in range(_SLOTS)]

    def _take(self) -> _Slot:
        """Return the slot that was used longest ago, once its last copy is over."""
        self.prepare()
        slot = self._slots[self._next]
        self._next = (self._next + 1) % _SLOTS
        self._wait(slot)
        return slot

    def _wait(self, slot: _Slot) -> None:
        if slot.busy:
            if not slot.event.done:
                self._counters.waits += 1
            slot.event.synchronize()
            slot.busy = False

    def _copy(self, target: int, source: int, nbytes: int, kind: int, slot: _Slot) -> None:
        self._gpu.use()
        self._gpu.runtime.memcpyAsync(target, source, nbytes, kind, self._stream.ptr)
        slot.event.record(self._stream)
        slot.busy = True
        self._counters.copies += 1

    def send(self, x: Array, write: Callable[[Array, int], None]) -> None:
        """Fill x (contiguous): ``write(chunk, start)`` puts the elements from ``start`` on into a pinned chunk."""
        size = x.itemsize
        each = SLOT // size
        to_device = self._gpu.runtime.memcpyHostToDevice
        for start in range(0, x.size, each):
            count = min(each, x.size - start)
            slot = self._take()
            write(slot.bytes[: count * size].view(x.dtype), start)
            self._copy(_ptr(x) + start * size, slot.ptr, count * size, to_device, slot)

    def upload(self, host: Array, x: Array) -> None:
        """``x = host``, equal shapes and types; host may be changed as soon as this returns."""
        if not x.flags.c_contiguous:
            if x.ndim < 2:
                raise ShapeError(f"upload was given x with strides {x.strides}; its last axis must be contiguous")
            for row, part in zip(host, x):
                self.upload(row, part)
            return
        flat = np.ascontiguousarray(host).reshape(-1)

        def write(chunk: Array, start: int) -> None:
            np.copyto(chunk, flat[start : start + chunk.size])

        self.send(x, write)

    def fetch(self, x: Array, out: Array) -> None:
        """``out = x``, equal shapes and types, waiting for what computes x on this stream."""
        if not x.flags.c_contiguous:
            if x.ndim < 2:
                raise ShapeError(f"fetch was given x with strides {x.strides}; its last axis must be contiguous")
            for part, row in zip(x, out):
                self.fetch(part, row)
            return
        flat, nbytes = out.reshape(-1).view(_BYTES), x.nbytes
        to_host = self._gpu.runtime.memcpyDeviceToHost
        before: tuple[_Slot, int, int] | None = None
        for start in range(0, nbytes, SLOT):
            stop = min(start + SLOT, nbytes)
            slot = self._take()
            self._copy(slot.ptr, _ptr(x) + start, stop - start, to_host, slot)
            # While this chunk is on its way, the host copies the one before.
            if before is not None:
                self._receive(flat, *before)
            before = slot, start, stop
        if before is not None:
            self._receive(flat, *before)

    def _receive(self, flat: Array, slot: _Slot, start: int, stop: int) -> None:
        self._wait(slot)
        flat[start:stop] = slot.bytes[: stop - start]


def _ptr(x: Any) -> int:
    return int(x.data.ptr)
