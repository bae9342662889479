"""How much scratch a reduce-scatter needs, on any transport and any number of ranks, without one being there.

[Note: pieces]
On the host, ``mpi`` and ``local`` work in pieces: each rank's block is cut alike, and a piece of all blocks fills one
of two *slots*. A slot has a row for each rank: what arrived from it; and as many rows of what is sent, where that is no
part of the input as it stands: rounded to a narrower type, or at a place that an MPI count cannot name. So the scratch
is bounded: two slots of SLOT_BYTES, or of LEAST_BYTES a row where ranks are so many (more than 1024, or 512 with rows
of both kinds) that a shorter message would cost more to begin than to send. What fits one slot goes in one piece.

``node`` reads blocks where they lie, so it has rows of one slot, where contributions are rounded, or nothing.

``hierarchical`` sends the sums of its node's ranks, so a row is of the type in which they are summed, and there are as
many rows as nodes, of both kinds; where contributions are rounded, behind the slots a few of those of each rank of the
node (ROUND_BYTES a rank). Of one node it is ``node``, and with one rank a node ``mpi``.

Other algorithms of ``mpi`` have a few rows of a segment (:mod:`mpishard.comm.segments`); ``auto`` takes what is enough
for each that it may choose, since the memory of a job is known before anything is measured.

The other transports hold the blocks of all ranks, or, ``staged``, a piece of them. Before these, those who cannot round
a piece at a time hold the whole input in the type that travels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpishard.array.dtypes import DTYPES, DType
from mpishard.comm.segments import (
    ALIGNMENT,
    Segments,
    check_algorithm,
    native_scratch,
    pairwise_segments,
    ring_segments,
)
from mpishard.errors import ConfigError

__all__ = [
    "ALIGNMENT",
    "CHUNK_BYTES",
    "LEAST_BYTES",
    "ROUND_BYTES",
    "SLOT_BYTES",
    "STAGE_BYTES",
    "Cut",
    "Scratch",
    "copy_bytes",
    "cut",
    "transport_scratch",
]

#: `mpi`: above this many bytes from one rank to another, a collective goes in more messages than one. Counts of one
#: call stay below 2**31, which is all that Open MPI 5 can take.
CHUNK_BYTES = 256 * 2**20
#: `staged`: bytes of a slot's buffer, all ranks' parts together. Large enough for the bus and the network to run at
#: full speed, small enough for a unit to be many pieces.
STAGE_BYTES = 8 * 2**20
#: `mpi` on the host: bytes of a slot, and of the shortest row that a slot is divided into
SLOT_BYTES = 8 * 2**20
LEAST_BYTES = 8 * 2**10
#: `hierarchical`: bytes of a rank's contribution that are rounded at a time, which stay in a processor's cache
ROUND_BYTES = 64 * 2**10

#: bytes of the widest type that is sent
_WIDEST = 8
_INT_MAX = 2**31 - 1
_TRANSPORTS = ("local", "threads", "mpi", "staged", "nccl", "node", "hierarchical")


def _up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _whole(nbytes: int) -> int:
    """Round down to the alignment, where something is left then."""
    return nbytes // ALIGNMENT * ALIGNMENT or nbytes


@dataclass(frozen=True)
class Cut:
    """A reduce-scatter in pieces: see the module's note.

    ``width`` elements of each rank's block are a piece; the last may be shorter. ``packed``: there are rows to send.
    ``beside``: bytes behind the slots.
    """

    size: int
    itemsize: int
    width: int
    pieces: int
    slots: int
    packed: bool
    beside: int = 0

    @property
    def area(self) -> int:
        """Bytes of a slot's rows of one kind."""
        return _up(self.size * self.width * self.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of scratch."""
        return self.slots * (1 + self.packed) * self.area + self.beside


def cut(
    count: int,
    size: int,
    kind: DType,
    wire: DType,
    chunk_bytes: int = CHUNK_BYTES,
    *,
    in_place: bool = False,
    packed: bool = False,
) -> Cut:
    """Cut a reduce-scatter of ``count`` elements of ``kind`` in all, which travel as ``wire``, over ``size`` ranks.

    ``in_place``: blocks do not travel, they are read where they lie. ``packed``: something else than they travels.
    """
    each, item, alone = count // size, wire.itemsize, size == 1 or in_place
    packed = packed or (not alone and (kind != wire or count > _INT_MAX))
    if not each or (alone and kind == wire):  # nothing travels
        return Cut(size, item, each, 1, 0, packed)
    row = min(max(SLOT_BYTES // (size * (1 + packed)), LEAST_BYTES), max(chunk_bytes, item))
    most = _whole(row) // item
    pieces = -(-each // most)
    if pieces == 1:
        return Cut(size, item, each, 1, 1, packed)
    width = _up(-(-each // pieces) * item) // item  # of about one size
    width = min(width, most)
    return Cut(size, item, width, -(-each // width), 1 if alone else 2, packed)


def copy_bytes(count: int, kind: DType, wire: DType) -> int:
    """Return the bytes of ``count`` elements in the type that travels, where that is not their own."""
    return _up(count * wire.itemsize) if kind != wire else 0


@dataclass(frozen=True)
class Scratch:
    """Bytes of scratch that a transport needs for a reduce-scatter: ``scratch(count, kind, wire)``.

    ``count`` is the elements of the input, all ranks' blocks together; ``kind`` its type, ``wire`` the type in which
    they travel. What communicators answer is this, and a plan may ask for ranks that are not there.

    Args:
        transport: a transport's name.
        size: the number of ranks.
        on_device: whether arrays are on a GPU; ``staged`` and ``nccl`` are always.
        chunk_bytes: what the transport was told, or 0 for its default; for ``staged`` of a pinned buffer.
        sums: who adds in ``nccl``.
        algorithm: how a reduce-scatter of ``mpi`` on the host, or of ``hierarchical``, goes.
        local_size: ranks of each node, for ``hierarchical``; 0 for all on one.

    Raises:
        ConfigError: there is no such transport, or algorithm.
    """

    transport: str
    size: int
    on_device: bool = False
    chunk_bytes: int = 0
    sums: str = "ordered"
    algorithm: str = "alltoall"
    local_size: int = 0

    def __post_init__(self) -> None:
        if (self.transport, self.algorithm) != ("hierarchical", "tree"):
            check_algorithm(self.algorithm)
        if self.transport not in _TRANSPORTS:
            raise ConfigError(f"transport {self.transport!r} is not known; choose one of {', '.join(_TRANSPORTS)}")

    @property
    def in_pieces(self) -> bool:
        """Whether the transport rounds to the type that travels piece by piece, and not the whole input at once."""
        return self.transport in ("local", "node", "hierarchical") or (self.transport == "mpi" and not self.on_device)

    def of(self, size: int, local_size: int = 0) -> Scratch:
        """Return what a communicator of ``size`` ranks answers that was split from this one.

        Args:
            local_size: how many of them share a node, for ``hierarchical``; 0 for as many as can be.
        """
        inside = local_size or min(size, self.local_size or size)
        return replace(self, size=size, local_size=inside if self.local_size else 0)

    @property
    def nodes(self) -> int:
        """Nodes between which ``hierarchical`` sends sums; 1 where it does not."""
        inside = self.local_size or self.size
        sums = inside > 1 or self.algorithm == "tree"  # else contributions travel
        return self.size // inside if self.transport == "hierarchical" and sums else 1

    @property
    def sharers(self) -> int:
        """Ranks that can share one gathered copy: all, where they are on one host and in its memory; else 1."""
        one_host = self.transport == "hierarchical" and self.local_size in (0, self.size)
        return self.size if self.transport == "node" or one_host else 1

    def cut(self, count: int, kind: DType, wire: DType) -> Cut:
        """Return the pieces of those that work in pieces."""
        limit, nodes = self.chunk_bytes or CHUNK_BYTES, self.nodes
        if nodes == 1:
            in_place = self.transport == "node" or (self.transport == "hierarchical" and self.local_size != 1)
            return cut(count, self.size, kind, wire, limit, in_place=in_place)
        sums = kind if kind == DTYPES["float64"] else DTYPES["float32"]
        found = cut(count // self.size * nodes, nodes, sums, sums, limit, packed=True)
        if kind == wire or not found.width:
            return found
        return replace(found, beside=self.local_size * _up(min(found.width * wire.itemsize, ROUND_BYTES)))

    def segments(self, algorithm: str, count: int, kind: DType, wire: DType) -> Segments:
        """Return the segments of ``pairwise`` or ``ring``."""
        cut_up = ring_segments if algorithm == "ring" else pairwise_segments
        return cut_up(count // self.size, self.size, kind, wire, self.chunk_bytes or CHUNK_BYTES)

    def __call__(self, count: int, kind: DType, wire: DType) -> int:
        """Return the bytes."""
        if self.in_pieces:
            pieces, algorithm = self.cut(count, kind, wire).nbytes, self.algorithm
            if self.transport != "mpi" or self.size == 1 or algorithm == "alltoall":
                return pieces
            if algorithm == "native":
                return native_scratch(count // self.size, kind)
            found = self.segments(algorithm, count, kind, wire).nbytes
            return max(found, pieces) if algorithm == "auto" else found
        copy = copy_bytes(count, kind, wire)
        if self.size == 1 or self.transport == "threads":
            return copy
        if self.transport == "staged":
            piece = _up(self.size * self.piece(wire.itemsize) * wire.itemsize)
            return copy + min(_up(count * wire.itemsize), piece)
        if self.sums == "library":
            return copy + _up(count // self.size * wire.itemsize)
        return copy + _up(count * wire.itemsize)

    def piece(self, itemsize: int) -> int:
        """Elements of a piece of one rank's block under ``staged``, a multiple of the alignment where there is room."""
        room = max(self.chunk_bytes or STAGE_BYTES, _WIDEST * self.size)  # an element of each rank at least
        return _whole(room // self.size) // itemsize


def transport_scratch(
    transport: str, size: int, *, on_device: bool = False, algorithm: str = "alltoall", local_size: int = 0
) -> Scratch:
    """Return the scratch of a transport of that name, with its defaults, on ``size`` ranks, ``local_size`` a node.

    Raises:
        ConfigError: there is no such transport, or algorithm.
    """
    return Scratch(transport, size, on_device, algorithm=algorithm, local_size=local_size)
