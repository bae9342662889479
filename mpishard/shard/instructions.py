"""The instructions of a step, and the outline of a model from which steps are made. Pure data.

A *unit* is stored, gathered and released together; a *stage* is computed together (DESIGN: docs/architecture.md).
``micro`` counts this rank's micro-batches of the step from 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

__all__ = [
    "FROZEN",
    "Absorb",
    "Agree",
    "AllReduce",
    "Await",
    "Backward",
    "Evaluate",
    "Forward",
    "Gather",
    "Instruction",
    "Loss",
    "Outline",
    "Predict",
    "Recompute",
    "Reduce",
    "Release",
    "Replicate",
    "StageOutline",
    "UnitOutline",
    "Update",
    "digest",
    "short",
]


#: ends the name of the unit that holds the frozen parameters of the unit before it
FROZEN = ".frozen"


@dataclass(frozen=True)
class UnitOutline:
    """A unit's name, whether it is kept from its first to its last use, and its trainable parameters.

    ``beside`` names the unit with which it is always read: the trainable parameters beside which frozen ones lie.
    """

    name: str
    keep: bool
    params: tuple[str, ...]
    beside: str = ""


@dataclass(frozen=True)
class StageOutline:
    """A stage's name, the units its forward and its backward read, and its trainable (unit, parameter) pairs."""

    name: str
    units: tuple[str, ...]
    backward_units: tuple[str, ...]
    params: tuple[tuple[str, str], ...]

    @property
    def gradient_units(self) -> tuple[str, ...]:
        """The units whose gradients backward makes."""
        return tuple(dict.fromkeys(unit for unit, _ in self.params))


@dataclass(frozen=True)
class Outline:
    """All that a schedule needs to know of a model. The last stage is the loss."""

    units: tuple[UnitOutline, ...]
    stages: tuple[StageOutline, ...]

    def stage(self, name: str) -> StageOutline:
        """Return the stage of that name."""
        return self._stages[name]

    @cached_property
    def _stages(self) -> dict[str, StageOutline]:
        return {stage.name: stage for stage in self.stages}

    @cached_property
    def lowest(self) -> int:
        """The first stage with a trainable parameter: backward ends there. Without any, the last stage."""
        return next((i for i, stage in enumerate(self.stages) if stage.params), len(self.stages) - 1)

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """The units with trainable parameters, in order."""
        return tuple(unit.name for unit in self.units if unit.params)


@dataclass(frozen=True)
class Gather:
    """Start the all-gather of the unit's shards into its buffer, or into the copy that the rank keeps."""

    unit: str


@dataclass(frozen=True)
class Await:
    """From here on the unit may be read."""

    unit: str


@dataclass(frozen=True)
class Release:
    """The unit is not read any more; its buffer is free."""

    unit: str


@dataclass(frozen=True)
class Forward:
    """Compute a stage; ``keep`` what backward needs, or drop it (it will be recomputed)."""

    stage: str
    micro: int
    keep: bool = True


@dataclass(frozen=True)
class Recompute:
    """Forward again from the stage's input, in place, keeping what backward needs."""

    stage: str
    micro: int


@dataclass(frozen=True)
class Loss:
    """Head and loss, forward and backward. ``adds``: parameters whose gradient is added, not written."""

    stage: str
    micro: int
    adds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Backward:
    """Backward of a stage. ``adds``: parameters whose gradient is added, not written."""

    stage: str
    micro: int
    adds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evaluate:
    """Head and loss without gradients."""

    stage: str
    micro: int


@dataclass(frozen=True)
class Predict:
    """The predictions of one position."""

    stage: str
    micro: int


@dataclass(frozen=True)
class Reduce:
    """Start the ordered reduce-scatter of the unit's gradient buffer; ``add`` to the shard, or write it."""

    unit: str
    add: bool


@dataclass(frozen=True)
class Absorb:
    """The unit's reduction is complete; its gradient buffer is free."""

    unit: str


@dataclass(frozen=True)
class AllReduce:
    """Add up the groups' sums of the unit's gradient, so that each group's shards have the sum of all."""

    unit: str


@dataclass(frozen=True)
class Agree:
    """The control exchange: every rank learns the norm, the loss and what to do next."""


@dataclass(frozen=True)
class Replicate:
    """All-gather the reduced slices, so that every rank has the unit's whole gradient."""

    unit: str


@dataclass(frozen=True)
class Update:
    """Scale, clip and optimise what this rank holds of the unit."""

    unit: str


Instruction: TypeAlias = (
    "Gather | Await | Release | Forward | Recompute | Loss | Backward | Evaluate | Predict"
    " | Reduce | Absorb | AllReduce | Agree | Replicate | Update"
)


def short(instruction: Instruction) -> str:
    """Return an instruction as people write it: ``Gather(h.3)``, ``Backward(h.3, 1)`` for micro-batch 1."""
    place = getattr(instruction, "unit", None) or getattr(instruction, "stage", "")
    micro = getattr(instruction, "micro", 0)
    inside = f"{place}, {micro}" if micro else place
    return f"{type(instruction).__name__}({inside})" if inside else type(instruction).__name__


def digest(schedule: Sequence[Instruction], extra: str = "") -> bytes:
    """Return 8 bytes that name a schedule; ranks compare them."""
    text = "\n".join(map(repr, schedule)) + extra
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
