"""What NumPy's operations stand on: scratch, tiles, aligned memory.

[Note: tiles]
Elementwise work goes through its arrays in tiles that stay in the cache, with temporaries in this object's
own scratch. So nothing large is allocated, and a long chain of NumPy calls costs memory traffic once.
Tile borders depend on shapes alone, never on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpishard.array.dtypes import Array, DType
from mpishard.array.ops import Ops
from mpishard.errors import ShapeError

__all__ = ["SCRATCH", "TILE", "NumpyTiles", "aligned"]

TILE = 16384  # elements
SCRATCH = 1 << 20  # bytes: six tiles of float64


def aligned(count: int, dtype: DType) -> Array:
    """Return an uninitialised 1-D array that starts at a multiple of 64 bytes."""
    nbytes = count * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    offset = -raw.__array_interface__["data"][0] % 64
    view: Array = raw[offset : offset + nbytes].view(dtype)
    return view


class NumpyTiles(Ops):
    """Scratch for one thread: it is overwritten by the next operation."""

    own_bytes = SCRATCH

    def __init__(self) -> None:
        self._scratch = aligned(SCRATCH, np.dtype(np.uint8))
        self._temporaries: dict[tuple[int, DType, int], list[Array]] = {}
        self._masks: dict[int, Array] = {}

    def empty(self, count: int, dtype: DType) -> Array:
        """Return an uninitialised 1-D array that starts at a multiple of 64 bytes."""
        return aligned(count, dtype)

    def _temps(self, size: int, dtype: DType, number: int) -> list[Array]:
        """Views of the scratch: ``number`` arrays of ``size`` elements, overwritten by the next operation."""
        key = (size, dtype, number)
        found = self._temporaries.get(key)
        if found is None:
            stride = -(-size * dtype.itemsize // 64) * 64
            if stride * number > SCRATCH:
                raise ShapeError(f"a row of {size} elements is longer than the CPU backend's tiles allow")
            found = [
                self._scratch[i * stride : i * stride + size * dtype.itemsize].view(dtype) for i in range(number)
            ]
            self._temporaries[key] = found
        return found

    @staticmethod
    def _tiles(count: int, size: int = TILE) -> Iterator[slice]:
        for start in range(0, count, size):
            yield slice(start, min(start + size, count))
