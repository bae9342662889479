"""``cupy.cuda.runtime``: memory, copies, devices."""

from __future__ import annotations

import ctypes
from typing import Any

from tests.standin.arguments import address, count, whole
from tests.standin.errors import CUDARuntimeError
from tests.standin.machine import Access, Machine, here
from tests.standin.memory import DeviceFault
from tests.standin.regions import matrix, one, overlap

__all__ = [
    "CUDA_R_16BF",
    "CUDA_R_16F",
    "CUDA_R_32F",
    "CUDA_R_64F",
    "CUDARuntimeError",
    "driverGetVersion",
    "free",
    "freeHost",
    "getDevice",
    "getDeviceCount",
    "getDeviceProperties",
    "hostAlloc",
    "malloc",
    "memcpy2DAsync",
    "memcpyAsync",
    "memcpyDeviceToDevice",
    "memcpyDeviceToHost",
    "memcpyHostToDevice",
    "memsetAsync",
    "runtimeGetVersion",
    "setDevice",
]

memcpyHostToDevice = 1  # noqa: N816 - CuPy's names, here and below
memcpyDeviceToHost = 2  # noqa: N816
memcpyDeviceToDevice = 3  # noqa: N816
CUDA_R_32F, CUDA_R_64F, CUDA_R_16F, CUDA_R_16BF = 0, 1, 2, 14

#: Bytes that the rows of a copy may lie apart, on every GPU.
MAX_PITCH = 2**31 - 1

#: kind -> (kind of the destination, kind of the source, name)
_KINDS = {
    1: ("device", "pinned", "copy host to device"),
    2: ("pinned", "device", "copy device to host"),
    3: ("device", "device", "copy device to device"),
}


def malloc(size: int) -> int:
    machine = here()
    if count(size) == 0:
        return 0
    block = machine.memory.allocate("device", count(size), machine.device)
    if block is None:
        raise CUDARuntimeError(2)
    if machine.trace is not None:
        machine.trace.allocated(block)
    return block.address


def free(ptr: int) -> None:
    _free(ptr, "device")


def _free(ptr: int, kind: str) -> None:
    machine = here()
    if address(ptr) == 0:
        return
    block = machine.memory.at(address(ptr))
    if block is None or block.address != ptr or block.kind != kind:
        raise CUDARuntimeError(1)
    if machine.trace is not None:
        machine.trace.freed(block)
    machine.memory.free(block)


def hostAlloc(size: int, flags: int) -> int:  # noqa: N802
    if whole(flags):
        raise DeviceFault(f"hostAlloc with flags {flags}: the stand-in offers 0")
    machine = here()
    block = machine.memory.allocate("pinned", count(size), -1)
    if block is None:
        raise CUDARuntimeError(2)
    if machine.trace is not None:
        machine.trace.allocated(block)
    return block.address


def freeHost(ptr: int) -> None:  # noqa: N802
    """Unlike the real one it waits for nothing: who frees has to."""
    _free(ptr, "pinned")


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
    _copy(dst, src, count(size), kind, stream, count(size), 1, count(size), count(size))


def memcpy2DAsync(  # noqa: N802
    dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int, stream: int
) -> None:
    wide, high, dpitch, spitch = count(width), count(height), count(dpitch), count(spitch)
    if wide > dpitch or wide > spitch or max(dpitch, spitch) > MAX_PITCH:
        raise CUDARuntimeError(12)
    _copy(dst, src, wide * high, kind, stream, wide, high, dpitch, spitch)


def _copy(
    dst: int, src: int, size: int, kind: int, stream: int, width: int, height: int, dpitch: int, spitch: int
) -> None:
    machine = here()
    dst, src, work = address(dst), address(src), machine.work(address(stream), "a copy")
    if whole(kind) not in _KINDS:
        raise CUDARuntimeError(21)
    to, frm, name = _KINDS[kind]
    if size == 0:
        return
    target = machine.memory.find(dst, dpitch * (height - 1) + width, f"{name}, destination", to, work.device)
    source = machine.memory.find(src, spitch * (height - 1) + width, f"{name}, source", frm, work.device)
    written, read = matrix(dst, height, width, dpitch), matrix(src, height, width, spitch)
    if source is target and overlap(written, read):
        raise DeviceFault(f"{name}: source and destination overlap")

    def run() -> None:
        for row in range(height):
            ctypes.memmove(dst + row * dpitch, src + row * spitch, width)
        if to == "pinned" and machine.trace is not None:
            machine.trace.looked(target, written)

    if frm == "pinned" and machine.trace is not None:
        machine.trace.host_wrote(source, read)
    accesses: list[Access] = [(source, read, False), (target, written, True)]
    machine.submit(work, name, accesses, run)


def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:  # noqa: N802
    machine = here()
    work = machine.work(address(stream), "memset")
    ptr, size, byte = address(ptr), count(size), whole(value) & 0xFF
    if size:
        block = machine.memory.find(ptr, size, "memset", "device", work.device)
        machine.submit(work, "memset", [(block, one(ptr, size), True)], lambda: _set(ptr, byte, size))


def _set(ptr: int, byte: int, size: int) -> None:
    ctypes.memset(ptr, byte, size)


def getDeviceCount() -> int:  # noqa: N802
    if not here().devices:
        raise CUDARuntimeError(100)
    return here().devices


def getDevice() -> int:  # noqa: N802
    return here().device


def setDevice(device: int) -> None:  # noqa: N802
    machine: Machine = here()
    if not 0 <= whole(device) < machine.devices:
        raise CUDARuntimeError(101)
    machine.device = whole(device)


def getDeviceProperties(device: int) -> dict[str, Any]:  # noqa: N802
    machine = here()
    if not 0 <= whole(device) < machine.devices:
        raise CUDARuntimeError(101)
    return {
        "name": b"Stand-in",
        "totalGlobalMem": machine.memory.capacity,
        "sharedMemPerBlock": 49152,
        "warpSize": 32,
        "maxThreadsPerBlock": 1024,
        "multiProcessorCount": 4,
        "major": 9,
        "minor": 0,
        "pciBusID": whole(device) + 1,
        "pciDeviceID": 0,
        "pciDomainID": 0,
    }


def driverGetVersion() -> int:  # noqa: N802
    return 12090


def runtimeGetVersion() -> int:  # noqa: N802
    return 12090

