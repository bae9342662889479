"""Arrays between host and GPU, and times between events on a stream."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["Clock", "device_array", "from_device", "on_device"]


def on_device(ops: Any, value: Any) -> Any:
    """Arrays become arrays of the GPU with the order of axes in memory that they have; lists theirs; all else stays."""
    if isinstance(value, list):
        return [on_device(ops, item) for item in value]
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    value = np.asarray(value)
    order = _memory_order(value)
    packed = value.transpose(order).copy(order="C")
    x = ops.empty(value.size, value.dtype).reshape(packed.shape)
    ops.upload(packed, x)
    return _transposed(x, [order.index(axis) for axis in range(value.ndim)])


def from_device(ops: Any, x: Any) -> np.ndarray:
    """Return a NumPy array with x's values, whatever its strides."""
    order = _memory_order(x)
    return ops.fetch(_transposed(x, order)).transpose([order.index(axis) for axis in range(x.ndim)])


def device_array(ops: Any, shape: tuple[int, ...], kind: Any, fill: Any = None) -> Any:
    """Return an array of the GPU: of a host array's elements, over and over, or uninitialised."""
    x = ops.empty(math.prod(shape), np.dtype(kind))
    if fill is not None and x.size:
        first = x[: min(fill.size, x.size)]
        ops.upload(fill[: first.size].astype(x.dtype), first)
        done = first.size
        while done < x.size:  # what is there, doubled
            count = min(done, x.size - done)
            ops.copy(x[:count], x[done : done + count])
            done += count
    return x.reshape(shape)


def _memory_order(x: Any) -> list[int]:
    return sorted(range(x.ndim), key=lambda axis: -abs(x.strides[axis]))


def _transposed(x: Any, order: list[int]) -> Any:
    """``x.transpose(order)`` by swaps of two axes, which is what arrays of the GPU are sure to have."""
    places = list(range(len(order)))
    for axis, wanted in enumerate(order):
        at = places.index(wanted)
        if at != axis:
            x = x.swapaxes(axis, at)
            places[axis], places[at] = places[at], places[axis]
    return x


class Clock:
    """Times between two events on the stream of the operations."""

    def __init__(self, ops: Any) -> None:
        import cupy

        self._cuda, self._stream = cupy.cuda, ops.stream
        ops.gpu.use()
        self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()

    def start(self) -> None:
        self._start.record(self._stream)

    def stop(self) -> float:
        """Return the seconds since the start, once the GPU has come here."""
        self._stop.record(self._stream)
        self._stop.synchronize()
        return float(self._cuda.get_elapsed_time(self._start, self._stop)) * 1e-3

    def best(self, call: Callable[[], Any], repeats: int, groups: int = 3) -> float:
        """Return the seconds of one call: the best group of ``repeats`` calls in a row, after one that is not counted.

        In a row, so that the host is ahead of the GPU and the time is the GPU's, where a call is long enough.
        """
        call()
        times = []
        for _ in range(groups):
            self.start()
            for _ in range(repeats):
                call()
            times.append(self.stop() / repeats)
        return min(times)
