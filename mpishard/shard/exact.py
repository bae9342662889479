"""Sums without rounding, so that a norm or a loss does not depend on how many ranks added it up.

[Note: fixed point]
A sum is a Python integer in units of 2**-298: the square of the smallest fp32 number. Every fp64 partial sum of fp32
squares or of fp32 losses is a whole number of units, and 640 bits hold more of them than any
job has (Kulisch 1986, long accumulators). It is rounded once, when it is read.
"""

from __future__ import annotations

import numpy as np

from mpishard.array.dtypes import Array

__all__ = ["EXACT_BYTES", "ExactSum"]

EXACT_BYTES = 80
_FRACTION = 298
#: what is not below this counts as not finite: no sum of squares of fp32 numbers is, and 640 bits hold 2**40 of them
_LARGEST = 2.0**300
_PIECE = 4096  # elements whose half mantissas add up in int64, and whose temporaries stay small


class ExactSum:
    """A sum of fp64 numbers; ``finite`` turns False when one was infinite, NaN or 2**300 and more."""

    def __init__(self, units: int = 0, finite: bool = True) -> None:
        self.units = units
        self.finite = finite

    def add(self, values: Array) -> None:
        """Add an array of fp64 numbers (count,)."""
        for start in range(0, values.size, _PIECE):
            piece = values[start : start + _PIECE]
            if not (np.abs(piece) < _LARGEST).all():
                self.finite = False
                return
            mantissa, exponent = np.frexp(piece)
            whole = (mantissa * 2.0**53).astype(np.int64)
            for e in np.unique(exponent).tolist():
                same = whole[exponent == e]
                shift = e - 53 + _FRACTION
                if shift < 0:  # only fp64 squares are finer than a unit; each is rounded by itself, in any grouping
                    same, shift = same >> min(-shift, 63), 0
                # Two halves of 27 and 26 bits: each adds up in int64.
                total = (int((same >> 27).sum()) << 27) + int((same & 0x7FFFFFF).sum())
                self.units += total << shift

    def merge(self, other: ExactSum) -> None:
        """Add another sum."""
        self.units += other.units
        self.finite = self.finite and other.finite

    @property
    def value(self) -> float:
        """The sum, rounded once; NaN when not finite."""
        return self.units / (1 << _FRACTION) if self.finite else float("nan")

    def pack(self) -> bytes:
        """Return ``EXACT_BYTES`` bytes; ``finite`` is not among them."""
        return self.units.to_bytes(EXACT_BYTES, "little", signed=True)

    @classmethod
    def unpack(cls, record: bytes, finite: bool) -> ExactSum:
        """Read what :meth:`pack` wrote."""
        return cls(int.from_bytes(record, "little", signed=True), finite)
