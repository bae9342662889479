"""Whether a schedule is legal, found out before it runs.

[Note: states]
A unit's values are SHARDED, GATHERING (the all-gather is in flight) or GATHERED; its gradient buffer is CLOSED,
OPEN (backward writes it), REDUCING (the reduce-scatter reads it) or, with its buffer free again, CLOSED. Each
instruction moves a unit from one state to the next; any other move is an error that names the unit,
its state and the instruction. Stages compute up and then down again, one micro-batch after the other.

Where a rank keeps all parameters and updates a part, a unit is GATHERED until its Update, which leaves only this rank's
part right (SHARDED), and must be GATHERED again at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from mpishard.errors import ScheduleError
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
)
from mpishard.shard.schedule import Settings, reads

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
    def __init__(self, outline: Outline, settings: Settings) -> None:
        self.outline = outline
        self.settings = settings
        self.resting = Values.GATHERED if settings.resident else Values.SHARDED
        self.values = {unit.name: self.resting for unit in outline.units}
        self.gradients = {unit.name: Gradients.CLOSED for unit in outline.units}
        self.written: dict[str, set[str]] = {unit.name: set() for unit in outline.units}
        self.reduced: dict[str, int] = {unit.name: 0 for unit in outline.units}
        self.flight: list[str] = []
        self.replicated: set[str] = set()
        self.summed: set[str] = set()
        self.updated: set[str] = set()
        self.agreed = False
        self.trained = False
        self.done: dict[tuple[str, int], set[type]] = {}
        self.stages = [stage.name for stage in outline.stages]
        #: the newest activation or gradient: what made it, its stage and micro-batch; None between micro-batches
        self.newest: tuple[str, str, int] | None = None
        self.kept: set[tuple[str, int]] = set()
        self.micros = 0
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
                self.fail(f"it reads unit {unit}, which is {self.values[unit].value}; Gather and Await come before")
        done = self.done.setdefault((step.stage, step.micro), set())
        if type(step) in done:
            self.fail(f"stage {step.stage} did this already for micro-batch {step.micro}")
        if isinstance(step, Backward | Recompute) and Forward not in done:
            self.fail(f"stage {step.stage} has not been forward for micro-batch {step.micro}")
        done.add(type(step))
        self.flow(step)
        self.keep(step)
        if isinstance(step, Loss | Backward):
            self.touch(step)

    def flow(self, step: Forward | Recompute | Loss | Backward | Evaluate | Predict) -> None:
        """Activations go up the stages and gradients come down; each stage takes what its neighbour made last."""
        place = self.stages.index(step.stage)
        down = isinstance(step, Backward | Recompute)
        needed = None
        if down:
            needed = ("gradient", self.stages[place + 1], step.micro)
        elif place > 0:
            needed = ("activation", self.stages[place - 1], step.micro)
        if self.newest != needed:
            self.fail(f"it needs {_described(needed)} and finds {_described(self.newest)}")
        if needed is None:
            if step.micro != self.micros:
                self.fail(f"it is the turn of micro-batch {self.micros}; the order of sums is that of micro-batches")
            self.micros += 1
        ends = isinstance(step, Loss | Backward) and place == self.outline.lowest
        if isinstance(step, Evaluate | Predict) or ends:
            self.newest = None
        elif not isinstance(step, Recompute):
            self.newest = ("activation" if isinstance(step, Forward) else "gradient", step.stage, step.micro)

    def keep(self, step: Forward | Recompute | Loss | Backward | Evaluate | Predict) -> None:
        key = (step.stage, step.micro)
        if isinstance(step, Recompute) or (isinstance(step, Forward) and step.keep):
            if key in self.kept:
                self.fail(f"stage {step.stage} keeps what it needs for micro-batch {step.micro} already")
            self.kept.add(key)
            if self.stages.index(step.stage) < self.outline.lowest:
                self.fail(f"stage {step.stage} has no backward, and nothing to keep for one")
        elif isinstance(step, Backward):
            if key not in self.kept:
                self.fail(f"stage {step.stage} has kept nothing for micro-batch {step.micro}; it must be recomputed")
            self.kept.remove(key)

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
        if unit in self.summed:
            self.fail(f"unit {unit} was added up across groups already")
        missing = [p for u in self.outline.units if u.name == unit for p in u.params if p not in self.written[unit]]
        if missing:
            self.fail(f"the gradient of {missing[0]} of unit {unit} has not been written")
        if step.add != (self.reduced[unit] > 0):
            deed = "add" if self.reduced[unit] else "write"
            self.fail(f"reduction number {self.reduced[unit]} of unit {unit} must {deed}")
        self.reduced[unit] += 1
        self.flight.append(unit)

    def absorb(self, unit: str) -> None:
        self.turn(unit, Gradients.REDUCING, Gradients.CLOSED)
        if self.flight.pop(0) != unit:
            self.fail("reductions are absorbed first in, first out")

    def step(self, step: Instruction) -> None:
        if self.agreed and not isinstance(step, Replicate | Update | Gather | Await):
            self.fail("only Replicate, Update, and the Gather of what was updated come after Agree")
        if isinstance(step, Gather):
            self.gather(step.unit)
        elif isinstance(step, Await):
            self.move(step.unit, Values.GATHERING, Values.GATHERED)
        elif isinstance(step, Release):
            self.move(step.unit, Values.GATHERED, Values.SHARDED)
        elif isinstance(step, Reduce):
            self.reduce(step)
        elif isinstance(step, Absorb):
            self.absorb(step.unit)
        elif isinstance(step, AllReduce):
            self.all_reduce(step.unit)
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

    def gather(self, unit: str) -> None:
        if self.settings.resident and not self.agreed:
            self.fail(f"{self.settings.strategy} keeps parameters whole, and gathers nothing before Agree")
        if self.agreed and unit not in self.updated:
            self.fail(f"unit {unit} has not been updated")
        self.move(unit, Values.SHARDED, Values.GATHERING)

    def all_reduce(self, unit: str) -> None:
        if not self.settings.hybrid:
            self.fail(f"{self.settings.strategy} has one group, and nothing to add up across groups")
        if not self.reduced.get(unit) or self.gradients[unit] is not Gradients.CLOSED:
            self.fail(f"the gradient of unit {unit} is not reduced inside the groups")
        if unit in self.summed:
            self.fail(f"unit {unit} was added up across groups already")
        self.summed.add(unit)

    def finish(self, step: Replicate | Update) -> None:
        unit, settings = step.unit, self.settings
        if not self.agreed:
            self.fail("it must come after Agree")
        if unit not in self.outline.trainable:
            self.fail(f"unit {unit} has no gradient")
        if isinstance(step, Replicate):
            if not settings.replicated:
                self.fail(f"{settings.strategy} updates shards, and has nothing to replicate")
            if unit in self.replicated:
                self.fail(f"unit {unit} was replicated already")
            self.replicated.add(unit)
            return
        if settings.replicated and unit not in self.replicated:
            self.fail(f"unit {unit} has not been replicated")
        if settings.hybrid and unit not in self.summed:
            self.fail(f"unit {unit} has not been added up across groups")
        if unit in self.updated:
            self.fail(f"unit {unit} was updated already")
        if self.values[unit] is not self.resting:
            self.fail(f"unit {unit} is {self.values[unit].value}; peers may still read its shards")
        if settings.resident and not settings.replicated:
            self.values[unit] = Values.SHARDED
        self.updated.add(unit)

    def end(self, micros: int | None) -> None:
        self.settled()
        if micros is not None and self.micros != micros:
            self.fail(f"{self.micros} micro-batches were computed, {micros} are due")
        if self.newest is not None:
            self.fail(f"{_described(self.newest)} is left over")
        for unit, state in self.values.items():
            if state is not self.resting:
                self.fail(f"unit {unit} is still {state.value}")
        for unit in self.outline.trainable if self.trained else ():
            if unit not in self.updated:
                self.fail(f"unit {unit} was not updated")


def _described(flow: tuple[str, str, int] | None) -> str:
    return "no activation or gradient" if flow is None else f"the {flow[0]} of stage {flow[1]}, micro-batch {flow[2]}"


def check(outline: Outline, schedule: Sequence[Instruction], strategy: str, micros: int | None = None) -> None:
    """Walk the schedule through the states of its units.

    Args:
        strategy: says what a rank holds between steps.
        micros: micro-batches that it must compute; None for any number.

    Raises:
        ScheduleError: naming the instruction, its place, the unit and its state.
    """
    checker = _Checker(outline, Settings(strategy))
    for index, instruction in enumerate(schedule):
        checker.at = f"instruction {index}, {instruction}"
        checker.step(instruction)
    checker.at = "the end of the step"
    checker.end(micros)
