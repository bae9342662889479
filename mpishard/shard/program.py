"""A schedule made ready to run: every view, gradient and collective bound once, none made in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from mpishard.array.arena import Arena
from mpishard.array.dtypes import Array, DType
from mpishard.array.ops import Ops
from mpishard.comm.base import Collective, Communicator, Work
from mpishard.comm.pool import Pool
from mpishard.nn.layer import Gradient
from mpishard.nn.model import Model, Stage
from mpishard.shard.instructions import (
    Absorb,
    Agree,
    AllReduce,
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
from mpishard.shard.memory import Memory
from mpishard.shard.place import Placement
from mpishard.shard.precision import Precision
from mpishard.shard.steps import Steps
from mpishard.shard.strategy import Settings

__all__ = ["Action", "Compiler", "views"]

#: (category, bytes) of buffers
_Held: TypeAlias = "tuple[tuple[str, int], ...]"


class Action(NamedTuple):
    """One instruction as a call.

    Attributes:
        kind: ``compute``, ``start`` or ``wait``.
        mark: what a collective is, for the running digest.
        takes, gives: buffers of the region whose life begins before it, and ends after it.
    """

    instruction: Instruction
    kind: str
    run: Callable[[], None]
    mark: bytes
    name: bytes
    takes: _Held = ()
    gives: _Held = ()


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
        memory: Memory,
        comms: tuple[Communicator, Communicator | None],
        ops: Ops,
        arena: Arena,
        *,
        types: Precision,
        steps: Steps,
        settings: Settings,
        pool: Pool | None = None,
    ) -> None:
        """``comms``: who share a copy of the state, and the ranks of the other groups that have the same shard, where
        there are others. ``pool``: where units are gathered once for several ranks."""
        self.model, self.outline, self.layouts, self.state = model, outline, layouts, memory.state
        self.region, self.ops, self.arena, self.runner = memory.region, ops, arena, memory.runner
        self.inner, self.across = comms
        self.types, self.gradient_types, self.settings = types, steps.gradient_types, settings
        self._pool, self._pooled, self._sharers = pool, memory.pool, steps.sharers
        self._index = {stage.name: i for i, stage in enumerate(model.stages)}
        self._bound: dict[tuple[object, ...], Collective] = {}
        self._views: dict[tuple[str, str, int], dict[str, Array]] = {}
        self._works: dict[str, Work] = {}
        #: when the collective arrived that was waited for last (perf_counter)
        self.arrival = 0.0
        self._resident = {
            name: views(part.resident, layouts[name]) for name, part in self.state.items() if part.resident is not None
        }

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
        beside: dict[str, int] = {}
        actions = []
        for i, step in enumerate(schedule):
            kind, mark = "compute", b""
            run: Callable[[], None]
            takes: _Held = ()
            gives: _Held = ()
            if isinstance(step, Gather) and i not in placement.gathered:
                whole = self.state[step.unit].resident
                assert whole is not None
                run, kind = partial(self._start_share, step.unit, self._share(step.unit)), "start"
                mark = f"gather {step.unit} {whole.nbytes}".encode()
            elif isinstance(step, Gather):
                buffer = self._gathered(placement.gathered[i], step.unit)
                collective = self._gather(step.unit, placement.gathered[i], buffer)
                values[step.unit] = self._view("gathered", step.unit, placement.gathered[i], buffer)
                buffers[step.unit] = buffer
                run, kind = partial(self._start_gather, step.unit, collective, buffer), "start"
                mark = f"gather {step.unit} {buffer.nbytes}".encode()
                takes = (("gathered", buffer.nbytes // self._sharers),)
            elif isinstance(step, Await):
                run = partial(self._await if step.unit in buffers else self._shared, step.unit)
                kind = "wait"
            elif isinstance(step, Release):
                # The views remain: check() has seen that nobody reads them, and poisoned they show who does.
                run = partial(self._release, step.unit, buffers[step.unit])
                gives = (("gathered", buffers[step.unit].nbytes // self._sharers),)
            elif isinstance(step, Reduce):
                offset, buffer = gradients[step.unit]
                collective, beside[step.unit] = self._reduce(step.unit, offset, placement.staging[i], buffer)
                run, kind = partial(self._start_reduce, step.unit, collective, step.add), "start"
                nbytes = buffer.size * self.types.wire.itemsize
                mark = f"reduce {step.unit} {nbytes} {step.add}".encode()
                takes = (("staging", beside[step.unit]),)
            elif isinstance(step, Absorb):
                _, buffer = gradients.pop(step.unit)
                run, kind = partial(self._absorb, step.unit, buffer), "wait"
                gives = (("unreduced", buffer.nbytes), ("staging", beside[step.unit]))
            elif isinstance(step, AllReduce):
                run, nbytes = self._all_reduce(step.unit, placement.staging[i])
                kind, mark = "wait", f"all-reduce {step.unit} {nbytes}".encode()
                takes = gives = (("staging", nbytes),)
            elif isinstance(step, Agree):
                run, kind = agree, "wait"
            elif isinstance(step, Replicate):
                grad = self.state[step.unit].arrays["grad"]
                collective = self.inner.bind_all_gather(self.state[step.unit].slice_of("grad"), grad)
                run, kind = partial(_finish, collective), "wait"
                mark = f"replicate {step.unit} {grad.nbytes}".encode()
            elif isinstance(step, Update):
                run = partial(update, step.unit)
            else:
                opened = placement.unreduced.get(i, {})
                for unit, offset in opened.items():
                    gradients[unit] = (offset, self._cut(offset, unit, self.gradient_types[unit]))
                run = self._compute(step, values, gradients, list(opened), predict)
                takes = tuple(("unreduced", gradients[unit][1].nbytes) for unit in opened)
            actions.append(Action(step, kind, run, mark, short(step).encode(), takes, gives))
        return actions

    def share(self) -> None:
        """Gather what each rank has changed of the parameters that all of them keep. Collective."""
        if self.settings.resident and not self.settings.replicated:
            for unit in self.state:
                _finish(self._share(unit))

    # --- memory and collectives, each made once

    def _gathered(self, offset: int, unit: str) -> Array:
        if self._pooled is None:
            return self._cut(offset, unit, self.types.kind)
        start, nbytes = offset * self._sharers, self.layouts[unit].total * self.types.kind.itemsize
        return self._pooled[start : start + nbytes].view(self.types.kind)

    def _cut(self, offset: int, unit: str, kind: DType) -> Array:
        return self.region[offset : offset + self.layouts[unit].total * kind.itemsize].view(kind)

    def _view(self, region: str, unit: str, offset: int, buffer: Array) -> dict[str, Array]:
        key = (region, unit, offset)
        if key not in self._views:
            self._views[key] = views(buffer, self.layouts[unit])
        return self._views[key]

    def _gather(self, unit: str, offset: int, buffer: Array) -> Collective:
        key = ("gather", unit, offset)
        if key not in self._bound:
            part = self.state[unit]
            if self._pool is not None:
                self._bound[key] = self._pool.bind(part.kept, buffer)
            else:
                shard = buffer[part.start : part.stop] if self._rounds(unit) else part.kept
                self._bound[key] = self.inner.bind_all_gather(shard, buffer)
        return self._bound[key]

    def _rounds(self, unit: str) -> bool:
        """Whether this rank's part is rounded into the gathered buffer, and sent from there."""
        if self._pool is not None:
            return False  # peers may still read there, so the collective does it when they do not
        return self.types.mixed and "cast" not in self.state[unit].arrays

    def _share(self, unit: str) -> Collective:
        key = ("share", unit)
        if key not in self._bound:
            part = self.state[unit]
            assert part.resident is not None
            self._bound[key] = self.inner.bind_all_gather(part.resident[part.start : part.stop], part.resident)
        return self._bound[key]

    def _reduce(self, unit: str, offset: int, staging: int, buffer: Array) -> tuple[Collective, int]:
        """Return the collective, and the bytes beside its input that are its own from start to end."""
        wire = self.types.wire
        nbytes = self.inner.scratch_bytes(buffer.size, buffer.dtype, wire)
        key = ("reduce", unit, offset, staging)
        if key not in self._bound:
            part = self.state[unit]
            out = part.slice_of("grad") if self.settings.replicated else part.arrays["grad"]
            room = self.region[staging : staging + nbytes] if nbytes else None
            self._bound[key] = self.inner.bind_reduce_scatter(buffer, out, room, wire)
        return self._bound[key], nbytes

    def _all_reduce(self, unit: str, staging: int) -> tuple[Callable[[], None], int]:
        """An ordered reduce-scatter of what this group has summed, into a place of its own, and an all-gather back."""
        if self.across is None:
            return _nothing, 0
        grad, wide = self.state[unit].arrays["grad"], self.types.wide
        count = grad.size // self.across.size
        most = count * wide.itemsize
        nbytes = most + self.across.scratch_bytes(grad.size, wide, wide)
        key: tuple[object, ...] = ("all-reduce", unit, staging)
        back = ("all-reduce, back", unit, staging)
        if key not in self._bound:
            part = self.region[staging : staging + most].view(wide)
            room = self.region[staging + most : staging + nbytes] if nbytes > most else None
            self._bound[key] = self.across.bind_reduce_scatter(grad, part, room)
            self._bound[back] = self.across.bind_all_gather(part, grad)
        reduce, gather = self._bound[key], self._bound[back]

        def run() -> None:
            _finish(reduce)
            _finish(gather)

        return run, nbytes

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
        if self._rounds(unit):
            part = self.state[unit]
            self.ops.copy(part.arrays["param"], buffer[part.start : part.stop])
        self._works[unit] = collective.start()

    def _await(self, unit: str) -> None:
        work = self._works[unit]
        work.wait()
        self.arrival = work.arrival

    def _release(self, unit: str, buffer: Array) -> None:
        work = self._works.pop(unit)
        work.released()
        if self._rounds(unit):
            work.wait_inputs()  # peers read what this rank gave to the gather from this very buffer
        self.arena.spoil(buffer)

    def _start_share(self, unit: str, collective: Collective) -> None:
        self._works[unit] = collective.start()

    def _shared(self, unit: str) -> None:
        self._finish(self._works.pop(unit))

    def _start_reduce(self, unit: str, collective: Collective, add: bool) -> None:
        self._works["gradient of " + unit] = collective.start(add)

    def _absorb(self, unit: str, buffer: Array) -> None:
        self._finish(self._works.pop("gradient of " + unit))
        self.arena.spoil(buffer)

    def _finish(self, work: Work) -> None:
        work.wait_inputs()
        self.arrival = work.arrival


def _finish(collective: Collective) -> None:
    collective.start().wait_inputs()


def _nothing() -> None:
    return None
