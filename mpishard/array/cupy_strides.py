"""Views as kernels take them: strides in elements, over as few axes as there are."""

from __future__ import annotations

from functools import lru_cache

from mpishard.array.dtypes import Array

__all__ = ["AXES", "elements", "joined", "padded"]

#: axes of the strided kernels
AXES = 4


def elements(x: Array) -> tuple[int, ...]:
    """Return x's strides in elements."""
    size = x.itemsize
    return tuple(stride // size for stride in x.strides)


@lru_cache(maxsize=4096)
def joined(shape: tuple[int, ...], *strides: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return (shape, strides of each view) without axes of size 1, and with axes joined that all views step through
    evenly, so that a contiguous array becomes one axis."""
    axes: list[tuple[int, ...]] = []  # size, then the stride in each view
    for size, *steps in zip(shape, *strides):
        if size == 1:
            continue
        if axes and all(before == step * size for before, step in zip(axes[-1][1:], steps)):
            axes[-1] = (axes[-1][0] * size, *steps)
        else:
            axes.append((size, *steps))
    return tuple(tuple(axis[i] for axis in axes) for i in range(1 + len(strides)))


def padded(values: tuple[int, ...], by: int) -> tuple[int, ...]:
    """Return AXES values, ``by`` before those given."""
    return (by,) * (AXES - len(values)) + values
