"""Small programs on the stand-in, for its tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.array import kernels

__all__ = ["Pair", "compiled_kernel", "device_array", "fetched", "pinned", "put"]


def device_array(count: int, dtype: Any = np.float32) -> Any:
    import cupy

    nbytes = count * np.dtype(dtype).itemsize
    memory = cupy.cuda.UnownedMemory(cupy.cuda.runtime.malloc(nbytes), nbytes, None)
    return cupy.ndarray((count,), dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))


def pinned(count: int, dtype: Any = np.float32) -> np.ndarray:
    import cupy

    memory = cupy.cuda.alloc_pinned_memory(count * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype, count)


def put(values: Any, stream: Any) -> Any:
    """Return a device array with the values, once they are there."""
    from cupy.cuda import runtime

    values = np.ascontiguousarray(values)
    host, x = pinned(values.size, values.dtype), device_array(values.size, values.dtype)
    host[:] = values.reshape(-1)
    runtime.memcpyAsync(x.data.ptr, host.ctypes.data, x.nbytes, runtime.memcpyHostToDevice, stream.ptr)
    stream.synchronize()
    return x.reshape(values.shape)


def fetched(x: Any, stream: Any) -> np.ndarray:
    """Return the values of a contiguous device array."""
    from cupy.cuda import runtime

    host = pinned(x.size, x.dtype)
    runtime.memcpyAsync(host.ctypes.data, x.data.ptr, x.nbytes, runtime.memcpyDeviceToHost, stream.ptr)
    stream.synchronize()
    return host.copy().reshape(x.shape)


def compiled_kernel(name: str, T: str = "float32", G: str = "float32") -> Any:
    return function_of(kernels.source(kernels.KERNELS[name].file), name, T, G)


def function_of(code: str, name: str, T: str = "float32", G: str = "float32") -> Any:
    """Return a kernel of a text, compiled for the current device."""
    from cupy import cuda

    module = cuda.Module()
    module.load(cuda.compiler.compile_using_nvrtc(code, kernels.options(T, G))[0])
    return module.get_function(name)


def add(kernel: Any, x: Any, y: Any, out: Any, stream: Any) -> None:
    with stream:
        kernel((1,), (256,), (x, y, out, np.int64(x.size), np.int64(x.size)))


class Pair:
    """Batches go up on one stream and are used on another, step after step; ``without`` leaves out one order.

    ``ready``: the use waits for the copy. ``used``: the next copy waits for the use. ``up``: the host waits for the
    copy before it writes the next batch. ``early``: no order, but the event ``ready`` is recorded before the copy.
    """

    def __init__(self, trace: Any = None, without: str = "") -> None:
        import cupy

        self.cuda, self.without = cupy.cuda, without
        self.compute, self.copies = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        self.ready, self.used, self.up = (cupy.cuda.Event(disable_timing=True) for _ in range(3))
        self.x, self.total, self.host = device_array(64), put(np.zeros(64, np.float32), self.compute), pinned(64)
        self.kernel = compiled_kernel("add")
        if trace is not None:
            trace.name_stream(self.compute, "compute")
            trace.name_stream(self.copies, "copies")
            for array, name in ((self.x, "batch"), (self.total, "total")):
                trace.label(array.data.ptr, array.nbytes, name)
            trace.label(self.host.ctypes.data, self.host.nbytes, "pinned batch")

    def run(self, steps: int = 3) -> np.ndarray:
        runtime = self.cuda.runtime
        for step in range(steps):
            if step and self.without != "up":
                self.up.synchronize()
            self.host[:] = step + 1
            if step and self.without != "used":
                self.copies.wait_event(self.used)
            if self.without == "early":
                self.ready.record(self.copies)
            runtime.memcpyAsync(self.x.data.ptr, self.host.ctypes.data, 256, 1, self.copies.ptr)
            self.up.record(self.copies)
            if self.without != "early":
                self.ready.record(self.copies)
            if self.without != "ready":
                self.compute.wait_event(self.ready)
            add(self.kernel, self.total, self.x, self.total, self.compute)
            self.used.record(self.compute)
        result = fetched(self.total, self.compute)
        self.copies.synchronize()
        return result
