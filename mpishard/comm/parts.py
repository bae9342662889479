"""Parts of flat buffers."""

from __future__ import annotations

from mpishard.array.dtypes import Array

__all__ = ["blocks_of", "pieces_of"]


def blocks_of(array: Array, size: int) -> list[Array]:
    """Return the ranks' equal parts of a 1-D array."""
    count = array.size // size
    return [array[rank * count : (rank + 1) * count] for rank in range(size)]


def pieces_of(array: Array, step: int) -> list[Array]:
    """Return a 1-D array in slices of ``step`` elements; the last one may be shorter."""
    return [array[start : start + step] for start in range(0, array.size, step)]
