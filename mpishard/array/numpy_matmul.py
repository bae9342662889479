"""Matrix products of 16-bit arrays in blocks of float32.

BLAS computes in float32 or float64 alone. A block of each factor is read into float32, multiplied there and added to
the products of the blocks before it along the inner dimension; the sum is rounded once. The blocks are large enough
for BLAS to be near its best and small enough to stay in the cache; their borders depend on shapes alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpishard.array.dtypes import Array

__all__ = ["product_of_narrow"]

_SIDE = 512  # of a square block


def product_of_narrow(a: Array, b: Array, out: Array, add: bool, scratch: Sequence[Array]) -> None:
    """``out (+)= a @ b`` as :meth:`~mpishard.array.ops.Ops.matmul`; scratch: four float32 arrays of one size."""
    if not out.size:
        return
    if out.ndim == 2:
        a, b, out = a[None], b[None], out[None]
    if out.ndim > 3:
        for part in zip(a, b, out, strict=True):
            product_of_narrow(*part, add, scratch)
        return
    count, rows, columns = out.shape
    inner = a.shape[2]
    n, k, m = _sides(rows, inner, columns, scratch[0].size)
    several = max(1, scratch[0].size // max(n * k, k * m, n * m)) if (n, k, m) == (rows, inner, columns) else 1
    for g in range(0, count, several):
        some = slice(g, g + several)
        for i in range(0, rows, n):
            for j in range(0, columns, m):
                here = (some, slice(i, i + n), slice(j, j + m))
                _block(a[here[:2]], b[some, :, here[2]], out[here], add, k, scratch)


def _sides(rows: int, inner: int, columns: int, room: int) -> tuple[int, int, int]:
    """Rows, inner dimension and columns of a block, so that no two of them make more than ``room`` elements.

    What a short side leaves goes to the inner dimension first, whose blocks are added up, then to the others.
    """
    n, k, m = min(rows, _SIDE), max(1, min(inner, _SIDE)), min(columns, _SIDE)
    k = max(1, min(inner, room // max(n, m)))
    n = min(rows, room // max(k, m))
    m = min(columns, room // max(n, k))
    return n, k, m


def _block(a: Array, b: Array, out: Array, add: bool, k: int, scratch: Sequence[Array]) -> None:
    """A block of out (G, N, M) from all of a (G, N, K) and b (G, K, M), ``k`` of K at a time."""
    total, product = (flat[: out.size].reshape(out.shape) for flat in scratch[2:])
    for start in range(0, max(1, a.shape[2]), k):
        inner = slice(start, start + k)
        wide_a, wide_b = _widened(a[:, :, inner], scratch[0]), _widened(b[:, inner], scratch[1])
        if start == 0:
            np.matmul(wide_a, wide_b, out=total)
        else:
            np.matmul(wide_a, wide_b, out=product)
            np.add(total, product, out=total)
    if add:
        np.copyto(product, out)
        np.add(product, total, out=total)
    np.copyto(out, total, casting="same_kind")


def _widened(x: Array, flat: Array) -> Array:
    """x (G, I, J) in float32, with the memory order of its two last axes: BLAS takes either."""
    count, rows, columns = x.shape
    wide: Array = flat[: x.size]
    if abs(x.strides[1]) < abs(x.strides[2]):
        wide = wide.reshape(count, columns, rows).swapaxes(1, 2)
    else:
        wide = wide.reshape(x.shape)
    np.copyto(wide, x)
    return wide
