"""``cupy.cuda.compiler`` and ``Module``: kernels from CUDA text, run on the CPU, arguments checked against the text.

``cupy.RawModule`` is not offered: CuPy compiles what it is given with ``-ftz=true``, whatever the options say.


What a kernel reads and writes is what its signature says: a pointer to const is read, any other is read and written,
both within the array that was passed. A strict machine compares all device memory before and after each kernel, and
refuses one that changed anything else (a write of what was there already is not seen).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.array import kernels
from tests.standin.arguments import whole
from tests.standin.arrays import ndarray
from tests.standin.emulate import compiled
from tests.standin.errors import CUDARuntimeError
from tests.standin.machine import Access, Machine, here
from tests.standin.memory import Block, DeviceFault
from tests.standin.regions import rows_of

__all__ = ["Function", "Module", "compile_using_nvrtc"]

_MAGIC = b"stand-in"

_TYPES = {"i64": np.int64, "u64": np.uint64, "int": np.int32, "float": np.float32, "double": np.float64}


def _types(options: tuple[str, ...]) -> dict[str, Any]:
    """Return the NumPy type of each type name in the kernels' text."""
    from ml_dtypes import bfloat16

    types: dict[str, Any] = {**_TYPES, "bf16": bfloat16, "fp16": np.float16}
    macros = dict(option[2:].partition("=")[::2] for option in options if option.startswith("-D"))
    element = macros.get("ELEMENT", "float")
    types["T"] = types[element]
    types["G"] = types[macros.get("GRADIENT", element)]
    types["A"] = np.float64 if element == "double" else np.float32
    return types


def compile_using_nvrtc(
    source: str,
    options: tuple[str, ...] = (),
    arch: str | None = None,
    filename: str = "kern.cu",
    name_expressions: Any = None,
    log_stream: Any = None,
    cache_in_memory: bool = False,
    jitify: Any = None,
    method: str | None = None,
) -> tuple[bytes, None]:
    """Return "machine code", which :class:`Module` reads: the text and the options, after they were compiled."""
    if not isinstance(options, tuple) or not isinstance(source, str):
        found = f"{type(source).__name__} and {type(options).__name__}"
        raise TypeError(f"a str and a tuple are needed, {found} were given")
    if arch is not None or name_expressions is not None or jitify is not None or method is not None:
        raise DeviceFault("the stand-in offers compile_using_nvrtc(source, options, cache_in_memory=) only")
    compiled(source, options)
    return _MAGIC + json.dumps([here().device, source, options]).encode(), None


class Module:
    """The kernels of a text, loaded on the device for which it was compiled."""

    def load(self, cubin: bytes) -> None:
        """Take machine code."""
        if not isinstance(cubin, bytes):
            raise TypeError(f"Argument 'cubin' has incorrect type (expected bytes, got {type(cubin).__name__})")
        if not cubin.startswith(_MAGIC):
            raise DeviceFault("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid")
        self._device, self._code, options = json.loads(cubin[len(_MAGIC) :])
        self._options = tuple(options)
        if self._device != here().device:
            raise DeviceFault(f"code for device {self._device} is loaded on device {here().device}")

    def get_function(self, name: str) -> Function:
        """Return a kernel by its name."""
        found = [kernel for kernel in kernels.parse(self._code) if kernel.name == name]
        if not found:
            raise DeviceFault(f"CUDA_ERROR_NOT_FOUND: named symbol not found: {name}")
        return Function(found[0], _types(self._options), compiled(self._code, self._options).launch, self._device)


class Function:
    """One kernel; calling it puts it on the current stream."""

    def __init__(
        self, kernel: kernels.Kernel, types: dict[str, Any], launch: Callable[..., None], device: int
    ) -> None:
        self.name, self._kernel, self._types, self._launch = kernel.name, kernel, types, launch
        self._device = device

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        machine = here()
        work = machine.current_work(self.name)
        if work.device != machine.device or self._device != machine.device:
            raise CUDARuntimeError(400)
        for name, value in (("grid", grid), ("block", block)):
            if not isinstance(value, tuple):
                raise TypeError(f"Argument '{name}' has incorrect type (expected tuple, got {type(value).__name__})")
        blocks, threads = (tuple(max(1, whole(size)) for size in (*sizes, 1, 1)[:3]) for sizes in (grid, block))
        if blocks[1:] != (1, 1) or threads[1:] != (1, 1) or threads[0] > 1024 or blocks[0] > 2**31 - 1:
            raise CUDARuntimeError(9)
        accesses, values = self._bind(args, work.device)

        def run() -> None:
            if machine.strict:
                _watched(machine, self.name, accesses, lambda: self._launch(self.name, blocks[0], threads[0], values))
            else:
                self._launch(self.name, blocks[0], threads[0], values)

        machine.submit(work, self.name, accesses, run)

    def _bind(self, args: tuple[Any, ...], device: int) -> tuple[list[Access], list[Any]]:
        """Check the arguments; return what is touched, and what the launch passes."""
        parameters = self._kernel.parameters
        if len(args) != len(parameters):
            raise TypeError(f"kernel {self.name} takes {len(parameters)} arguments and was given {len(args)}")
        accesses: list[Access] = []
        values: list[Any] = []
        for value, parameter in zip(args, parameters):
            what, kind = f"kernel {self.name}, {parameter.name}", np.dtype(self._types[parameter.type])
            if not parameter.pointer:
                if type(value) is not kind.type:
                    raise TypeError(f"{what}: a numpy.{kind.name} is needed, {type(value).__name__} was given")
                values.append(value)
                continue
            if type(value) is not ndarray:
                raise TypeError(f"{what}: an array on the device is needed, {type(value).__name__} was given")
            if value.dtype != kind:
                raise TypeError(f"{what}: an array of {kind.name} is needed, it is {value.dtype.name}")
            if value.data.ptr % value.itemsize:
                raise DeviceFault(f"{what}: the array begins at {value.data.ptr:#x}, no multiple of its item's size")
            accesses.append(value._access(parameter.written, what, device))
            values.append(value.data.ptr)
        return accesses, values


def _watched(machine: Machine, name: str, accesses: list[Access], launch: Callable[[], None]) -> None:
    """Launch, and compare what has changed with what was to be written."""
    before = [(block, block.bytes.copy()) for block in machine.memory.live("device")]
    launch()
    machine.memory.check_guards()
    for block, old in before:
        words = block.nbytes // 8 * 8
        if np.array_equal(old[:words].view(np.uint64), block.bytes[:words].view(np.uint64)) and np.array_equal(
            old[words:], block.bytes[words:]
        ):
            continue
        changed = old != block.bytes
        for other, parts, written in accesses:
            if written and other is block:
                for low, high in rows_of(parts):
                    changed[low - block.address : high - block.address] = False
        places = np.flatnonzero(changed)
        if places.size:
            raise DeviceFault(
                f"kernel {name} changed {places.size} bytes of {block}, from byte {int(places[0])} on, "
                f"which it does not say that it writes{_read_there(accesses, block, int(places[0]))}"
            )


def _read_there(accesses: list[Access], block: Block, place: int) -> str:
    for other, parts, written in accesses:
        if other is block and not written:
            for low, high in rows_of(parts):
                if low <= block.address + place < high:
                    return " (an array that it reads through a pointer to const)"
    return ""
