"""Memory of the devices and pinned memory: host memory behind guards, filled with NaN, that only copies may read."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field

import numpy as np

__all__ = ["Block", "DeviceFault", "Memory"]

#: What device memory and pinned memory hold at first: NaN in float16, bfloat16, float32 and float64.
FRESH = 0xFF
#: Bytes on both sides of a block, and what they hold.
GUARD, GUARD_BYTE = 4096, 0xA5
#: Device memory begins at multiples of this, as cudaMalloc's does.
ALIGNMENT = 512
#: Bytes of freed memory that are kept for a while, so that no new block has the address of a freed one.
QUARANTINE = 64 * 2**20


class DeviceFault(RuntimeError):  # noqa: N818 - it is the device's
    """The program did what a device would punish, or might punish: a wrong address, type, device or kind."""


@dataclass(eq=False)
class Block:
    """One allocation, live or freed."""

    number: int
    kind: str
    device: int
    address: int
    nbytes: int
    room: np.ndarray = field(repr=False)
    label: str = ""
    freed: bool = False

    @property
    def end(self) -> int:
        return self.address + self.nbytes

    @property
    def bytes(self) -> np.ndarray:
        start = self.address - self.room.ctypes.data
        return self.room[start : start + self.nbytes]

    def damage(self) -> str:
        """Say where the guards were written; empty where they were not."""
        start = self.address - self.room.ctypes.data
        for name, guard in (("before", self.room[:start]), ("behind", self.room[start + self.nbytes :])):
            if guard.tobytes().count(GUARD_BYTE) != guard.size:
                wrong = np.flatnonzero(guard != GUARD_BYTE)
                far = start - int(wrong[-1]) if name == "before" else int(wrong[0]) + 1
                return f"{self} was written {name} its {'beginning' if name == 'before' else 'end'} (byte {far})"
        return ""

    def __str__(self) -> str:
        where = f"device {self.device}" if self.kind == "device" else "host"
        return f"{self.label or 'block'} #{self.number} ({self.kind} memory, {self.nbytes} bytes, {where})"


class Memory:
    """All blocks of one machine, by address."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[int, int] = {}
        self._live: list[tuple[int, int, Block]] = []
        self._dead: deque[Block] = deque()
        self._count = 0
        self._lock = threading.RLock()

    def allocate(self, kind: str, nbytes: int, device: int) -> Block | None:
        """Return a fresh block; None where the device has no room."""
        with self._lock:
            if kind == "device" and self.used.get(device, 0) + nbytes > self.capacity:
                return None
            room = np.full(nbytes + 2 * GUARD + ALIGNMENT, GUARD_BYTE, np.uint8)
            address = -(-(room.ctypes.data + GUARD) // ALIGNMENT) * ALIGNMENT
            self._count += 1
            block = Block(self._count, kind, device, address, nbytes, room)
            block.bytes[:] = FRESH
            insort(self._live, (address, block.number, block))
            if kind == "device":
                self.used[device] = self.used.get(device, 0) + nbytes
            return block

    def free(self, block: Block) -> None:
        with self._lock:
            if damage := block.damage():
                raise DeviceFault(damage)
            block.freed = True
            self._live.remove((block.address, block.number, block))
            if block.kind == "device":
                self.used[block.device] -= block.nbytes
            block.bytes[:] = FRESH
            self._dead.append(block)
            while sum(dead.nbytes for dead in self._dead) > QUARANTINE:
                self._dead.popleft()

    def at(self, address: int) -> Block | None:
        """Return the live block that holds the address (its end included)."""
        with self._lock:
            index = bisect_right(self._live, (address, 1 << 62)) - 1
            block = self._live[index][2] if index >= 0 else None
        return block if block is not None and address <= block.end else None

    def find(self, address: int, nbytes: int, what: str, kind: str = "", device: int | None = None) -> Block:
        """Return the live block that holds the range.

        Raises:
            DeviceFault: there is none, or it is of another kind or device.
        """
        block = self.at(address)
        if block is None or address + nbytes > block.end:
            dead = next((d for d in reversed(self._dead) if d.address <= address < max(d.end, d.address + 1)), None)
            found = f"ends {address + nbytes - block.end} bytes behind {block}" if block else "is no memory of ours"
            if block is None and dead is not None:
                found = f"lies in {dead}, which was freed"
            raise DeviceFault(f"{what}: the range of {nbytes} bytes at {address:#x} {found}")
        if kind and block.kind != kind:
            raise DeviceFault(f"{what}: {kind} memory is needed, {address:#x} lies in {block}")
        if device is not None and block.kind == "device" and block.device != device:
            raise DeviceFault(f"{what}: memory of device {device} is needed, {address:#x} lies in {block}")
        return block

    def live(self, kind: str = "") -> list[Block]:
        with self._lock:
            return [block for _, _, block in self._live if not kind or block.kind == kind]

    def check_guards(self) -> None:
        """Raise a DeviceFault where something was written beside a live block."""
        for block in self.live():
            if damage := block.damage():
                raise DeviceFault(damage)
