"""The closed table of element types. What is not in it is refused by name, never mapped to something near."""

from __future__ import annotations

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from mpishard.errors import ConfigError

__all__ = ["DTYPES", "Array", "DType", "accumulator", "address", "dtype", "name_of", "overlap"]

#: An array of any backend that follows NumPy's array semantics (views, ``reshape``, ``T``).
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
DType: TypeAlias = "np.dtype[Any]"

#: name -> dtype. Floating types may be parameters; integer types carry tokens and raw bytes.
DTYPES: dict[str, DType] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int64": np.dtype(np.int64),
    "uint64": np.dtype(np.uint64),
    "uint16": np.dtype(np.uint16),
    "uint8": np.dtype(np.uint8),
}

_NAMES = {value: name for name, value in DTYPES.items()}


def dtype(name: str) -> DType:
    """Return the dtype called ``name``.

    Raises:
        ConfigError: the name is not in the table.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise ConfigError(f"element type {name!r} is not known; choose one of {', '.join(DTYPES)}") from None


def name_of(value: DType) -> str:
    """Return the table's name of a dtype.

    Raises:
        ConfigError: the dtype is not in the table.
    """
    try:
        return _NAMES[np.dtype(value)]
    except KeyError:
        raise ConfigError(f"element type {value} is not in the table; use one of {', '.join(DTYPES)}") from None


def accumulator(value: DType) -> DType:
    """Return the dtype in which sums of ``value`` are kept: fp32, and fp64 for fp64.

    Raises:
        ConfigError: ``value`` is no floating type of the table.
    """
    name = name_of(value)
    if "float" not in name:
        raise ConfigError(f"{name} cannot be summed; only bfloat16, float16, float32 and float64 can")
    return DTYPES["float64"] if name == "float64" else DTYPES["float32"]


def address(array: Array) -> int:
    """Return where an array of any backend begins."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])


def overlap(one: Array, other: Array) -> bool:
    """Return whether two contiguous arrays share memory."""
    first, second = address(one), address(other)
    return first < second + other.nbytes and second < first + one.nbytes
