"""Page-locked host memory beside a device's arrays, and the copies between the two.

A backend whose arrays are on a device answers :meth:`~mpishard.array.backend.Backend.pinned_host` with one; others have
nothing to copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from mpishard.array.dtypes import Array, DType
from mpishard.array.ops import Ops
from mpishard.errors import ArenaError

__all__ = ["SLOTS", "Pairs", "PinnedHost"]

#: Device buffers that copies take turns in: while one is copied in or out, the other is worked on.
SLOTS = 2
_BYTES = np.dtype(np.uint8)
#: (host array, device array), contiguous and of one size and type
Pairs: TypeAlias = "Sequence[tuple[Array, Array]]"


class PinnedHost(ABC):
    """Arrays in host memory that a device copies from and to by itself.

    Args:
        ops: the operations on these arrays.
    """

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        #: bytes given out by :meth:`reserve`
        self.nbytes = 0
        self._block: Array | None = None

    def take(self, nbytes: int) -> None:
        """Take the memory, once.

        Raises:
            MemoryError: it cannot be had.
        """
        self._block = self._allocate(nbytes)

    def reserve(self, count: int, dtype: DType) -> Array:
        """Return a 1-D array at a multiple of 64 bytes, of what was taken.

        Raises:
            ArenaError: less was taken.
        """
        start, nbytes = self.nbytes, count * dtype.itemsize
        self.nbytes = -(-(start + nbytes) // 64) * 64
        if self._block is None:
            return self._allocate(nbytes).view(dtype)
        if self.nbytes > self._block.size:
            raise ArenaError(f"pinned host memory: {self.nbytes} bytes are needed and {self._block.size} were planned")
        array: Array = self._block[start : start + nbytes].view(dtype)
        return array

    @abstractmethod
    def _allocate(self, nbytes: int) -> Array:
        """Return fresh memory as bytes."""

    @abstractmethod
    def copy_in(self, slot: int, pairs: Pairs) -> None:
        """Copy host arrays to the device arrays of a slot.

        The copy waits for the last :meth:`copy_out` of the slot; what the device's operations do from here on waits for
        the copy. The host waits for neither.
        """

    @abstractmethod
    def copy_out(self, slot: int, pairs: Pairs) -> None:
        """Copy device arrays of a slot to host arrays, behind what the device's operations have been given to do."""

    @abstractmethod
    def settle(self) -> None:
        """Return when no copy is under way: the host may read and write the arrays."""
