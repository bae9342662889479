"""``cupy.ndarray`` and what its memory is made of. Views only: no arithmetic, no conversion, no hidden copy."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from ctypes import c_char
from typing import Any, NoReturn

import numpy as np

from tests.standin.arguments import address, count
from tests.standin.errors import CUDARuntimeError
from tests.standin.machine import Access, here
from tests.standin.memory import Block, DeviceFault
from tests.standin.regions import moved, pieces

__all__ = ["MemoryPointer", "UnownedMemory", "alloc_pinned_memory", "ndarray"]

_IMPLICIT = (
    "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array explicitly."
)


class UnownedMemory:
    """Device memory that somebody else holds; it must be live when this is made."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self._owner = address(ptr), count(size), owner
        block = here().memory.find(self.ptr, self.size, "UnownedMemory", "device")
        if device_id >= 0 and device_id != block.device:
            raise DeviceFault(f"UnownedMemory: device {device_id} was named, {self.ptr:#x} lies in {block}")
        self.device_id = block.device
        self._block = block


class MemoryPointer:
    """A place in memory."""

    def __init__(self, mem: UnownedMemory, offset: int) -> None:
        if not isinstance(mem, UnownedMemory):
            raise TypeError(
                f"Argument 'mem' has incorrect type (expected cupy.cuda.memory.BaseMemory, got {type(mem).__name__})"
            )
        offset = count(offset)
        if offset > mem.size:
            raise DeviceFault(f"MemoryPointer: offset {offset} is behind the end of {mem.size} bytes")
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id


class _Flags:
    def __init__(self, c_contiguous: bool) -> None:
        self.c_contiguous = c_contiguous


def _refused(name: str, why: str) -> Any:
    def method(self: ndarray, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"{name} of an array on the device: {why}")

    return method


class ndarray:  # noqa: N801 - CuPy's name
    """A strided view of device memory."""

    __slots__ = ("__weakref__", "_host", "data", "flags")

    def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"):
        if memptr is None:
            raise DeviceFault("ndarray without memptr allocates from CuPy's pool, which the stand-in does not offer")
        if not isinstance(memptr, MemoryPointer):
            raise TypeError(f"Cannot convert {type(memptr).__name__} to cupy.cuda.memory.MemoryPointer")
        if order != "C":
            raise DeviceFault(f"the stand-in offers order 'C' only, {order!r} was asked for")
        block = memptr.mem._block
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        try:
            self._wrap(np.ndarray(shape, dtype, block.bytes, memptr.ptr - block.address, strides), memptr.mem)
        except (TypeError, ValueError) as error:
            raise DeviceFault(f"ndarray {shape} {np.dtype(dtype)} in {block}: {error}") from None
        self._inside(memptr.mem)

    def _wrap(self, host: np.ndarray, mem: UnownedMemory) -> ndarray:
        self._host = host
        self.flags = _Flags(host.flags.c_contiguous)
        self.data = object.__new__(MemoryPointer)
        self.data.mem, self.data.ptr, self.data.device_id = mem, host.ctypes.data, mem.device_id
        return self

    def _inside(self, mem: UnownedMemory) -> None:
        for low, high, _, _ in self._pieces():
            if low < mem.ptr or high > mem.ptr + mem.size:
                raise DeviceFault(f"ndarray {self.shape} {self.dtype} reaches outside its memory of {mem.size} bytes")

    def _view(self, host: np.ndarray) -> ndarray:
        return object.__new__(ndarray)._wrap(host, self.data.mem)

    def _pieces(self) -> Any:
        return moved(pieces(self.shape, self.strides, self.itemsize), self.data.ptr)

    def _access(self, written: bool, what: str, device: int) -> Access:
        """Check that the memory is there and belongs to the device; say what is touched."""
        block: Block = self.data.mem._block
        if block.freed:
            raise DeviceFault(f"{what}: the array {self.shape} {self.dtype} lies in {block}, which was freed")
        if block.device != device:
            raise DeviceFault(f"{what}: an array on device {device} is needed, this one lies in {block}")
        return block, self._pieces(), written

    shape = property(lambda self: self._host.shape)
    dtype = property(lambda self: self._host.dtype)
    strides = property(lambda self: self._host.strides)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    ndim = property(lambda self: self._host.ndim)
    T = property(lambda self: self._view(self._host.T))

    def swapaxes(self, axis1: int, axis2: int) -> ndarray:
        try:
            return self._view(self._host.swapaxes(axis1, axis2))
        except np.exceptions.AxisError:
            raise ValueError("Axis out of range") from None

    def view(self, dtype: Any = None) -> ndarray:
        return self._view(self._host.view() if dtype is None else self._host.view(dtype))

    def reshape(self, *shape: Any) -> ndarray:
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        host = self._host.reshape(wanted)
        if host.size and not np.may_share_memory(host, self._host):
            raise DeviceFault(f"reshape of {self.shape} with strides {self.strides} to {wanted} is a hidden copy")
        return self._view(host)

    def __getitem__(self, key: Any) -> ndarray:
        parts = key if isinstance(key, tuple) else (key,)
        for part in parts:
            plain = part is None or part is Ellipsis or isinstance(part, (int, np.integer, slice))
            if not plain or isinstance(part, bool):
                raise DeviceFault(f"an index of {type(part).__name__} is a hidden kernel; integers and slices are none")
        # NumPy gives a scalar for an array of no axes where there is no ellipsis.
        return self._view(self._host[parts if any(part is Ellipsis for part in parts) else (*parts, ...)])

    def __iter__(self) -> Iterator[ndarray]:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(self.shape[0]))

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of unsized object")
        return int(self.shape[0])

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        stream = here().current()
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "version": 3,
            "strides": None if self.flags.c_contiguous else self.strides,
            "data": (self.data.ptr if self.size else 0, False),
            "stream": stream.ptr if stream is not None and stream.ptr else 1,
        }

    __array__ = _refused("conversion", _IMPLICIT)
    __array_ufunc__ = _refused("a NumPy function", "it is a hidden kernel or conversion")
    __array_function__ = _refused("a NumPy function", "it is a hidden kernel or conversion")
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<standin ndarray {self.shape} {self.dtype} at {self.data.ptr:#x}>"


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
for _name in (
    *("bool", "int", "float", "complex", "index", "setitem", "contains", "eq", "ne", "lt", "le", "gt", "ge"),
    *("neg", "pos", "abs", "invert"),
    *(prefix + name for name in _BINARY for prefix in ("", "r", "i")),
):
    setattr(ndarray, f"__{_name}__", _refused(f"__{_name}__", "it is a hidden kernel or a hidden copy to the host"))


def _given_back(block: Block) -> None:
    machine = here_or_none()
    if machine is not None and machine.memory.at(block.address) is block:
        if machine.trace is not None:
            machine.trace.freed(block)
        machine.memory.free(block)


def here_or_none() -> Any:
    try:
        return here()
    except DeviceFault:
        return None


def alloc_pinned_memory(size: int) -> Any:
    """Return pinned host memory: a buffer of ``size`` bytes rounded up to 512, with ``ptr``.

    CuPy gives it back to a pool when the last reference to it goes, whether or not a copy is in flight; so the record
    takes that as a write to all of it.
    """
    machine = here()
    room = max(512, -(-address(size) // 512) * 512)
    block = machine.memory.allocate("pinned", room, -1)
    if block is None:
        raise CUDARuntimeError(2)
    # Before Python 3.12 a class gets the buffer protocol only from one that has it in C.
    members = {
        "ptr": block.address,
        "_block": block,
        "__len__": _unoffered,
        "__getitem__": _unoffered,
        "__setitem__": _unoffered,
    }
    made = type("PinnedMemoryPointer", (c_char * room,), members).from_address(block.address)
    weakref.finalize(made, _given_back, block).atexit = False
    return made


def _unoffered(self: Any, *args: Any) -> NoReturn:
    raise TypeError("PinnedMemoryPointer is a buffer: np.frombuffer(memory, dtype, count)")
