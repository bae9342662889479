"""Checks of arguments, as Cython makes them in CuPy's bindings."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

__all__ = ["address", "count", "whole"]


def address(value: Any) -> int:
    """An ``intptr_t``: Python's int and nothing that only resembles one (NumPy's are refused)."""
    if not isinstance(value, int):
        raise TypeError("an integer is required")
    return int(value)


def whole(value: Any, bits: int = 32) -> int:
    """A C ``int``: anything with ``__index__``, in range."""
    number = _index(value)
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise OverflowError("value too large to convert to int")
    return number


def count(value: Any) -> int:
    """A ``size_t``."""
    number = _index(value)
    if number < 0:
        raise OverflowError("can't convert negative value to size_t")
    return number


def _index(value: Any) -> int:
    if isinstance(value, (float, np.floating)):
        raise TypeError("an integer is required")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError("an integer is required") from None
