"""What tests of CuPy's operations share: the operations on the stand-in, and the way of arguments to it and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpishard.array.cupy_ops import CupyOps
from tests.standin import installed


@contextmanager
def standing_in(**settings: Any) -> Iterator[CupyOps]:
    """Operations on a device that is not there; ``settings`` as ``installed`` takes them."""
    with installed(**settings):
        yield CupyOps()


def on_device(ops: CupyOps, value: Any) -> Any:
    """Arrays become device arrays, with the strides that they have; lists theirs; all else stays."""
    if isinstance(value, list):
        return [on_device(ops, item) for item in value]
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    value = np.asarray(value)
    order = sorted(range(value.ndim), key=lambda axis: -abs(value.strides[axis]))
    packed = value.transpose(order).copy()
    x = ops.empty(value.size, value.dtype).reshape(packed.shape)
    ops.upload(packed, x)
    return transposed(x, [order.index(axis) for axis in range(value.ndim)])


def transposed(x: Any, order: list[int]) -> Any:
    """``x.transpose(order)`` by swaps of two axes."""
    places = list(range(len(order)))
    for axis, wanted in enumerate(order):
        at = places.index(wanted)
        if at != axis:
            x = x.swapaxes(axis, at)
            places[axis], places[at] = places[at], places[axis]
    return x


def from_device(ops: CupyOps, x: Any) -> np.ndarray:
    """A NumPy array with x's values, whatever its strides."""
    order = sorted(range(x.ndim), key=lambda axis: -abs(x.strides[axis]))
    found = ops.fetch(transposed(x, order))
    return found.transpose([order.index(axis) for axis in range(x.ndim)])
