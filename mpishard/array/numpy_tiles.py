"""What NumPy's operations stand on: scratch, tiles, aligned memory.

[Note: tiles]
Elementwise work goes through its arrays in tiles that stay in the cache, with temporaries in this object's
own scratch. So nothing large is allocated, and a long chain of NumPy calls costs memory traffic once.
Tile borders depend on shapes alone, never on the number of ranks.

[Note: sixteen bits]
Arrays of bfloat16 and float16 are read in blocks into float32, computed on there, and rounded once to the type of
the output. The blocks lie in a second scratch, taken by ``prepare`` or by the first operation on such an array. The
end of the first one is the conversions' own (:mod:`mpishard.array.numpy_halves`), unless temporaries fill it: those of
an operation are not needed when it reads its arguments, nor any more when it writes its result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mpishard.array.dtypes import DTYPES, Array, DType
from mpishard.array.numpy_halves import HALF_BYTES, narrow_halves, widen_halves
from mpishard.array.ops import Ops
from mpishard.errors import ShapeError

__all__ = ["BLOCK", "SCRATCH", "TILE", "WIDE", "NumpyTiles", "aligned", "pieces"]

TILE = 16384  # elements
SCRATCH = 1 << 20  # bytes: six tiles of float64
WIDE = 1 << 22  # bytes of a backend's scratch for blocks of 16-bit arrays: four matrices of BLOCK elements in float32
BLOCK = WIDE // 16  # elements
_FEW = 1024  # elements that NumPy reads sooner by itself
_FLOAT16, _FLOAT32 = DTYPES["float16"], DTYPES["float32"]


def aligned(count: int, dtype: DType) -> Array:
    """Return an uninitialised 1-D array that starts at a multiple of 64 bytes."""
    nbytes = count * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    offset = -raw.__array_interface__["data"][0] % 64
    view: Array = raw[offset : offset + nbytes].view(dtype)
    return view


def pieces(shape: tuple[int, ...], limit: int = TILE) -> Iterator[tuple[int | slice, ...]]:
    """Cut an array into parts of at most ``limit`` elements; yield an index of its leading axes for each."""
    inner = math.prod(shape[1:])
    if not shape or shape[0] * inner <= limit:
        yield ()
    elif inner <= limit:
        step = limit // inner
        for start in range(0, shape[0], step):
            yield (slice(start, min(start + step, shape[0])),)
    else:
        for i in range(shape[0]):
            for rest in pieces(shape[1:], limit):
                yield (i, *rest)


class NumpyTiles(Ops):
    """Scratch for one thread: it is overwritten by the next operation."""

    own_bytes = SCRATCH

    def __init__(self) -> None:
        self._scratch = aligned(SCRATCH, np.dtype(np.uint8))
        self._halves = self._scratch[-HALF_BYTES * TILE :]
        self._wide = aligned(0, np.dtype(np.float32))
        self._temporaries: dict[tuple[int, DType, int], list[Array]] = {}

    def prepare(self, kind: DType) -> None:
        """Take the second scratch where ``kind`` has 16 bits; ``own_bytes`` grows by WIDE then."""
        if kind.itemsize == 2 and kind.kind not in "iu" and not self._wide.size:
            self._wide = aligned(WIDE // 4, np.dtype(np.float32))
            self.own_bytes = SCRATCH + WIDE

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

    def _wides(self, *sizes: int) -> list[Array]:
        """Views of the second scratch: float32 arrays of these sizes, overwritten by the next operation."""
        if not self._wide.size:
            self.prepare(np.dtype(np.float16))
        found, start = [], 0
        for size in sizes:
            found.append(self._wide[start : start + size])
            start += -(-size // 16) * 16
        if start > self._wide.size:
            raise ShapeError(f"a row of {max(sizes)} elements is longer than the CPU backend's tiles allow")
        return found

    def _widen(self, x: Array, out: Array) -> None:
        """``out = x``, of one shape; out has x's type or one that holds all its values, and is contiguous."""
        if x.dtype != _FLOAT16 or out.dtype != _FLOAT32 or x.size < _FEW:
            np.copyto(out, x)
            return
        if x.flags.c_contiguous:
            x, out = x.reshape(-1), out.reshape(-1)
        for here in pieces(x.shape):
            widen_halves(x[here + (...,)], out[here + (...,)], self._halves)

    def _round(self, wide: Array, out: Array) -> None:
        """``out = wide``, of one shape and any strides, rounded to nearest, ties to even."""
        if out.dtype != _FLOAT16 or wide.dtype != _FLOAT32:
            np.copyto(out, wide, casting="same_kind")
            return
        if wide.flags.c_contiguous and out.flags.c_contiguous:
            wide, out = wide.reshape(-1), out.reshape(-1)
        for here in pieces(wide.shape):
            narrow_halves(wide[here + (...,)], out[here + (...,)], self._halves)

    @staticmethod
    def _tiles(count: int, size: int = TILE) -> Iterator[slice]:
        for start in range(0, count, size):
            yield slice(start, min(start + size, count))
