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

__all__ = ["Steps", "steps_of"]


@dataclass(frozen=True)
class Steps:
    """Training, evaluating and predicting, in this order; training is empty where there is no optimiser.

    Attributes:
        gradient_types: unit -> element type of its gradient buffer.
    """

    schedules: tuple[tuple[Instruction, ...], ...]
    placements: tuple[Placement, ...]
    gradient_types: Mapping[str, DType]

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
    gradients = gradient_types(outline, train, types)
    across = world.across if settings.hybrid and world.groups > 1 else None
    sizes = sizes_of(layouts, types, gradients, world.scratch, across, world.groups)
    placements = tuple(place(outline, one, sizes) for one in schedules)
    return Steps(schedules, placements, gradients)
