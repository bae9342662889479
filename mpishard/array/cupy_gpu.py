"""One GPU as the operations use it: its memory, its compiled kernels, and counts of what was asked of it.

[Note: streams and threads]
CuPy launches on the current stream and device of the calling *thread*. So every launch stands in a ``with stream:``
block after :meth:`Gpu.use`, and any thread may work on any device.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mpishard.array.cupy_compile import loaded
from mpishard.array.dtypes import DTYPES, DType, accumulator, name_of
from mpishard.array.kernels import KERNELS, Parameter, type_pairs
from mpishard.errors import ShapeError

__all__ = ["ALIGNMENT", "KINDS", "KINDS_IN_WORDS", "Argument", "Compiled", "Counters", "Gpu"]

ALIGNMENT = 256  # bytes; cudaMalloc gives no less
#: Element types that kernels compute with.
KINDS: tuple[DType, ...] = tuple(DTYPES[name] for name in ("float32", "float64", "bfloat16", "float16"))
KINDS_IN_WORDS = "float32, float64, bfloat16 or float16"
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_PLAIN: dict[str, DType] = {
    "i64": np.dtype(np.int64),
    "u64": np.dtype(np.uint64),
    "int": np.dtype(np.int32),
    "double": np.dtype(np.float64),
}
#: Sizes and strides come again at every step. Floats are not kept: 0.0 and -0.0 are one key.
_CONVERT: dict[DType, Callable[[Any], Any]] = {
    _PLAIN[name]: lru_cache(maxsize=4096)(_PLAIN[name].type) for name in ("i64", "u64", "int")
}


@dataclass
class Counters:
    """What was asked of the GPU since the last :meth:`reset`.

    ``launches`` are kernels and matrix products, ``copies`` asynchronous copies and fills of bytes, ``waits``
    the times that the host waited for the GPU.
    """

    launches: int = 0
    copies: int = 0
    waits: int = 0
    allocations: int = 0
    allocated_bytes: int = 0

    def reset(self) -> None:
        """Count from zero."""
        self.launches = self.copies = self.waits = self.allocations = self.allocated_bytes = 0


class Argument(NamedTuple):
    """How one argument of a kernel is checked (pointers: ``dtype`` of the elements) or converted (scalars)."""

    parameter: Parameter
    dtype: DType
    convert: Callable[[Any], Any] | None


class Compiled(NamedTuple):
    """A kernel for one pair of element types."""

    call: Callable[[tuple[int], tuple[int], tuple[Any, ...]], None]
    arguments: tuple[Argument, ...]


class _Allocation:
    """Owner of memory of cudaMalloc: freed with the last array that lies in it."""

    __slots__ = ("_runtime", "ptr")

    def __init__(self, runtime: Any, nbytes: int) -> None:
        self.ptr = 0
        self._runtime = runtime
        self.ptr = runtime.malloc(nbytes)

    def __del__(self) -> None:
        # Not while the process ends: cudaFree waits for the device, which may wait for a rank that is gone.
        if self.ptr and not sys.is_finalizing():
            with contextlib.suppress(Exception):  # after a fault of the device nothing can be freed any more
                self._runtime.free(self.ptr)


class Gpu:
    """One device, shared by the operations of all its streams.

    Args:
        index: among the devices that this process sees.
        tf32: let matrix products of fp32 round their factors to TF32.
    """

    def __init__(self, index: int = 0, *, tf32: bool = False) -> None:
        import cupy

        self.cupy: Any = cupy
        self.runtime: Any = cupy.cuda.runtime
        self.index, self.tf32 = index, tf32
        self.use()
        properties = self.runtime.getDeviceProperties(index)
        name = properties["name"]
        self.name: str = name.decode() if isinstance(name, bytes) else name
        self.processors = int(properties["multiProcessorCount"])
        #: compute capability times ten: 80 for A100, 90 for H100 and H200
        self.capability = int(cupy.cuda.Device(index).compute_capability)
        self._compiled: dict[tuple[str, DType, DType], Compiled] = {}

    def use(self) -> None:
        """Make this the calling thread's device."""
        if self.runtime.getDevice() != self.index:
            self.runtime.setDevice(self.index)

    def allocate(self, nbytes: int, counters: Counters) -> Any:
        """Return a pointer to fresh memory of cudaMalloc, never of CuPy's pool, which would keep what is freed.

        Raises:
            MemoryError: the device has no room.
        """
        self.use()
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        cuda = self.cupy.cuda
        try:
            owner = _Allocation(self.runtime, size)
        except self.runtime.CUDARuntimeError as error:
            if error.status != _OUT_OF_MEMORY:
                raise
            free, total = cuda.Device(self.index).mem_info
            raise MemoryError(
                f"{size} bytes were asked of {self.name} (device {self.index}), which has {free} of {total} bytes "
                "free; use a smaller model or batch or more ranks, or see with nvidia-smi who else uses it"
            ) from None
        counters.allocations += 1
        counters.allocated_bytes += size
        return cuda.MemoryPointer(cuda.UnownedMemory(owner.ptr, size, owner), 0)

    def kernel(self, name: str, T: DType, G: DType, operation: str) -> Compiled:
        """Return a kernel for element types T and G, compiled at its first use.

        Raises:
            ShapeError: there is no such kernel for these types; ``operation`` is named.
        """
        found = self._compiled.get((name, T, G))
        if found is None:
            found = self._compiled[name, T, G] = self._compile(name, T, G, operation)
        return found

    def _compile(self, name: str, T: DType, G: DType, operation: str) -> Compiled:
        kernel = KERNELS[name]
        pairs = type_pairs(kernel.file)
        if T not in KINDS or G not in KINDS or (name_of(T), name_of(G)) not in pairs:
            found = str(T) if T == G else f"{T} and {G}"
            *first, last = dict.fromkeys(t for t, _ in pairs)
            plain = f"{', '.join(first)} or {last}"
            mixed = ", ".join(f"{t} with {g}" for t, g in pairs if t != g)
            takes = plain + (f", and of two types {mixed}" if mixed else "")
            raise ShapeError(f"{operation} was given arrays of {found}; on a GPU it takes {takes}")
        self.use()  # for which it is compiled and where it is loaded
        module = loaded(self.cupy, self.index, kernel.file, T, G)
        types = {"T": T, "G": G, "A": accumulator(T)} | _PLAIN
        arguments = [
            Argument(p, types[p.type], None if p.pointer else _CONVERT.get(types[p.type], types[p.type].type))
            for p in kernel.parameters
        ]
        return Compiled(module.get_function(name), tuple(arguments))
