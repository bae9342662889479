"""Where each buffer that communication touches lies, from its lifetime in the schedule.

[Note: one region, largest first]
Gathered parameters, gradients that are not reduced yet, and what collectives need beside them lie in one region, since
they are not at their largest together: parameters of the root go when its gradient comes. Buffers are placed
from the largest to the smallest, each at the lowest offset that is free during its whole lifetime. So a root unit,
often far larger than a block, lies apart at the bottom; blocks of one size fall into slots above it, as many as are
ever alive together, and none is inflated to the root's size. Where the region is then larger than what is ever alive
together, other ways are tried, and the best is taken: the root's parameters may leave a hole below its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from mpishard.shard.instructions import (
    Absorb,
    AllReduce,
    Backward,
    Gather,
    Instruction,
    Loss,
    Outline,
    Reduce,
    Release,
)

__all__ = ["KINDS", "Placement", "Sizes", "aligned", "place"]

#: the categories of what is placed
KINDS = ("gathered", "unreduced", "staging")
#: lifetimes of more instructions are compared one by one, and not entered at each of their instructions
_LONG = 64


def aligned(nbytes: int) -> int:
    """Return how many bytes a buffer takes of the region: it begins and ends at a multiple of 64."""
    return -(-nbytes // 64) * 64


class Sizes(NamedTuple):
    """Bytes of one unit's buffers: its parameters, its gradient, and what reducing that needs beside it."""

    gathered: int
    unreduced: int
    staging: int
    #: what adding up across groups needs
    across: int = 0


@dataclass(frozen=True)
class _Lifetime:
    """A buffer of ``size`` bytes that is alive from instruction ``start`` to ``stop``, both included."""

    kind: str
    unit: str
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Placement:
    """Offsets in bytes, by the index of the instruction that begins a buffer's life; and the region's size.

    Attributes:
        gathered: Gather's index -> offset; a Gather into the copy that a rank keeps has none.
        unreduced: index of the first Loss or Backward that touches a unit's gradient -> {unit: offset}.
        staging: index of Reduce or AllReduce -> offset.
        size: bytes of the region.
        live: for each kind, the bytes alive at each instruction.
        pool: bytes of this rank in memory that ranks share, where what is gathered has its places there, and not in
            the region; its offsets are among these bytes, and each rank's are as many.
    """

    gathered: Mapping[int, int]
    unreduced: Mapping[int, Mapping[str, int]]
    staging: Mapping[int, int]
    size: int
    live: Mapping[str, Sequence[int]]
    pool: int = 0

    @property
    def fullest(self) -> dict[str, int]:
        """Bytes of each kind in the region where they are most together, at the first of such instructions."""
        found = dict.fromkeys(KINDS, 0)
        there = {kind: each for kind, each in self.live.items() if kind != "gathered" or not self.pool}
        totals = [sum(each) for each in zip(*there.values(), strict=True)]
        if totals:
            at = totals.index(max(totals))
            found |= {kind: each[at] for kind, each in there.items()}
        return found


def place(
    outline: Outline, schedule: Sequence[Instruction], sizes: Mapping[str, Sizes], pooled: bool = False
) -> Placement:
    """Place the buffers of a legal schedule.

    Args:
        sizes: by unit; with ``pooled`` a rank's part of what is gathered.
        pooled: what is gathered lies in memory that ranks share.
    """
    lives = _lifetimes(outline, schedule, sizes)
    changes = {kind: [0] * (len(schedule) + 1) for kind in KINDS}
    for life in lives:
        changes[life.kind][life.start] += life.size
        changes[life.kind][life.stop + 1] -= life.size
    live = {kind: list(accumulate(each))[:-1] for kind, each in changes.items()}
    if pooled:
        shared = [life for life in lives if life.kind == "gathered"]
        lives = [life for life in lives if life.kind != "gathered"]
        there, pool = _smallest(shared, max(live["gathered"], default=0))
    else:
        shared, there, pool = [], [], 0
    together = [each for kind, each in live.items() if not (pooled and kind == "gathered")]
    offsets, size = _smallest(lives, max(map(sum, zip(*together, strict=True)), default=0))
    gathered: dict[int, int] = {}
    unreduced: dict[int, dict[str, int]] = {}
    staging: dict[int, int] = {}
    for life, offset in zip([*lives, *shared], [*offsets, *there], strict=True):
        if life.kind == "gathered":
            gathered[life.start] = offset
        elif life.kind == "unreduced":
            unreduced.setdefault(life.start, {})[life.unit] = offset
        else:
            staging[life.start] = offset
    return Placement(gathered, unreduced, staging, size, live, pool)


def _lifetimes(outline: Outline, schedule: Sequence[Instruction], sizes: Mapping[str, Sizes]) -> list[_Lifetime]:
    lives: list[_Lifetime] = []
    values: dict[str, int] = {}
    gradients: dict[str, int] = {}
    reductions: dict[str, int] = {}

    def lived(kind: str, unit: str, start: int, stop: int, nbytes: int) -> None:
        lives.append(_Lifetime(kind, unit, start, stop, aligned(nbytes)))

    for i, step in enumerate(schedule):
        if isinstance(step, Gather):
            values[step.unit] = i
        elif isinstance(step, Release):
            lived("gathered", step.unit, values.pop(step.unit), i, sizes[step.unit].gathered)
        elif isinstance(step, Loss | Backward):
            for unit in outline.stage(step.stage).gradient_units:
                gradients.setdefault(unit, i)
        elif isinstance(step, Reduce):
            reductions[step.unit] = i
        elif isinstance(step, Absorb):
            lived("unreduced", step.unit, gradients.pop(step.unit), i, sizes[step.unit].unreduced)
            lived("staging", step.unit, reductions.pop(step.unit), i, sizes[step.unit].staging)
        elif isinstance(step, AllReduce):
            lived("staging", step.unit, i, i, sizes[step.unit].across)
    return lives


_Way: TypeAlias = "Callable[[Sequence[_Lifetime]], tuple[list[int], int]]"
_LASTING = ("unreduced", "staging", "gathered")
#: in which buffers are placed; the first is the best for most models
_ORDERS: tuple[Callable[[_Lifetime], tuple[int, ...]], ...] = (
    lambda life: (-life.size, life.start),
    lambda life: (-life.size, -life.stop),
    lambda life: (life.start, -life.size),
    lambda life: (_LASTING.index(life.kind), -life.size, life.start),
)


def _smallest(lives: Sequence[_Lifetime], least: int) -> tuple[list[int], int]:
    """Return each buffer's offset and the region's size, by the first way that needs ``least``, or the best.

    None is worse than a region for each kind.
    """
    best = _placed(lives, _ORDERS[0])
    others: list[_Way] = [partial(_placed, order=order) for order in _ORDERS[1:]]
    for way in (*others, _apart):
        if best[1] == least:
            break
        best = min(best, way(lives), key=lambda found: found[1])
    return best


def _apart(lives: Sequence[_Lifetime]) -> tuple[list[int], int]:
    """Place each kind above the one before."""
    offsets, region = [0] * len(lives), 0
    for kind in KINDS:
        which = [at for at, life in enumerate(lives) if life.kind == kind]
        found, size = _placed([lives[at] for at in which], _ORDERS[0])
        for at, offset in zip(which, found, strict=True):
            offsets[at] = region + offset
        region += size
    return offsets, region


def _placed(lives: Sequence[_Lifetime], order: Callable[[_Lifetime], tuple[int, ...]]) -> tuple[list[int], int]:
    """Return each buffer's offset, and the size of the region that holds them all."""
    offsets = [0] * len(lives)
    occupied: dict[int, list[tuple[int, int]]] = {}  # instruction -> (offset, end) of what is alive there
    long: list[tuple[_Lifetime, tuple[int, int]]] = []
    placed: list[tuple[_Lifetime, tuple[int, int]]] = []
    region = 0
    for at in sorted(range(len(lives)), key=lambda at: order(lives[at])):
        life = lives[at]
        wide = life.stop - life.start > _LONG
        others = placed if wide else long
        spans = {span for one, span in others if one.start <= life.stop and life.start <= one.stop}
        if not wide:
            spans |= {span for i in range(life.start, life.stop + 1) for span in occupied.get(i, ())}
        offset = 0
        for start, end in sorted(spans):
            if start - offset >= life.size:
                break
            offset = max(offset, end)
        offsets[at] = offset
        span = (offset, offset + life.size)
        placed.append((life, span))
        if wide:
            long.append((life, span))
        else:
            for i in range(life.start, life.stop + 1):
                occupied.setdefault(i, []).append(span)
        region = max(region, span[1])
    return offsets, region
