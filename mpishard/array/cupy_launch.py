"""What CuPy's operations stand on: memory, launches with checked arguments, scratch, copies and fills.

[Note: one stream]
All work of one object goes to ``stream``, in the order of the calls. :meth:`CupyLaunch.on` gives operations for
another stream with scratch and a cuBLAS handle of their own; only compiled kernels are shared.

[Note: nothing is taken in a step]
Device memory beside the caller's arrays is taken when the object is made. Tables of ranges (holes, segments) are
carved from a room of fixed size the first time that they are seen, and stay.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np

from mpishard.array.cupy_blas import Blas, workspace_bytes
from mpishard.array.cupy_gpu import KINDS, KINDS_IN_WORDS, Counters, Gpu
from mpishard.array.cupy_host import Transfers
from mpishard.array.cupy_pinned import CupyPinnedHost
from mpishard.array.cupy_strides import AXES, elements, joined, padded
from mpishard.array.dtypes import DTYPES, Array, DType, accumulator
from mpishard.array.kernels import BLOCK
from mpishard.array.ops import Ops
from mpishard.array.pinned import PinnedHost
from mpishard.errors import ConfigError, ShapeError

__all__ = ["SCRATCH", "SMALL_SCRATCH", "TABLES", "CupyLaunch", "blocks_of"]

SCRATCH = 8 << 20  # bytes: the partial sums of a matrix's columns
SMALL_SCRATCH = 256 << 10  # bytes of an object for a communication stream
TABLES = 1 << 20  # bytes
_BYTES = np.dtype(np.uint8)
_PITCH = 2**31 - 1  # bytes that rows may lie apart in one copy: CUDA's cudaDevAttrMaxPitch, on every GPU
_WAVES = 16  # blocks a multiprocessor of an elementwise kernel: two rounds of those that run at once


def blocks_of(count: int) -> int:
    """Return the blocks that give each of ``count`` elements a thread."""
    return -(-count // BLOCK)


class CupyLaunch(Ops):
    """See the module's notes. ``counters`` say what this object asked of the GPU.

    Args:
        device: its index among those that this process sees, or one that other operations use already.
        tf32: let matrix products of fp32 round their factors to TF32.
        stream: the stream to work on; a new one by default.

    Raises:
        MemoryError: the device has no room for the scratch.
    """

    def __init__(self, device: int | Gpu = 0, *, tf32: bool = False, stream: Any = None) -> None:
        self.gpu = gpu = device if isinstance(device, Gpu) else Gpu(device, tf32=tf32)
        gpu.use()
        self.counters = Counters()
        self.stream: Any = gpu.cupy.cuda.Stream(non_blocking=True) if stream is None else stream
        self.device = f"cuda:{gpu.index} {gpu.name}"
        main = stream is None
        self._scratch = self.empty(SCRATCH if main else SMALL_SCRATCH, _BYTES)
        self._tables = self.empty(TABLES if main else SMALL_SCRATCH, _BYTES)
        self._tables_used = 0
        self._known: dict[Hashable, Any] = {}
        self._temporaries: dict[tuple[int, int, DType], Any] = {}
        self._most = _WAVES * gpu.processors
        self._transfers = Transfers(gpu, self.stream, self.counters)
        self._blas: Blas | None = None
        self.own_bytes = self._scratch.nbytes + self._tables.nbytes
        if main:
            self._transfers.prepare()
            self._blas = Blas(gpu)
            self.own_bytes += workspace_bytes(gpu.capability)
        self._no_ranges = self._scratch[:16].view(np.int64)  # what kernels get in place of a table without ranges

    def on(self, stream: Any) -> CupyLaunch:
        """Return operations for another stream of the same device."""
        return type(self)(self.gpu, stream=stream)

    @property
    def room(self) -> int:
        """Bytes free on the device now."""
        self.gpu.use()
        return int(self.gpu.cupy.cuda.Device(self.gpu.index).mem_info[0])

    # --- memory, and the way between host and device

    def pinned_host(self) -> PinnedHost | None:
        """Return pinned memory of CUDA, with streams of its own."""
        return CupyPinnedHost(self.gpu, self.stream, self.counters)

    def prepare(self, kind: DType) -> None:
        """Check that the device computes with arrays of ``kind``; the scratch is there.

        Raises:
            ConfigError: it does not.
        """
        if kind not in KINDS:
            raise ConfigError(f"element type {kind} cannot be computed with on a GPU; use {KINDS_IN_WORDS}")
        if kind == DTYPES["bfloat16"] and self.gpu.capability < 80:
            raise ConfigError(
                f"{self.gpu.name} has compute capability {self.gpu.capability / 10}; bfloat16 needs 8.0 (A100 or "
                "later); use float16 or float32"
            )

    def empty(self, count: int, dtype: DType) -> Array:
        """Return an uninitialised 1-D array of cudaMalloc's memory, at a multiple of 256 bytes.

        Raises:
            MemoryError: the device has no room.
        """
        kind = np.dtype(dtype)
        memory = self.gpu.allocate(count * kind.itemsize, self.counters)
        found: Array = self.gpu.cupy.ndarray((count,), kind, memptr=memory)
        return found

    def host_like(self, x: Array) -> Array:
        """Return an uninitialised NumPy array of x's shape and type."""
        return np.empty(x.shape, x.dtype)

    def upload(self, host: Array, x: Array) -> None:
        """``x = host`` on ``stream``; host may be changed as soon as this returns.

        Raises:
            ShapeError: shapes or types differ, or x's last axis is not contiguous.
        """
        if host.shape != x.shape or host.dtype != x.dtype:
            found = f"host {host.shape} {host.dtype}, x {x.shape} {x.dtype}"
            raise ShapeError(f"upload was given {found}; it takes equal shapes and types")
        self._transfers.upload(host, x)

    def fetch(self, x: Array) -> Array:
        """Return a fresh NumPy array of x's values, waiting for what computes them on ``stream``."""
        if type(x) is np.ndarray:
            return x
        out = self.host_like(x)
        self._transfers.fetch(x, out)
        return out

    # --- launches

    def _launch(
        self, name: str, T: DType, G: DType, blocks: int, *values: Any, strided: bool = False, operation: str = ""
    ) -> None:
        """Launch a kernel of kernels/ for element types T and G with these arguments, which its text names.

        ``strided``: it takes strides, or the caller has looked at them.

        Raises:
            ShapeError: an array has another element type than the kernel's, or is not contiguous (unless ``strided``).
        """
        operation = operation or name
        call, arguments = self.gpu.kernel(name, T, G, operation)
        passed = []
        for value, (parameter, dtype, convert) in zip(values, arguments, strict=True):
            if convert is not None:
                passed.append(convert(value))
                continue
            if value.dtype != dtype:
                raise ShapeError(
                    f"{operation} was given {parameter.name} of {value.dtype}; beside arrays of {T} it takes {dtype}"
                )
            if not strided and not value.flags.c_contiguous:
                raise ShapeError(
                    f"{operation} was given {parameter.name} {value.shape} with strides {value.strides}; on a GPU it "
                    "takes contiguous arrays: copy it first"
                )
            passed.append(value)
        self.gpu.use()
        with self.stream:
            call((blocks,), (BLOCK,), tuple(passed))
        self.counters.launches += 1

    @staticmethod
    def _wide(operation: str, x: Array) -> DType:
        if x.dtype not in KINDS:
            raise ShapeError(f"{operation} was given x of {x.dtype}; on a GPU it takes {KINDS_IN_WORDS}")
        return accumulator(x.dtype)

    def _grid(self, count: int) -> int:
        """Return the blocks of an elementwise kernel; it goes through the array in strides of the grid."""
        return min(blocks_of(count), self._most)

    def _temp(self, offset: int, count: int, dtype: DType) -> Any:
        """Return ``count`` elements of the scratch from byte ``offset`` on."""
        key = (offset, count, dtype)
        found = self._temporaries.get(key)
        if found is None:
            nbytes = count * dtype.itemsize
            if offset + nbytes > self._scratch.nbytes:
                raise ShapeError(
                    f"{nbytes} bytes of scratch are needed and {self._scratch.nbytes - offset} are there; rows "
                    "are too long for the GPU backend, or the work is not for a communication stream"
                )
            found = self._temporaries[key] = self._scratch[offset : offset + nbytes].view(dtype)
        return found

    def _table(self, key: Hashable, values: Array) -> Any:
        """Return an array on the device that holds ``values`` (1-D, not empty), uploaded the first time."""
        found = self._known.get(key)
        if found is None:
            nbytes = -(-values.nbytes // 256) * 256
            start, self._tables_used = self._tables_used, self._tables_used + nbytes
            room = self._tables[start : start + values.nbytes]
            if room.nbytes < values.nbytes:  # more units than TABLES was made for
                self._tables_used = start
                room = self.empty(values.nbytes, _BYTES)
                self.own_bytes += nbytes
            found = self._known[key] = room.view(values.dtype)
            self.upload(values, found)
        return found

    def _memset(self, out: Any, byte: int) -> None:
        self.gpu.use()
        self.gpu.runtime.memsetAsync(out.data.ptr, byte, out.nbytes, self.stream.ptr)
        self.counters.copies += 1

    def _within_device(self, x: Any, out: Any) -> None:
        """Copy contiguous arrays of one type."""
        if x.data.ptr == out.data.ptr:
            return
        self.gpu.use()
        kind = self.gpu.runtime.memcpyDeviceToDevice
        self.gpu.runtime.memcpyAsync(out.data.ptr, x.data.ptr, x.nbytes, kind, self.stream.ptr)
        self.counters.copies += 1

    # --- copies and fills

    def _copy(self, x: Array, out: Array) -> None:
        if not out.size:
            return
        flat = x.flags.c_contiguous and out.flags.c_contiguous
        if x.dtype == out.dtype and flat:
            self._within_device(x, out)
        elif x.dtype == out.dtype and x.dtype not in KINDS:
            self._copy_rows(x, out)
        elif flat:
            kinds, grid = (x.dtype, out.dtype), self._grid(x.size)
            self._launch("copy_cast", *kinds, grid, x, out, x.size, strided=True, operation="copy")
        else:
            shape, *steps = joined(x.shape, elements(x), elements(out))
            if len(shape) > AXES:
                for part, target in zip(x, out):
                    self._copy(part, target)
                return
            places = (*padded(shape, 1), *(step for view in steps for step in padded(view, 0)))
            kinds, grid = (x.dtype, out.dtype), self._grid(x.size)
            self._launch("copy_strided", *kinds, grid, x, out, *places, strided=True, operation="copy")

    def _copy_rows(self, x: Any, out: Any) -> None:
        """Copy views of a type that no kernel reads, as rows of bytes."""
        shape, *steps = joined(x.shape, elements(x), elements(out))
        size = x.itemsize
        if len(shape) == 1:
            shape, steps = (*shape, 1), [(*view, 1) for view in steps]
        pitches = [view[0] * size for view in steps if len(view) == 2 and view[1] == 1]
        if len(shape) == 2 and len(pitches) == 2 and shape[1] * size <= min(pitches) and max(pitches) <= _PITCH:
            self.gpu.use()
            kind = self.gpu.runtime.memcpyDeviceToDevice
            self.gpu.runtime.memcpy2DAsync(
                out.data.ptr, pitches[1], x.data.ptr, pitches[0], shape[1] * size, shape[0], kind, self.stream.ptr
            )
            self.counters.copies += 1
        elif x.ndim < 2:
            raise ShapeError(f"copy was given x {x.shape} {x.dtype} with strides {x.strides}; on a GPU they go forward")
        else:
            for part, target in zip(x, out):
                self._copy(part, target)

    def _fill(self, out: Array, value: float) -> None:
        if not out.size:
            return
        byte = _byte_of(value, out.dtype)
        if byte is not None and out.flags.c_contiguous:
            self._memset(out, byte)
        elif out.dtype not in KINDS:
            if byte is None or out.ndim < 2:
                raise ShapeError(
                    f"fill was given {value} for out {out.shape} {out.dtype} with strides {out.strides}; on a GPU "
                    "contiguous arrays of this type take 0, and numbers whose bytes are all the same"
                )
            for part in out:
                self._fill(part, value)
        else:
            shape, step = joined(out.shape, elements(out))
            if len(shape) > AXES:
                for part in out:
                    self._fill(part, value)
                return
            places = (*padded(shape, 1), *padded(step, 0))
            kind, grid = out.dtype, self._grid(out.size)
            self._launch("fill_strided", kind, kind, grid, out, value, *places, strided=True, operation="fill")


def _byte_of(value: float, dtype: DType) -> int | None:
    """Return the byte that all bytes of a number are; None where they differ, or a kernel fills."""
    if value == 0 and math.copysign(1.0, value) > 0:
        return 0
    if dtype in KINDS:
        return None
    found = set(np.array(value).astype(dtype).tobytes())
    return found.pop() if len(found) == 1 else None
