"""Where each buffer that communication touches lies, from its lifetime in the schedule.

[Note: largest first]
Buffers are placed from the largest to the smallest, each at the lowest offset that is free during its whole
lifetime. So a root unit, often far larger than a block, lies apart at the bottom; blocks of one size fall
into slots above it, as many as are ever alive together, and none is inflated to the root's size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from mpishard.shard.instructions import Absorb, Backward, Gather, Instruction, Loss, Outline, Reduce, Release

__all__ = ["Placement", "Sizes", "place"]

_Key = TypeVar("_Key")


class Sizes(NamedTuple):
    """Bytes of one unit's buffers: its parameters, its gradient, and what reducing that needs beside it."""

    gathered: int
    unreduced: int
    staging: int


@dataclass(frozen=True)
class _Lifetime:
    """A buffer of ``size`` bytes that is alive from instruction ``start`` to ``stop``, both included."""

    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Placement:
    """Offsets in bytes, by the index of the instruction that begins a buffer's life; and regions' sizes.

    Attributes:
        gathered: Gather's index -> offset in the region of ``gathered_size`` bytes.
        unreduced: index of the first Loss or Backward that touches a unit's gradient -> {unit: offset}.
        staging: Reduce's index -> offset in the region of ``staging_size`` bytes.
    """

    gathered: Mapping[int, int]
    unreduced: Mapping[int, Mapping[str, int]]
    staging: Mapping[int, int]
    gathered_size: int
    unreduced_size: int
    staging_size: int


def place(outline: Outline, schedule: Sequence[Instruction], sizes: Mapping[str, Sizes]) -> Placement:
    """Place the buffers of a legal schedule; ``sizes`` by unit."""
    gathered: dict[int, _Lifetime] = {}
    unreduced: dict[tuple[int, str], _Lifetime] = {}
    staging: dict[int, _Lifetime] = {}
    values: dict[str, int] = {}
    gradients: dict[str, int] = {}
    reductions: dict[str, int] = {}
    for i, step in enumerate(schedule):
        if isinstance(step, Gather):
            values[step.unit] = i
        elif isinstance(step, Release):
            start = values.pop(step.unit)
            gathered[start] = _Lifetime(start, i, sizes[step.unit].gathered)
        elif isinstance(step, Loss | Backward):
            for unit in outline.stage(step.stage).gradient_units:
                gradients.setdefault(unit, i)
        elif isinstance(step, Reduce):
            reductions[step.unit] = i
        elif isinstance(step, Absorb):
            start = gradients.pop(step.unit)
            unreduced[start, step.unit] = _Lifetime(start, i, sizes[step.unit].unreduced)
            start = reductions.pop(step.unit)
            staging[start] = _Lifetime(start, i, sizes[step.unit].staging)
    gathered_at, gathered_size = _largest_first(gathered)
    unreduced_at, unreduced_size = _largest_first(unreduced)
    staging_at, staging_size = _largest_first(staging)
    opened: dict[int, dict[str, int]] = {}
    for (index, unit), offset in unreduced_at.items():
        opened.setdefault(index, {})[unit] = offset
    return Placement(gathered_at, opened, staging_at, gathered_size, unreduced_size, staging_size)


def _largest_first(lifetimes: Mapping[_Key, _Lifetime]) -> tuple[dict[_Key, int], int]:
    """Return each buffer's offset, and the size of the region that holds them all."""
    offsets: dict[_Key, int] = {}
    occupied: dict[int, list[tuple[int, int]]] = {}  # instruction -> (offset, end) of what is alive there
    size = 0
    for key, life in sorted(lifetimes.items(), key=lambda item: (-item[1].size, item[1].start)):
        taken = sorted({span for i in range(life.start, life.stop + 1) for span in occupied.get(i, ())})
        offset = 0
        for start, end in taken:
            if start - offset >= life.size:
                break
            offset = max(offset, end)
        offsets[key] = offset
        for i in range(life.start, life.stop + 1):
            occupied.setdefault(i, []).append((offset, offset + life.size))
        size = max(size, offset + life.size)
    return offsets, size
