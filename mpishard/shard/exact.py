"""Sums without rounding, so that a norm or a loss does not depend on how many ranks added it up.

A sum is a Python integer in the units of :mod:`mpishard.array.exact`. It is rounded once, when it is read.
"""

from __future__ import annotations

from mpishard.array.dtypes import Array
from mpishard.array.exact import FRACTION, from_words, units_of

__all__ = ["EXACT_BYTES", "ExactSum"]

EXACT_BYTES = 80


class ExactSum:
    """A sum of fp64 numbers; ``finite`` turns False when one was infinite, NaN or 2**300 and more."""

    def __init__(self, units: int = 0, finite: bool = True) -> None:
        self.units = units
        self.finite = finite

    def add(self, values: Array) -> None:
        """Add an array of fp64 numbers (count,)."""
        units = units_of(values)
        if units is None:
            self.finite = False
        else:
            self.units += units

    def add_words(self, words: Array) -> None:
        """Add what the operation ``exact_sum`` has gathered in words (EXACT_WORDS,) int64."""
        self.merge(ExactSum(*from_words(words)))

    def merge(self, other: ExactSum) -> None:
        """Add another sum."""
        self.units += other.units
        self.finite = self.finite and other.finite

    @property
    def value(self) -> float:
        """The sum, rounded once; NaN when not finite."""
        return self.units / (1 << FRACTION) if self.finite else float("nan")

    def pack(self) -> bytes:
        """Return ``EXACT_BYTES`` bytes; ``finite`` is not among them."""
        return self.units.to_bytes(EXACT_BYTES, "little", signed=True)

    @classmethod
    def unpack(cls, record: bytes, finite: bool) -> ExactSum:
        """Read what :meth:`pack` wrote."""
        return cls(int.from_bytes(record, "little", signed=True), finite)
