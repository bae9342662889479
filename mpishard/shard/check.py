"""Whether a schedule is legal, found out before it runs.

[Note: states]
A unit's values are SHARDED, GATHERING (the all-gather is in flight) or GATHERED; its gradient buffer is CLOSED,
OPEN (backward writes it), REDUCING (the reduce-scatter reads it) or, with its buffer free again, CLOSED. Each
instruction moves a unit from one state to the next; any other move is an error that names the unit,
its state and the instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from mpishard.errors import ScheduleError
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
from mpishard.shard.schedule import reads

__all__ = ["Gradients", "Values", "check"]


class Values(Enum):
    """States of a unit's values."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


class Gradients(Enum):
    """States of a unit's gradient buffer."""

    CLOSED = "closed"
    OPEN = "open"
    REDUCING = "reducing"


class _Checker:
    def __init__(self, outline: Outline, strategy: str) -> None:
        self.outline = outline
        self.strategy = strategy
        resident = Values.SHARDED if strategy == "full_shard" else Values.GATHERED
        self.values = {unit.name: resident for unit in outline.units}
        self.gradients = {unit.name: Gradients.CLOSED for unit in outline.units}
        self.written: dict[str, set[str]] = {unit.name: set() for unit in outline.units}
        self.reduced: dict[str, int] = {unit.name: 0 for unit in outline.units}
        self.flight: list[str] = []
        self.replicated: set[str] = set()
        self.updated: set[str] = set()
        self.agreed = False
        self.trained = False
        self.done: dict[tuple[str, int], set[type]] = {}
        self.at = ""

    def fail(self, message: str) -> None:
        raise ScheduleError(f"{self.at}: {message}")

    def move(self, unit: str, before: Values, after: Values) -> None:
        if self.values.get(unit) is not before:
            state = self.values[unit].value if unit in self.values else "unknown"
            self.fail(f"unit {unit} is {state}, it must be {before.value}")
        self.values[unit] = after

    def turn(self, unit: str, before: Gradients, after: Gradients) -> None:
        if self.gradients.get(unit) is not before:
            state = self.gradients[unit].value if unit in self.gradients else "unknown"
            self.fail(f"the gradient of unit {unit} is {state}, it must be {before.value}")
        self.gradients[unit] = after

    def compute(self, step: Forward | Recompute | Loss | Backward | Evaluate | Predict) -> None:
        for unit in reads(self.outline, step):
            if self.values[unit] is not Values.GATHERED:
                self.fail(f"it reads unit {unit}, which is {self.values[unit].value}; a Gather and an Await must come before")
        done = self.done.setdefault((step.stage, step.micro), set())
        if type(step) in done:
            self.fail(f"stage {step.stage} did this already for micro-batch {step.micro}")
        if isinstance(step, Backward | Recompute) and Forward not in done:
            self.fail(f"stage {step.stage} has not been forward for micro-batch {step.micro}")
        done.add(type(step))
        if isinstance(step, Loss | Backward):
            self.touch(step)

    def touch(self, step: Loss | Backward) -> None:
        self.trained = True
        stage = self.outline.stage(step.stage)
        for unit in stage.gradient_units:
            if self.gradients[unit] is not Gradients.OPEN:
                self.turn(unit, Gradients.CLOSED, Gradients.OPEN)
                self.written[unit] = set()
        for unit, param in stage.params:
            added = param in step.adds
            if added != (param in self.written[unit]):
                self.fail(f"parameter {param} of unit {unit} is {'added to nothing' if added else 'written twice'}")
            self.written[unit].add(param)

    def reduce(self, step: Reduce) -> None:
        unit = step.unit
        self.turn(unit, Gradients.OPEN, Gradients.REDUCING)
        missing = [p for u in self.outline.units if u.name == unit for p in u.params if p not in self.written[unit]]
        if missing:
            self.fail(f"the gradient of {missing[0]} of unit {unit} has not been written")
        if step.add != (self.reduced[unit] > 0):
            self.fail(f"reduction number {self.reduced[unit]} of unit {unit} must {'add' if self.reduced[unit] else 'write'}")
        self.reduced[unit] += 1
        self.flight.append(unit)

    def absorb(self, unit: str) -> None:
        self.turn(unit, Gradients.REDUCING, Gradients.CLOSED)
        if self.flight.pop(0) != unit:
            self.fail("reductions are absorbed first in, first out")

    def step(self, step: Instruction) -> None:
        if isinstance(step, Gather):
            self.move(step.unit, Values.SHARDED, Values.GATHERING)
        elif isinstance(step, Await):
            self.move(step.unit, Values.GATHERING, Values.GATHERED)
        elif isinstance(step, Release):
            self.move(step.unit, Values.GATHERED, Values.SHARDED)
        elif isinstance(step, Reduce):
            self.reduce(step)
        elif isinstance(step, Absorb):
            self.absorb(step.unit)
        elif isinstance(step, Agree):
            self.settled()
            self.agreed = True
        elif isinstance(step, Replicate | Update):
            self.finish(step)
        else:
            self.compute(step)

    def settled(self) -> None:
        for unit, state in self.gradients.items():
            if state is not Gradients.CLOSED:
                self.fail(f"the gradient of unit {unit} is still {state.value}")

    def finish(self, step: Replicate | Update) -> None:
        if not self.agreed:
            self.fail("it must come after Agree")
        if isinstance(step, Replicate):
            self.replicated.add(step.unit)
            return
        if self.strategy == "no_shard" and step.unit not in self.replicated:
            self.fail(f"unit {step.unit} has not been replicated")
        if step.unit in self.updated:
            self.fail(f"unit {step.unit} was updated already")
        if self.strategy == "full_shard" and self.values[step.unit] is not Values.SHARDED:
            self.fail(f"unit {step.unit} is {self.values[step.unit].value}; peers may still read its shards")
        self.updated.add(step.unit)

    def end(self) -> None:
        self.settled()
        if self.strategy == "full_shard":
            for unit, state in self.values.items():
                if state is not Values.SHARDED:
                    self.fail(f"unit {unit} is still {state.value}")
        for unit in self.values if self.trained else ():
            if unit not in self.updated:
                self.fail(f"unit {unit} was not updated")


def check(outline: Outline, schedule: Sequence[Instruction], strategy: str) -> None:
    """Walk the schedule through the states of its units.

    Raises:
        ScheduleError: naming the instruction, its place, the unit and its state.
    """
    checker = _Checker(outline, strategy)
    for index, instruction in enumerate(schedule):
        checker.at = f"instruction {index}, {instruction}"
        checker.step(instruction)
    checker.at = "the end of the step"
    checker.end()
