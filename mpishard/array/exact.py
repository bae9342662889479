"""Sums without rounding as whole numbers: the core of ``exact_sum`` on host arrays, and the words it is kept in.

[Note: fixed point]
A sum is a whole number of units of 2**-298: the square of the smallest fp32 number. Every fp64 partial sum of fp32
squares or of fp32 losses is one, and 640 bits hold more of them than any job has (Kulisch 1986, long accumulators).
Words are 32-bit limbs, each a signed 64-bit number that need not have been carried, so that a GPU adds
to them with integer atomics, in any order, and 2**31 values fit between two carries.
"""

from __future__ import annotations

import numpy as np

from mpishard.array.constants import EXACT_WORDS
from mpishard.array.dtypes import Array

__all__ = ["FRACTION", "add_to_words", "from_words", "units_of"]

#: a unit is 2**-FRACTION
FRACTION = 298
#: what is not below this counts as not finite: no sum of squares of fp32 numbers is, and 640 bits hold 2**40 of them
_LARGEST = 2.0**300
_PIECE = 4096  # elements whose half mantissas add up in int64, and whose temporaries stay small
_LIMB = 32


def units_of(values: Array) -> int | None:
    """Return the sum of values (n,) float64 in units; None where one of them is not finite, or 2**300 and more."""
    units = 0
    for start in range(0, values.size, _PIECE):
        piece = values[start : start + _PIECE]
        if not (np.abs(piece) < _LARGEST).all():
            return None
        mantissa, exponent = np.frexp(piece)
        whole = (mantissa * 2.0**53).astype(np.int64)
        for e in np.unique(exponent).tolist():
            same = whole[exponent == e]
            shift = e - 53 + FRACTION
            if shift < 0:  # only fp64 squares are finer than a unit; each is rounded by itself, in any grouping
                same, shift = same >> min(-shift, 63), 0
            # Two halves of 27 and 26 bits: each adds up in int64.
            total = (int((same >> 27).sum()) << 27) + int((same & 0x7FFFFFF).sum())
            units += total << shift
    return units


def add_to_words(values: Array, words: Array) -> None:
    """Add values (n,) float64 to words (EXACT_WORDS,) int64, carried."""
    units = units_of(values)
    if units is None:
        words[EXACT_WORDS - 1] += 1
        return
    units += from_words(words)[0]
    for i in range(EXACT_WORDS - 1):
        last = i == EXACT_WORDS - 2  # it keeps the sign
        words[i] = units if last else units & (2**_LIMB - 1)
        units >>= _LIMB


def from_words(words: Array) -> tuple[int, bool]:
    """Return the units in words (EXACT_WORDS,) int64, and whether all values were finite."""
    *limbs, bad = words.tolist()
    return sum(limb << (_LIMB * i) for i, limb in enumerate(limbs)), bad == 0
