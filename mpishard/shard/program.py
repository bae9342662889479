"""A schedule made ready to run: every view, gradient and collective bound once, none made in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from mpishard.array.arena import Arena
from mpishard.array.dtypes import Array, DType
from mpishard.array.ops import Ops
from mpishard.comm.base import Collective, Communicator, Work
from mpishard.nn.layer import Gradient
from mpishard.nn.model import Model, Stage
from mpishard.shard.instructions import (
    Absorb,
    Agree,
    Await,
    Backward,
    Evaluate,
    Forward,
    Gather,
    Instruction,
    Loss,
    Outline,
    Predict,
    Recompute,
    Reduce,
    Release,
    Replicate,
    Update,
    short,
)
from mpishard.shard.layout import Layout
from mpishard.shard.place import Placement
from mpishard.shard.precision import Precision
from mpishard.shard.runner import Runner
from mpishard.shard.state import State

__all__ = ["Action", "Compiler", "Regions", "views"]


class Action(NamedTuple):
    """One instruction as a call. ``kind`` is ``compute``, ``start`` or ``wait``; collectives carry a ``mark``."""

    instruction: Instruction
    kind: str
    run: Callable[[], None]
    mark: bytes
    name: bytes


@dataclass(frozen=True)
class Regions:
    """The memory that communication touches, as bytes."""

    gathered: Array
    unreduced: Array
    staging: Array


def views(flat: Array, layout: Layout) -> dict[str, Array]:
    """Return each parameter's view of a flat buffer."""
    return {s.name: flat[s.offset : s.offset + s.size].reshape(s.shape) for s in layout.slots}


class Compiler:
    """Binds schedules to one rank's memory. Every rank compiles the same schedules in the same order."""

    def __init__(
        self,
        model: Model,
        outline: Outline,
        layouts: Mapping[str, Layout],
        state: State,
        regions: Regions,
        comm: Communicator,
        ops: Ops,
        arena: Arena,
        runner: Runner,
        *,
        types: Precision,
        gradient_types: Mapping[str, DType],
        resident: bool,
    ) -> None:
        self.model, self.outline, self.layouts, self.state = model, outline, layouts, state
        self.regions, self.comm, self.ops, self.arena, self.runner = regions, comm, ops, arena, runner
        self.types, self.gradient_types = types, gradient_types
        self._index = {stage.name: i for i, stage in enumerate(model.stages)}
        self._bound: dict[tuple[object, ...], Collective] = {}
        self._views: dict[tuple[str, str, int], dict[str, Array]] = {}
        self._works: dict[str, Work] = {}
        copy = "cast" if types.mixed else "param"
        self._resident = (
            {name: views(part.arrays[copy], layouts[name]) for name, part in state.items()} if resident else {}
        )

    def compile(
        self,
        schedule: Sequence[Instruction],
        placement: Placement,
        agree: Callable[[], None],
        update: Callable[[str], None],
        predict: Callable[[int, Mapping[str, Array]], None],
    ) -> list[Action]:
        """Return the schedule's actions, in order.

        Raises:
            CommError: on all ranks, when they bind different collectives.
        """
        values: dict[str, dict[str, Array]] = dict(self._resident)
        buffers: dict[str, Array] = {}
        gradients: dict[str, tuple[int, Array]] = {}
        actions = []
        for i, step in enumerate(schedule):
            kind, mark = "compute", b""
            run: Callable[[], None]
            if isinstance(step, Gather):
                buffer = self._cut(self.regions.gathered, placement.gathered[i], step.unit, self.types.kind)
                collective = self._gather(step.unit, placement.gathered[i], buffer)
                values[step.unit] = self._view("gathered", step.unit, placement.gathered[i], buffer)
                buffers[step.unit] = buffer
                run, kind = partial(self._start_gather, step.unit, collective, buffer), "start"
                mark = f"gather {step.unit} {buffer.nbytes}".encode()
            elif isinstance(step, Await):
                run, kind = partial(self._await, step.unit), "wait"
            elif isinstance(step, Release):
                # The views remain: check() has seen that nobody reads them, and poisoned they show who does.
                run = partial(self._release, step.unit, buffers[step.unit])
            elif isinstance(step, Reduce):
                offset, buffer = gradients[step.unit]
                collective, wire = self._reduce(step.unit, offset, placement.staging[i], buffer)
                run, kind = partial(self._start_reduce, step.unit, collective, step.add, buffer, wire), "start"
                mark = f"reduce {step.unit} {wire.nbytes} {step.add}".encode()
            elif isinstance(step, Absorb):
                _, buffer = gradients.pop(step.unit)
                run, kind = partial(self._absorb, step.unit, buffer), "wait"
            elif isinstance(step, Agree):
                run, kind = agree, "wait"
            elif isinstance(step, Replicate):
                grad = self.state[step.unit].arrays["grad"]
                collective = self.comm.bind_all_gather(self.state[step.unit].slice_of("grad"), grad)
                run, kind = partial(_finish, collective), "wait"
                mark = f"replicate {step.unit} {grad.nbytes}".encode()
            elif isinstance(step, Update):
                run = partial(update, step.unit)
            else:
                opened = placement.unreduced.get(i, {})
                for unit, offset in opened.items():
                    kind_of = self.gradient_types[unit]
                    gradients[unit] = (offset, self._cut(self.regions.unreduced, offset, unit, kind_of))
                run = self._compute(step, values, gradients, list(opened), predict)
            actions.append(Action(step, kind, run, mark, short(step).encode()))
        return actions

    # --- memory and collectives, each made once

    def _cut(self, region: Array, offset: int, unit: str, kind: DType) -> Array:
        return region[offset : offset + self.layouts[unit].total * kind.itemsize].view(kind)

    def _view(self, region: str, unit: str, offset: int, buffer: Array) -> dict[str, Array]:
        key = (region, unit, offset)
        if key not in self._views:
            self._views[key] = views(buffer, self.layouts[unit])
        return self._views[key]

    def _gather(self, unit: str, offset: int, buffer: Array) -> Collective:
        key = ("gather", unit, offset)
        if key not in self._bound:
            part = self.state[unit]
            shard = buffer[part.own] if self.types.mixed else part.arrays["param"]
            self._bound[key] = self.comm.bind_all_gather(shard, buffer)
        return self._bound[key]

    def _reduce(self, unit: str, offset: int, staging: int, buffer: Array) -> tuple[Collective, Array]:
        """Return the collective and what it reads: the gradient itself, or its copy in the type that travels.

        The copy lies before the collective's scratch; both are this unit's until its Absorb.
        """
        wire, rest = buffer, staging
        if buffer.dtype != self.types.kind:
            wire = self._cut(self.regions.staging, staging, unit, self.types.kind)
            rest += wire.nbytes
        key = ("reduce", unit, offset, staging)
        if key not in self._bound:
            nbytes = self.comm.scratch_elements(wire.size) * wire.itemsize
            room = self.regions.staging[rest : rest + nbytes].view(wire.dtype) if nbytes else None
            self._bound[key] = self.comm.bind_reduce_scatter(wire, self.state[unit].slice_of("grad"), room)
        return self._bound[key], wire

    # --- computing

    def _compute(
        self,
        step: Forward | Recompute | Loss | Backward | Evaluate | Predict,
        values: Mapping[str, dict[str, Array]],
        gradients: Mapping[str, tuple[int, Array]],
        opened: list[str],
        predict: Callable[[int, Mapping[str, Array]], None],
    ) -> Callable[[], None]:
        index, runner = self._index[step.stage], self.runner
        stage = self.model.stages[index]
        units = stage.backward_units if isinstance(step, Backward) else stage.units
        params = {
            name: values[unit][name] for unit, name in self._names(stage) if unit in units and unit in values
        }
        if isinstance(step, Forward):
            return partial(runner.forward, index, step.micro, step.keep, params)
        if isinstance(step, Recompute):
            return partial(runner.recompute, index, step.micro, params)
        if isinstance(step, Evaluate):
            return partial(runner.head, index, step.micro, params, None)
        if isinstance(step, Predict):
            return partial(predict, index, params)
        grads: dict[str, Gradient] = {}
        trained = {(unit, name) for unit, name in self.outline.stages[index].params}
        for unit, name in self._names(stage):
            if (unit, name) in trained:
                offset, buffer = gradients[unit]
                grads[name] = (self._view("unreduced", unit, offset, buffer)[name], name in step.adds)
            else:
                grads[name] = None
        run = runner.head if isinstance(step, Loss) else runner.backward
        call = partial(run, index, step.micro, params, grads)
        if not opened:
            return call
        fresh = [(gradients[unit][1], self.layouts[unit].silent) for unit in opened]
        return partial(self._open_and, fresh, call)

    def _names(self, stage: Stage) -> list[tuple[str, str]]:
        return [(self.model.owner(stage, spec.name).name, spec.name) for spec in stage.layer.param_specs()]

    def _open_and(
        self, fresh: list[tuple[Array, tuple[tuple[int, int], ...]]], call: Callable[[], None]
    ) -> None:
        """Zero what no gradient will be written to: the slot held another unit's numbers before."""
        for buffer, silent in fresh:
            self.arena.spoil(buffer)
            for start, stop in silent:
                self.ops.fill(buffer[start:stop], 0.0)
        call()

    # --- communicating

    def _start_gather(self, unit: str, collective: Collective, buffer: Array) -> None:
        self.arena.spoil(buffer)
        if self.types.mixed:
            part = self.state[unit]
            self.ops.copy(part.arrays["param"], buffer[part.own])
        self._works[unit] = collective.start()

    def _await(self, unit: str) -> None:
        self._works[unit].wait()

    def _release(self, unit: str, buffer: Array) -> None:
        work = self._works.pop(unit)
        work.released()
        if self.types.mixed:
            work.wait_inputs()  # peers read what this rank gave to the gather from this very buffer
        self.arena.spoil(buffer)

    def _start_reduce(self, unit: str, collective: Collective, add: bool, buffer: Array, wire: Array) -> None:
        if wire is not buffer:
            self.ops.copy(buffer, wire)
        self._works["gradient of " + unit] = collective.start(add)

    def _absorb(self, unit: str, buffer: Array) -> None:
        self._works.pop("gradient of " + unit).wait_inputs()
        self.arena.spoil(buffer)


def _finish(collective: Collective) -> None:
    collective.start().wait_inputs()
