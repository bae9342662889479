"""The names of the reduce-scatter algorithms of plain MPI, and the scratch of those that go from point to point.

``alltoall``
    An all-to-all of blocks, and their sum in rank order (:mod:`mpishard.comm.pieces`).
``pairwise``
    Messages from rank to rank that are added up, in rank order too, as they arrive (:mod:`mpishard.comm.pairwise`).
``ring``
    Partial sums that travel round and take up each rank's contribution (:mod:`mpishard.comm.ring`).
``native``
    What the MPI library does (:mod:`mpishard.comm.native`).
``auto``
    Of the ordered ones the faster for the size, as measured (:mod:`mpishard.comm.tuning`).

Those that are ORDERED give the same bits. The others do not: they are for comparison, and used when asked for.

[Note: segments]
``pairwise`` and ``ring`` cut each block into *segments*, so that one is added while the next arrives, and what is added
to stays in the processor's cache. Their scratch is a few rows of a segment, whatever the sizes and the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpishard.array.dtypes import DType
from mpishard.errors import ConfigError

__all__ = [
    "ALGORITHMS",
    "ALIGNMENT",
    "ORDERED",
    "ROWS",
    "SEGMENT_BYTES",
    "Segments",
    "check_algorithm",
    "native_scratch",
    "pairwise_segments",
    "ring_segments",
    "up",
]

#: what a program may ask for
ALGORITHMS = ("auto", "alltoall", "pairwise", "ring", "native")
#: those that give the bits that the contract states
ORDERED = ("auto", "alltoall", "pairwise")

#: where a scratch, and each part of it, begins
ALIGNMENT = 64
#: bytes of a segment; what is shorter is one. Long enough to be worth a message, short enough for a cache.
SEGMENT_BYTES = 2**20
#: messages under way in each direction under ``pairwise``
ROWS = 4
#: segments under way under ``ring``
_LANES = 2


def up(nbytes: int) -> int:
    """Round up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Segments:
    """How blocks are cut, and the rows of a scratch.

    Each block is ``count`` segments of ``width`` elements; the last may be shorter. ``arriving`` rows of ``row`` bytes
    take messages, ``leaving`` rows of ``rounded`` bytes hold what is rounded to the type that travels, and ``kept``
    bytes the sum of a bracket.
    """

    width: int
    count: int
    arriving: int
    row: int
    leaving: int
    rounded: int
    kept: int

    @property
    def nbytes(self) -> int:
        """Bytes of scratch."""
        return self.arriving * self.row + self.leaving * self.rounded + self.kept


def _width(each: int, itemsize: int, limit: int) -> int:
    room = min(SEGMENT_BYTES, max(limit, itemsize))
    return min(each, (room // ALIGNMENT * ALIGNMENT or room) // itemsize)


def _sum_bytes(kind: DType) -> int:
    """Return the bytes of a sum: fp32, and fp64 for fp64. What cannot be summed is refused when it is bound."""
    return max(4, kind.itemsize)


def pairwise_segments(each: int, size: int, kind: DType, wire: DType, limit: int) -> Segments:
    """Cut blocks of ``each`` elements of ``kind``, that travel as ``wire`` between ``size`` ranks.

    Args:
        limit: the most bytes of a message.
    """
    width = _width(each, wire.itemsize, limit)
    count = -(-each // width) if width else 0
    rows = min(ROWS, count * (size - 1))
    row = up(width * wire.itemsize)
    leaving = rows + 1 if kind != wire and rows else 0  # and this rank's own contribution
    kept = up(width * _sum_bytes(kind)) if rows else 0
    return Segments(width, count, rows, row, leaving, row, kept)


def ring_segments(each: int, size: int, kind: DType, wire: DType, limit: int) -> Segments:
    """Cut blocks for the ring, on which sums travel. Two rows for each lane; arguments as above."""
    item = _sum_bytes(kind)
    width = _width(each, item, limit)
    count = -(-each // width) if width else 0
    rows = 2 * min(_LANES, count) if size > 1 else 0
    leaving = 1 if kind != wire and rows else 0
    return Segments(width, count, rows, up(width * item), leaving, up(width * wire.itemsize), 0)


def native_scratch(each: int, kind: DType) -> int:
    """Return the bytes of what the library's sum takes before it is added."""
    return up(each * kind.itemsize)


def check_algorithm(algorithm: str) -> None:
    """Check a name.

    Raises:
        ConfigError: there is no such algorithm.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"algorithm {algorithm!r} is not known; choose one of {', '.join(ALGORITHMS)}")
