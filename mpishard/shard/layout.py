"""The flat layout of a unit: where each parameter lies in one buffer that splits into equal shards.

[Note: holes]
Parameters begin at multiples of ``ALIGN`` elements, and the end is padded until every shard is whole chunks of
``CHUNK`` elements. What no parameter covers is a hole. Holes are zero in gradients before they are reduced, and
no norm, checksum or file contains them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from mpishard.array.constants import ALIGN, CHUNK

__all__ = ["Layout", "Piece", "Slot", "Spec", "layout"]


class Spec(Protocol):
    """What a layout needs to know of a parameter."""

    @property
    def name(self) -> str:
        """Name within the unit."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""

    @property
    def decay(self) -> bool:
        """Whether weight decay applies."""

    @property
    def trainable(self) -> bool:
        """Whether it has a gradient."""


@dataclass(frozen=True)
class Slot:
    """One parameter's place: elements ``offset`` to ``offset + size`` of the flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int
    decay: bool
    trainable: bool


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that one shard holds.

    Elements ``start`` to ``stop`` of the parameter (C order) lie at ``offset`` of the shard.
    """

    slot: Slot
    start: int
    stop: int
    offset: int

    @property
    def end(self) -> int:
        """Where the part ends in the shard."""
        return self.offset + self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """A unit's flat buffer of ``total`` elements, ``shard`` of them on each of ``ranks`` ranks."""

    slots: tuple[Slot, ...]
    total: int
    shard: int
    ranks: int

    @cached_property
    def holes(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) ranges of the flat buffer that hold no parameter, in order."""
        return _gaps([(slot.offset, slot.offset + slot.size) for slot in self.slots], self.total)

    @cached_property
    def silent(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) ranges that get no gradient: holes and frozen parameters."""
        return _gaps([(slot.offset, slot.offset + slot.size) for slot in self.slots if slot.trainable], self.total)

    def pieces(self, start: int, stop: int) -> tuple[Piece, ...]:
        """Return what elements ``start`` to ``stop`` of the flat buffer hold; offsets count from ``start``."""
        found = []
        for slot in self.slots:
            begin, end = max(start, slot.offset), min(stop, slot.offset + slot.size)
            if begin < end:
                found.append(Piece(slot, begin - slot.offset, end - slot.offset, begin - start))
        return tuple(found)

    def silent_within(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Return the silent ranges inside elements ``start`` to ``stop``, counted from ``start``."""
        return tuple((max(a, start) - start, min(b, stop) - start) for a, b in self.silent if a < stop and b > start)


def _gaps(covered: list[tuple[int, int]], total: int) -> tuple[tuple[int, int], ...]:
    gaps, end = [], 0
    for start, stop in [*covered, (total, total)]:
        if start > end:
            gaps.append((end, start))
        end = max(end, stop)
    return tuple(gaps)


def layout(specs: Iterable[Spec], ranks: int) -> Layout:
    """Lay parameters out, in their order, for ``ranks`` equal shards."""
    slots, end = [], 0
    for spec in specs:
        offset = -(-end // ALIGN) * ALIGN
        size = math.prod(spec.shape)
        slots.append(Slot(spec.name, tuple(spec.shape), offset, size, spec.decay, spec.trainable))
        end = offset + size
    shard = -(-end // (ranks * CHUNK)) * CHUNK
    return Layout(tuple(slots), shard * ranks, shard, ranks)
