"""A step run on symbols, by rules that know nothing of how schedules are built or checked."""

from __future__ import annotations

from collections.abc import Sequence

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
)


class Simulation:
    """Runs a schedule on symbols. A gradient is the list of what was added to it; a freed buffer holds garbage."""

    def __init__(self, outline: Outline, strategy: str) -> None:
        self.outline = outline
        self.sharded = strategy == "full_shard"
        self.readable = set() if self.sharded else {unit.name for unit in outline.units}
        self.flying: set[str] = set()
        self.buffers: dict[str, dict[str, list[object]]] = {}
        self.reducing: list[tuple[str, bool, dict[str, list[object]]]] = []
        self.shards: dict[str, list[object]] = {unit.name: ["garbage"] for unit in outline.units}
        self.updates: list[str] = []
        self.agreed = False
        self.stack: list[tuple[str, int, bool]] = []
        self.newest: tuple[str, int] | None = None
        self.most_live = self.most_reducing = 0

    def run(self, schedule: Sequence[Instruction]) -> None:
        kept = {unit.name for unit in self.outline.units if unit.keep}
        for step in schedule:
            self.step(step)
            self.most_live = max(self.most_live, len((self.readable | self.flying) - kept))
            self.most_reducing = max(self.most_reducing, len(self.reducing))

    def step(self, step: Instruction) -> None:
        if isinstance(step, Gather):
            assert step.unit not in self.readable | self.flying
            self.flying.add(step.unit)
        elif isinstance(step, Await):
            self.flying.remove(step.unit)
            self.readable.add(step.unit)
        elif isinstance(step, Release):
            self.readable.remove(step.unit)
        elif isinstance(step, Reduce):
            self.reducing.append((step.unit, step.add, self.buffers.pop(step.unit)))
        elif isinstance(step, Absorb):
            unit, add, buffer = self.reducing.pop(0)
            assert unit == step.unit
            before = self.shards[unit] if add else []
            self.shards[unit] = [*before, {param: tuple(parts) for param, parts in buffer.items()}]
        elif isinstance(step, Agree):
            assert not self.buffers
            assert not self.reducing
            self.agreed = True
        elif isinstance(step, Update | Replicate):
            assert self.agreed
            self.updates += [step.unit] * isinstance(step, Update)
        else:
            self.compute(step)

    def finish(self) -> None:
        """Nothing is left over, and each unit was updated once."""
        assert sorted(self.updates) == sorted(unit.name for unit in self.outline.units)
        assert not self.buffers
        assert not self.reducing
        assert not self.stack
        assert not self.flying
        assert not (self.sharded and self.readable)

    def compute(self, step: Forward | Recompute | Loss | Backward | Evaluate | Predict) -> None:
        stage = self.outline.stage(step.stage)
        needed = stage.backward_units if isinstance(step, Backward) else stage.units
        assert set(needed) <= self.readable, step
        self.stacks(step)
        if not isinstance(step, Loss | Backward):
            return
        for unit, param in stage.params:
            assert all(unit != flying for flying, _, _ in self.reducing), step
            buffer = self.buffers.setdefault(unit, {})
            before = buffer[param] if param in step.adds else []  # KeyError: added to garbage
            buffer[param] = [*before, (step.stage, step.micro)]

    def stacks(self, step: Forward | Recompute | Loss | Backward | Evaluate | Predict) -> None:
        """What stages keep is a stack; a stage finds its input, or its output's gradient, where it was left."""
        names = [stage.name for stage in self.outline.stages]
        at = names.index(step.stage)
        if isinstance(step, Forward):
            assert self.newest == ((names[at - 1], step.micro) if at else None)
            self.stack.append((step.stage, step.micro, step.keep))
            self.newest = (step.stage, step.micro)
        elif isinstance(step, Recompute):
            assert self.stack[-1] == (step.stage, step.micro, False)
            self.stack[-1] = (step.stage, step.micro, True)
        elif isinstance(step, Backward):
            assert self.newest == (names[at + 1], step.micro)
            assert self.stack.pop() == (step.stage, step.micro, True)
            self.newest = (step.stage, step.micro) if at else None
        else:
            assert self.newest == ((names[at - 1], step.micro) if at else None)
            self.newest = (step.stage, step.micro) if at and isinstance(step, Loss) else None


def wanted(outline: Outline, micros: int) -> dict[str, list[object]]:
    """For each unit and micro-batch: what each parameter's gradient is the sum of, from the top down."""
    result: dict[str, list[object]] = {}
    for unit in outline.units:
        result[unit.name] = (
            [
                {
                    param: tuple((s.name, micro) for s in reversed(outline.stages) if (unit.name, param) in s.params)
                    for param in unit.params
                }
                for micro in range(micros)
            ]
            if unit.params
            else ["garbage"]
        )
    return result
