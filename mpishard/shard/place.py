"""Where each buffer that communication touches lies, from its lifetime in the schedule.

[Note: largest first]
Buffers are placed from the largest to the smallest, each at the lowest offset that is free during its whole
lifetime. So a root unit, often far larger than a block, lies apart at the bottom; blocks of one size fall
into slots above it, as many as are ever alive together, and none is inflated to the root's size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mpishard.shard.instructions import Absorb, Backward, Gather, Instruction, Loss, Outline, Reduce, Release

__all__ = ["Placement", "place"]

_Key = TypeVar("_Key")


@dataclass(frozen=True)
class _Lifetime:
    """A buffer of ``size`` elements that is alive from instruction ``start`` to ``stop``, both included."""

    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Placement:
    """Offsets in elements, by the index of the instruction that begins a buffer's life; and regions' sizes.

    Attributes:
        gathered: Gather's index -> offset in the region of ``gathered_size`` elements.
        unreduced: index of the first Loss or Backward that touches a unit's gradient -> {unit: offset}.
        scratch: Reduce's index -> offset in the region of ``scratch_size`` elements.
    """

    gathered: Mapping[int, int]
    unreduced: Mapping[int, Mapping[str, int]]
    scratch: Mapping[int, int]
    gathered_size: int
    unreduced_size: int
    scratch_size: int


def place(
    outline: Outline, schedule: Sequence[Instruction], sizes: Mapping[str, int], scratch: Callable[[int], int]
) -> Placement:
    """Place the buffers of a legal schedule.

    Args:
        sizes: unit -> elements of its flat buffer.
        scratch: elements of a reduce-scatter -> elements of scratch it needs.
    """
    gathered: dict[int, _Lifetime] = {}
    unreduced: dict[tuple[int, str], _Lifetime] = {}
    scratches: dict[int, _Lifetime] = {}
    values: dict[str, int] = {}
    gradients: dict[str, int] = {}
    reductions: dict[str, int] = {}
    for i, step in enumerate(schedule):
        if isinstance(step, Gather):
            values[step.unit] = i
        elif isinstance(step, Release):
            start = values.pop(step.unit)
            gathered[start] = _Lifetime(start, i, sizes[step.unit])
        elif isinstance(step, Loss | Backward):
            for unit in outline.stage(step.stage).gradient_units:
                gradients.setdefault(unit, i)
        elif isinstance(step, Reduce):
            reductions[step.unit] = i
        elif isinstance(step, Absorb):
            start = gradients.pop(step.unit)
            unreduced[start, step.unit] = _Lifetime(start, i, sizes[step.unit])
            start = reductions.pop(step.unit)
            scratches[start] = _Lifetime(start, i, scratch(sizes[step.unit]))
    gathered_at, gathered_size = _largest_first(gathered)
    unreduced_at, unreduced_size = _largest_first(unreduced)
    scratch_at, scratch_size = _largest_first(scratches)
    opened: dict[int, dict[str, int]] = {}
    for (index, unit), offset in unreduced_at.items():
        opened.setdefault(index, {})[unit] = offset
    return Placement(gathered_at, opened, scratch_at, gathered_size, unreduced_size, scratch_size)


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
