"""Matrix products of 16-bit arrays in blocks of float32.

BLAS computes in float32 or float64 alone. A block of each factor is read into float32, multiplied there and added to
the products of the blocks before it along the inner dimension; the sum is rounded once. The blocks are large enough
for BLAS to be near its best and small enough to stay in the cache; their borders depend on shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from mpishard.array.dtypes import Array

__all__ = ["product_of_narrow"]

_SIDE = 512  # of a square block
#: ``convert(x, out)``: out = x, in another type
_Convert: TypeAlias = Callable[[Array, Array], None]


def product_of_narrow(
    a: Array, b: Array, out: Array, add: bool, scratch: Sequence[Array], widen: _Convert, round_to: _Convert
) -> None:
    """``out (+)= a @ b`` as :meth:`~mpishard.array.ops.Ops.matmul`.

    Args:
        a, b, out, add: as there.
        scratch: four float32 arrays of one size.
        widen: reads 16 bits into a contiguous float32 array of the same shape.
        round_to: writes float32 to an array of out's type, of the same shape and any strides.
    """
    if not out.size:
        return
    if out.ndim == 2:
        a, b, out = a[None], b[None], out[None]
    if out.ndim > 3:
        for part in zip(a, b, out, strict=True):
            product_of_narrow(*part, add, scratch, widen, round_to)
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
                _block(a[here[:2]], b[some, :, here[2]], out[here], add, k, scratch, widen, round_to)


def _sides(rows: int, inner: int, columns: int, room: int) -> tuple[int, int, int]:
    """Rows, inner dimension and columns of a block, so that no two of them make more than ``room`` elements.

    What a short side leaves goes to the inner dimension first, whose blocks are added up, then to the others.
    """
    n, k, m = min(rows, _SIDE), max(1, min(inner, _SIDE)), min(columns, _SIDE)
    k = max(1, min(inner, room // max(n, m)))
    n = min(rows, room // max(k, m))
    m = min(columns, room // max(n, k))
    return n, k, m


def _block(
    a: Array,
    b: Array,
    out: Array,
    add: bool,
    k: int,
    scratch: Sequence[Array],
    widen: _Convert,
    round_to: _Convert,
) -> None:
    """A block of out (G, N, M) from all of a (G, N, K) and b (G, K, M), ``k`` of K at a time."""
    total, product = (flat[: out.size].reshape(out.shape) for flat in scratch[2:])
    for start in range(0, max(1, a.shape[2]), k):
        inner = slice(start, start + k)
        wide_a = _widened(a[:, :, inner], scratch[0], widen)
        wide_b = _widened(b[:, inner], scratch[1], widen)
        if start == 0:
            np.matmul(wide_a, wide_b, out=total)
        else:
            np.matmul(wide_a, wide_b, out=product)
            np.add(total, product, out=total)
    if add:
        widen(out, product)
        np.add(product, total, out=total)
    round_to(total, out)


def _widened(x: Array, flat: Array, widen: _Convert) -> Array:
    """x (G, I, J) in float32, with the memory order of its two last axes: BLAS takes either."""
    turned = abs(x.strides[1]) < abs(x.strides[2])
    if turned:
        x = x.swapaxes(1, 2)
    wide: Array = flat[: x.size].reshape(x.shape)
    widen(x, wide)
    return wide.swapaxes(1, 2) if turned else wide
