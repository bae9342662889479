"""Numbers that are sent, and what must arrive: known to every rank, element by element, without asking another one.

Each rank's message repeats a table of its own, of a prime number of elements. So a block in a wrong place, which is a
whole number of blocks or pieces away, never looks right; and a sum of messages repeats the sum of the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from mpishard.array.dtypes import DTYPES, Array, DType, accumulator
from mpishard.array.ops import Ops

__all__ = ["PERIOD", "close", "fill", "same", "summed", "table"]

PERIOD = 65521


@cache
def table(rank: int, kind: DType) -> Array:
    """Return the table (PERIOD,) of a rank: normal numbers, whose sum depends on the order of adding."""
    numbers: Array = np.random.default_rng(rank).standard_normal(PERIOD, np.float32).astype(kind)
    numbers.flags.writeable = False
    return numbers


def summed(ranks: int, kind: DType, bracket: int = 1) -> Array:
    """Return the table (PERIOD,) of sums over ranks, one after another in the type that sums are kept in.

    Args:
        bracket: ranks that are summed by themselves first.
    """
    wide = accumulator(kind)
    groups: list[Array] = []
    for first in range(0, ranks, bracket):
        total = table(first, kind).astype(wide)
        for rank in range(first + 1, first + bracket):
            total += table(rank, kind).astype(wide)
        groups.append(total)
    total = groups[0]
    for group in groups[1:]:
        total += group
    return total


def fill(ops: Ops, out: Array, numbers: Array) -> None:
    """Write ``out`` (n,) full of repetitions of a table."""
    host = ops.host_like(out)
    for start in range(0, host.size, PERIOD):
        part = host[start : start + PERIOD]
        part[:] = numbers[: part.size]
    ops.upload(host, out)


def same(ops: Ops, found: Array, numbers: Array, first: int = 0) -> bool:
    """Return whether ``found`` (n,) has the bits of a table's repetitions from element ``first`` on."""
    unsigned = f"u{numbers.itemsize}"
    return _every(ops, found, numbers, first, lambda part, due: part.view(unsigned) == due.view(unsigned))


def close(ops: Ops, found: Array, ranks: int, kind: DType, first: int = 0) -> bool:
    """Return whether ``found`` (n,) holds sums in whatever order, to the rounding of as many additions."""
    numbers = np.stack([table(rank, kind).astype(np.float64) for rank in range(ranks)])
    eps = 2.0**-7 if found.dtype == DTYPES["bfloat16"] else float(np.finfo(found.dtype).eps)  # no kind to NumPy
    bound = ranks * eps * np.abs(numbers).sum(0)
    due = np.stack([numbers.sum(0), bound])
    return _every(ops, found, due, first, lambda part, due: np.abs(part - due[0]) <= due[1])


def _every(ops: Ops, found: Array, due: Array, first: int, alike: Callable[[Array, Array], Array]) -> bool:
    """Compare a table's length at a time, from its element ``first % PERIOD`` on."""
    host = ops.fetch(found)
    rolled = np.ascontiguousarray(np.roll(due, -(first % PERIOD), axis=-1))
    for start in range(0, host.size, PERIOD):
        part = host[start : start + PERIOD]
        if not bool(alike(part, rolled[..., : part.size]).all()):
            return False
    return True
