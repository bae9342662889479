"""What a rank's memory will be: the schedule run on shapes.

[Note: nothing is declared twice]
What is held is reserved by the same code as an engine's (:mod:`mpishard.shard.memory`), without memory. What a stage
keeps and what it works in are measured by running its own code once on arrays that have a shape and no memory
(:class:`~mpishard.array.shape_ops.ShapeOps`), for each kind of instruction; stages of the same layer and input share
it. The list of the step is then walked, adding up. So a plan of a hundred equal blocks costs as much as one of two, and
a walk. A step that needs a byte more than was planned raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from mpishard.array.arena import CATEGORIES, POOLED, Arena
from mpishard.array.constants import CHUNK
from mpishard.array.dtypes import Array, DType
from mpishard.array.shape_ops import ShapeOps
from mpishard.nn.layer import Gradient
from mpishard.nn.model import Model
from mpishard.shard.instructions import (
    Agree,
    Backward,
    Evaluate,
    Forward,
    Instruction,
    Loss,
    Outline,
    Predict,
    Recompute,
    short,
)
from mpishard.shard.layout import Layout, layout
from mpishard.shard.memory import Memory, Moment, reserve
from mpishard.shard.offload import pinned_for
from mpishard.shard.outline import outline_of, separated
from mpishard.shard.precision import Precision
from mpishard.shard.schedule import Compute, Settings
from mpishard.shard.steps import Steps, steps_of
from mpishard.shard.world import World

__all__ = ["Forecast", "forecast"]


class _Use(NamedTuple):
    """What an instruction does to the stacks, in bytes."""

    #: by how much ``saved`` is higher when it has run
    rises: int
    #: the highest above where ``saved`` stood before
    saved: int
    workspace: int


@dataclass(frozen=True)
class Forecast:
    """The memory of one rank.

    Attributes:
        steps: schedules, and the places of their buffers.
        reserved: bytes of the arena's blocks without the stacks.
        peaks: bytes of the stacks.
        beside: bytes that the backend and the transport hold for themselves: ``workspace`` and ``staging``.
        uses: the highest of ``saved`` and ``workspace`` while each instruction of a training step runs.
    """

    steps: Steps
    reserved: Mapping[str, int]
    peaks: Mapping[str, int]
    beside: Mapping[str, int]
    uses: tuple[tuple[int, int], ...]
    #: bytes of pinned host memory, which are none of a device's
    host: int = 0

    @cached_property
    def held(self) -> dict[str, int]:
        """Bytes by category; they add up to what the rank holds."""
        found = {name: self.reserved[name] + self.peaks.get(name, 0) + self.beside.get(name, 0) for name in CATEGORIES}
        for name, nbytes in self.steps.fullest.items():
            found[name] += nbytes
        return found

    @property
    def total(self) -> int:
        """Bytes that the rank holds."""
        return sum(self.held.values())

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """Bytes in use by category while each instruction of a training step runs."""
        schedule, live = self.steps.schedules[0], self.steps.placements[0].live
        fixed = {name: self.reserved[name] + self.beside.get(name, 0) for name in CATEGORIES}
        fixed[POOLED] = 0  # counted as it is used, as all that has a place
        moments = []
        for i, (step, (saved, workspace)) in enumerate(zip(schedule, self.uses, strict=True)):
            now = {**fixed, "saved": saved, "workspace": fixed["workspace"] + workspace}
            for kind, each in live.items():
                now[kind] += each[i]
            moments.append(Moment(short(step), now))
        return tuple(moments)


def forecast(
    model: Model,
    states: tuple[str, ...] | None,
    settings: Settings,
    types: Precision,
    world: World,
    *,
    micro_batch: int,
    ops_bytes: int = 0,
    offload: str = "none",
    schedule: tuple[Instruction, ...] | None = None,
    steps: Steps | None = None,
) -> Forecast:
    """Return the memory of the engine that these make, to the byte.

    Args:
        states: what the optimiser keeps for each element; None for an engine that only evaluates and predicts.
        settings: ``micros`` is that of a rank.
        ops_bytes: what the backend holds for itself, as ``Ops.own_bytes`` says after ``Ops.prepare``.
        offload: as the engine's; ``optimizer`` is for one on a device.
        schedule: takes the place of the training step that the settings make.
        steps: what :func:`~mpishard.shard.steps.steps_of` made of all this, where it is there already.

    Raises:
        ArenaError: more than any address space.
        ScheduleError: the schedule is not legal.
    """
    model = separated(model)
    outline = outline_of(model)
    layouts = {unit.name: layout(unit.specs, world.size) for unit in model.units}
    trained = states is not None
    if steps is None:
        steps = steps_of(outline, layouts, settings, types, world, trained=trained, schedule=schedule)
    shapes = ShapeOps(ops_bytes)
    arena = Arena(shapes, None)
    pinned = pinned_for(offload, shapes)
    memory = reserve(
        model, layouts, arena, shapes, types, states, settings=settings, world=world, steps=steps,
        micro_batch=micro_batch, seed=0, lowest=outline.lowest, pinned=pinned,
    )  # fmt: skip
    walk = _Walk(model, outline, layouts, steps, types, shapes, arena, memory, micro_batch)
    uses = [walk.uses(one, training=trained and not i) for i, one in enumerate(steps.schedules)]
    every = [each for one in uses for each in one]
    peaks = {name: max((each[i] for each in every), default=0) for i, name in enumerate(("saved", "workspace"))}
    beside = {"workspace": ops_bytes, "staging": world.own_bytes}
    host = pinned.nbytes if pinned is not None else 0
    return Forecast(steps, arena.reserved(), peaks, beside, tuple(uses[0]), host)


class _Walk:
    """Adds up what a schedule's instructions take of the stacks."""

    def __init__(
        self,
        model: Model,
        outline: Outline,
        layouts: Mapping[str, Layout],
        steps: Steps,
        types: Precision,
        shapes: ShapeOps,
        arena: Arena,
        memory: Memory,
        micro_batch: int,
    ) -> None:
        self.model, self.types = model, types
        self.shapes, self.arena, self.runner, self.logits = shapes, arena, memory.runner, memory.logits
        self.index = {stage.name: i for i, stage in enumerate(model.stages)}
        self.inputs = [(micro_batch, *model.sample_shape)]
        self.inputs += self.runner.shapes(self.inputs[0])
        rows = [part.layout.shard // CHUNK * 8 for part in memory.state.values() if part.trained]
        self.agreeing = -(-max(rows, default=0) // 64) * 64
        #: unit -> its trainable parameters, and the type of its gradient
        self._trainable = {unit.name: (unit.params, steps.gradient_types.get(unit.name)) for unit in outline.units}
        self._known: dict[tuple[Any, ...], _Use] = {}
        self._arrays: dict[tuple[Any, ...], Array] = {}

    def uses(self, schedule: tuple[Instruction, ...], *, training: bool) -> list[tuple[int, int]]:
        """Return the highest of ``saved`` and of ``workspace`` while each instruction runs."""
        self.runner.begin(0, None, 1.0, training=training)
        found = []
        top = 0
        for step in schedule:
            if isinstance(step, Agree):
                found.append((top, self.agreeing))
            elif isinstance(step, Forward | Recompute | Loss | Backward | Evaluate | Predict):
                index = self.index[step.stage]
                use = self._use(step, index, training)
                found.append((top + use.saved, use.workspace))
                last = isinstance(step, Backward | Loss) and index == self.runner.lowest
                top = 0 if last else top + use.rises
            else:
                found.append((top, 0))
        return found

    def _use(self, step: Compute, index: int, training: bool) -> _Use:
        stage = self.model.stages[index]
        readable = stage.backward_units if isinstance(step, Backward) else stage.units
        # Backward ends at the lowest stage, so those around it are not like others.
        edge = index if index <= self.runner.lowest + 1 else -1
        key = (
            type(step), getattr(step, "keep", None), getattr(step, "adds", ()), id(stage.layer), self.inputs[index],
            tuple((self._trainable[unit], unit in readable) for unit in stage.units), index == 0, edge, training,
        )  # fmt: skip
        if key not in self._known:
            self._known[key] = self._measured(step, index)
        return self._known[key]

    def _measured(self, step: Compute, index: int) -> _Use:
        runner, arena, stage = self.runner, self.arena, self.model.stages[index]
        specs = stage.layer.param_specs()
        owners = {spec.name: self.model.owner(stage, spec.name).name for spec in specs}
        readable = stage.backward_units if isinstance(step, Backward) else stage.units
        values = {spec.name: self._array(spec.shape, self.types.kind) for spec in specs}
        params = {name: array for name, array in values.items() if owners[name] in readable}
        grads: dict[str, Gradient] = {}
        for spec in specs:
            params_of, kind = self._trainable[owners[spec.name]]
            grads[spec.name] = None
            if kind is not None and spec.name in params_of:
                grads[spec.name] = (self._array(spec.shape, kind), spec.name in getattr(step, "adds", ()))
        arena.saved.cut(0)
        if index > 0:
            runner.newest = self._array(self.inputs[index], self.types.kind)
        if isinstance(step, Backward | Recompute):
            runner.forward(index, 0, isinstance(step, Backward), values)
            runner.newest = self._array(self.inputs[index + 1], self.types.kind)
        before = arena.saved.top
        arena.saved.restart()
        arena.workspace.restart()
        if isinstance(step, Forward):
            runner.forward(index, 0, step.keep, params)
        elif isinstance(step, Recompute):
            runner.recompute(index, 0, params)
        elif isinstance(step, Backward):
            runner.backward(index, 0, params, grads)
        elif isinstance(step, Predict):
            runner.predict(index, 0, params, self.logits)
        else:
            runner.head(index, 0, params, grads if isinstance(step, Loss) else None)
        return _Use(arena.saved.top - before, arena.saved.peak - before, arena.workspace.peak)

    def _array(self, shape: tuple[int, ...], kind: DType) -> Array:
        """An array without memory, whose contents nobody looks at."""
        key = (shape, kind)
        if key not in self._arrays:
            self._arrays[key] = self.shapes.empty(math.prod(shape), kind).reshape(shape)
        return self._arrays[key]
