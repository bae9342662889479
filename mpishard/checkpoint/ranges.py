"""Byte ranges of open files, written from arrays and read into them at their places.

Ranks write and read one file at the same time, each its own ranges, without a shared file position.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mpishard.array.dtypes import Array, DType
from mpishard.errors import CheckpointError

__all__ = ["parts", "read_converted", "read_into", "write_from"]

#: The system moves at most 2 GiB less a page in one call, and may move less.
_MOST = 1 << 30
#: elements converted at a time
_CHUNK = 1 << 16
#: elements that pass through host memory at a time
_PART = 1 << 24


def parts(values: Array) -> Iterator[tuple[Array, int]]:
    """Yield an array (count,) in parts that host memory can hold, each with the number of its first element."""
    for start in range(0, values.size, _PART):
        yield values[start : start + _PART], start


def write_from(file: int, values: Array, offset: int) -> None:
    """Write an array (count,) at ``offset`` bytes of an open file."""
    rest = values.data.cast("B")
    while rest:
        written = os.pwrite(file, rest[:_MOST], offset)
        rest, offset = rest[written:], offset + written


def read_into(file: int, out: Array, offset: int, path: Path) -> None:
    """Fill an array (count,) from ``offset`` bytes of an open file.

    Raises:
        CheckpointError: the file ends before.
    """
    rest = out.data.cast("B")
    while rest:
        count = os.preadv(file, [rest[:_MOST]], offset)
        if not count:
            raise CheckpointError(f"{path}: ends at byte {offset}, in the middle of a tensor; copy it again")
        rest, offset = rest[count:], offset + count


def read_converted(file: int, kind: str, offset: int, path: Path, out: Array) -> Iterator[Array]:
    """Fill ``out`` (count,) with numbers of another type without rounding; yield each part when it is filled.

    Args:
        kind: the type in the file: F32, F16, BF16, or F64 where ``out`` is float64.

    Raises:
        CheckpointError: the file ends before.
    """
    source = _source(kind)
    same = source == out.dtype
    buffer = np.empty(0 if same else min(_CHUNK, out.size), source)
    for start in range(0, out.size, _CHUNK):
        part = out[start : start + _CHUNK]
        values = part if same else buffer[: part.size]
        read_into(file, values, offset + start * source.itemsize, path)
        if kind == "BF16":  # the upper half of an fp32
            np.copyto(part, (values.astype(np.uint32) << np.uint32(16)).view(np.float32))
        elif not same:
            np.copyto(part, values)
        yield part


def _source(kind: str) -> DType:
    return np.dtype({"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}[kind])
