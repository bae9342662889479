"""Sets of bytes that a view of memory covers, exactly, without a list of bytes.

[Note: pieces]
A view is a tuple of *pieces* ``(low, high, width, stride)``: ``width`` bytes every ``stride`` bytes, from ``low`` to
the end ``high`` of the last row; a contiguous range has width 0 and stride 0. Axes that join without a gap are merged,
so a view needs one piece unless two or more of its axes have gaps; then its outer axes are counted out into at most
``MOST`` pieces. Beyond that the bounding range stands for the view: what lies between its rows counts as touched, so
such views can be said to conflict where they only interleave. Two pieces of different strides are compared row by
row up to ``ROWS`` rows; beyond that they count as overlapping where their ranges do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

Piece = tuple[int, int, int, int]
Pieces = tuple[Piece, ...]

MOST = 64
ROWS = 4096


@lru_cache(maxsize=4096)
def pieces(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Pieces:
    """Return the pieces of a view whose first element lies at 0."""
    if 0 in shape:
        return ()
    low = sum(stride * (count - 1) for count, stride in zip(shape, strides) if stride < 0)
    axes = sorted((abs(s), n) for n, s in zip(shape, strides) if n > 1 and s)
    width = itemsize
    gaps: list[tuple[int, int]] = []
    for stride, count in axes:
        if not gaps and stride <= width:
            width = max(width, stride * (count - 1) + width)
        elif gaps and stride == gaps[-1][0] * gaps[-1][1]:
            gaps[-1] = (gaps[-1][0], gaps[-1][1] * count)
        else:
            gaps.append((stride, count))
    if not gaps:
        return ((low, low + width, 0, 0),)
    starts = [low]
    for stride, count in gaps[1:]:
        if len(starts) * count > MOST:
            high = low + sum(s * (n - 1) for s, n in gaps) + width
            return ((low, high, 0, 0),)
        starts = [start + stride * i for start in starts for i in range(count)]
    stride, count = gaps[0]
    return tuple((start, start + stride * (count - 1) + width, width, stride) for start in sorted(starts))


def moved(parts: Pieces, by: int) -> Pieces:
    return tuple((low + by, high + by, width, stride) for low, high, width, stride in parts)


def one(address: int, nbytes: int) -> Pieces:
    """Return the pieces of a contiguous range."""
    return ((address, address + nbytes, 0, 0),) if nbytes else ()


def matrix(address: int, rows: int, width: int, pitch: int) -> Pieces:
    """Return the pieces of ``rows`` rows of ``width`` bytes that begin every ``pitch`` bytes."""
    return moved(pieces((rows, width), (pitch, 1), 1), address)


def overlap(one_view: Pieces, other: Pieces) -> bool:
    return any(_meet(p, q) for p in one_view for q in other)


def first_common(one_view: Pieces, other: Pieces) -> int:
    """Return where two overlapping views begin to overlap, as far as their ranges tell."""
    return min(max(p[0], q[0]) for p in one_view for q in other if _meet(p, q))


def covers(outer: Pieces, inner: Pieces) -> bool:
    """Whether every byte of ``inner`` is in ``outer``; may say no where it is so in a roundabout way."""
    if outer == inner:
        return True
    whole = [p for p in outer if not p[3]]
    return all(any(p[0] <= low and high <= p[1] for p in whole) for low, high, _, _ in inner)


def rows_of(parts: Pieces) -> Sequence[tuple[int, int]]:
    """Return the ranges, one after another."""
    found = []
    for low, high, width, stride in parts:
        found.extend([(low, high)] if not stride else [(at, at + width) for at in range(low, high, stride)])
    return found


def _meet(p: Piece, q: Piece) -> bool:
    if p[1] <= q[0] or q[1] <= p[0]:
        return False
    if not p[3] and not q[3]:
        return True
    if p[3] == q[3]:
        apart = (q[0] - p[0]) % p[3]
        if not (apart < p[2] or apart + q[2] > p[3]):
            return False
        # The columns meet; so do the rows, unless the views touch only in the gap at an end.
        return _rows_meet(p, q) if min(p[1], q[1]) - max(p[0], q[0]) < 2 * p[3] else True
    return _rows_meet(p, q)


def _rows_meet(p: Piece, q: Piece) -> bool:
    if not p[3]:
        p, q = q, p
    if not q[3]:
        return _row_in(p, q[0], q[1])
    if (q[1] - q[0]) // q[3] > (p[1] - p[0]) // p[3]:
        p, q = q, p
    if (q[1] - q[0]) // q[3] > ROWS:
        return True
    return any(_row_in(p, at, at + q[2]) for at in range(q[0], q[1], q[3]))


def _row_in(p: Piece, low: int, high: int) -> bool:
    """Whether a row of ``p`` meets the range."""
    row = max(0, (low - p[0] - p[2]) // p[3] + 1)  # the first row that ends after low
    start = p[0] + row * p[3]
    return start < high and start < p[1]
