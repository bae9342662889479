"""The kinds of step that an engine takes, each with its schedule and the places of its buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mpishard.array.dtypes import DType
from mpishard.shard.check import check
from mpishard.shard.instructions import Evaluate, Instruction, Outline, Predict
from mpishard.shard.layout import Layout
from mpishard.shard.place import Placement, place
from mpishard.shard.precision import Precision, gradient_types, sizes_of
from mpishard.shard.schedule import Settings, build_forward, build_step
from mpishard.shard.world import World

__all__ = ["Steps", "placed", "steps_of"]


@dataclass(frozen=True)
class Steps:
    """Training, evaluating and predicting, in this order; training is empty where there is no optimiser.

    Attributes:
        gradient_types: unit -> element type of its gradient buffer.
        sharers: ranks that share what is gathered, where it lies in a pool and not in the region; else 1.
    """

    schedules: tuple[tuple[Instruction, ...], ...]
    placements: tuple[Placement, ...]
    gradient_types: Mapping[str, DType]
    sharers: int = 1

    @property
    def pool(self) -> int:
        """Bytes of each sharer in what they share."""
        return max(placement.pool for placement in self.placements)

    @property
    def region(self) -> int:
        """Bytes of the memory that communication touches."""
        return max(placement.size for placement in self.placements)

    @property
    def fullest(self) -> dict[str, int]:
        """Bytes of that memory by category where they are most; what is never used counts as staging."""
        found = max((placement.fullest for placement in self.placements), key=lambda each: sum(each.values()))
        found["staging"] += self.region - sum(found.values())
        return found


def steps_of(
    outline: Outline,
    layouts: Mapping[str, Layout],
    settings: Settings,
    types: Precision,
    world: World,
    *,
    trained: bool,
    schedule: tuple[Instruction, ...] | None = None,
) -> Steps:
    """Return the steps that ``settings`` make; ``schedule`` takes the place of the training step.

    Raises:
        ScheduleError: a schedule is not legal.
    """
    train: tuple[Instruction, ...] = ()
    if trained:
        train = schedule or build_step(outline, settings)
    schedules = (
        train,
        build_forward(outline, settings, Evaluate),
        build_forward(outline, replace(settings, micros=1), Predict),
    )
    for one, due in zip(schedules, (settings.micros, settings.micros, 1), strict=True):
        if one:
            check(outline, one, settings.strategy, due)
    return placed(outline, layouts, settings, types, world, schedules, gradient_types(outline, train, types))


def placed(
    outline: Outline,
    layouts: Mapping[str, Layout],
    settings: Settings,
    types: Precision,
    world: World,
    schedules: tuple[tuple[Instruction, ...], ...],
    gradients: Mapping[str, DType],
) -> Steps:
    """Return legal schedules with the places of their buffers.

    Where ranks can share what is gathered they do, but where that would take more: apart from all else it lies beside
    gradients, and not where they will be.
    """
    across = world.across if settings.hybrid and world.groups > 1 else None

    def steps(sharers: int) -> Steps:
        sizes = sizes_of(layouts, types, gradients, world.scratch, across, world.groups, sharers)
        found = tuple(place(outline, one, sizes, pooled=sharers > 1) for one in schedules)
        return Steps(schedules, found, gradients, sharers)

    alone = steps(1)
    if world.sharers == 1 or settings.resident:
        return alone
    pooled = steps(world.sharers)
    return pooled if pooled.pool and pooled.region + pooled.pool <= alone.region else alone
