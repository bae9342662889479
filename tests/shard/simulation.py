"""A step run on symbols, by rules that know nothing of how schedules are built or checked."""

from __future__ import annotations

from collections.abc import Sequence

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

#: who holds parameters whole between steps, and who of them updates a part
_WHOLE = {"no_shard": False, "shard_optimizer": True, "shard_grad_op": True}


class Simulation:
    """Runs a schedule on symbols. A gradient is the list of what was added to it; a freed buffer holds garbage.

    A copy of parameters that is not of the newest ones is not ``readable``.
    """

    def __init__(self, outline: Outline, strategy: str) -> None:
        self.outline, self.strategy = outline, strategy
        self.sharded = strategy not in _WHOLE
        self.stale_after_update = _WHOLE.get(strategy, False)
        self.units = {unit.name for unit in outline.units}
        self.trainable = {unit.name for unit in outline.units if unit.params}
        self.lowest = next((at for at, stage in enumerate(outline.stages) if stage.params), len(outline.stages) - 1)
        self.readable = set() if self.sharded else set(self.units)
        self.flying: set[str] = set()
        self.buffers: dict[str, dict[str, list[object]]] = {}
        self.reducing: list[tuple[str, bool, dict[str, list[object]]]] = []
        self.shards: dict[str, list[object]] = {unit.name: ["garbage"] for unit in outline.units}
        self.replicated: set[str] = set()
        self.updates: list[str] = []
        self.agreed = False
        self.stack: list[tuple[str, int, bool]] = []
        self.newest: tuple[str, int] | None = None
        self.most_live = self.most_reducing = 0

    def run(self, schedule: Sequence[Instruction]) -> None:
        apart = {unit.name for unit in self.outline.units if unit.keep or unit.beside}
        for step in schedule:
            self.step(step)
            self.most_live = max(self.most_live, len((self.readable | self.flying) - apart))
            self.most_reducing = max(self.most_reducing, len(self.reducing))

    def step(self, step: Instruction) -> None:
        if isinstance(step, Gather):
            assert step.unit not in self.readable | self.flying
            assert self.sharded or step.unit in self.updates
            self.flying.add(step.unit)
        elif isinstance(step, Await):
            self.flying.remove(step.unit)
            self.readable.add(step.unit)
        elif isinstance(step, Release):
            assert self.sharded
            self.readable.remove(step.unit)
        elif isinstance(step, Reduce):
            self.reducing.append((step.unit, step.add, self.buffers.pop(step.unit)))
        elif isinstance(step, Absorb):
            unit, add, buffer = self.reducing.pop(0)
            assert unit == step.unit
            before = self.shards[unit] if add else []
            self.shards[unit] = [*before, {param: tuple(parts) for param, parts in buffer.items()}]
        elif isinstance(step, AllReduce):
            assert self.strategy == "hybrid_shard"
            assert not self.agreed  # the norm is that of the sum
            self.shards[step.unit].append("all groups")
        elif isinstance(step, Agree):
            assert not self.buffers
            assert not self.reducing
            self.agreed = True
        elif isinstance(step, Replicate):
            assert self.agreed
            assert step.unit not in self.updates
            self.replicated.add(step.unit)
        elif isinstance(step, Update):
            self.update(step.unit)
        else:
            self.compute(step)

    def update(self, unit: str) -> None:
        """Shards change, so no peer may be reading them, and whole copies are out of date."""
        assert self.agreed
        assert unit not in self.flying
        assert not (self.sharded and unit in self.readable)
        self.updates.append(unit)
        if self.stale_after_update:
            self.readable.discard(unit)

    def finish(self) -> None:
        """Nothing is left over, and each unit was updated once."""
        assert sorted(self.updates) == sorted(self.trainable)
        assert self.replicated == (self.trainable if self.strategy == "no_shard" else set())
        assert not self.buffers
        assert not self.reducing
        assert not self.stack
        assert not self.flying
        assert self.readable == (set() if self.sharded else self.units)

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
        """What stages keep is a stack; a stage finds its input, or its output's gradient, where it was left.

        A stage below the lowest that learns keeps nothing, and its output has no gradient.
        """
        names = [stage.name for stage in self.outline.stages]
        at = names.index(step.stage)
        if isinstance(step, Forward):
            assert self.newest == ((names[at - 1], step.micro) if at else None)
            if at >= self.lowest:
                self.stack.append((step.stage, step.micro, step.keep))
            self.newest = (step.stage, step.micro)
        elif isinstance(step, Recompute):
            assert self.stack[-1] == (step.stage, step.micro, False)
            self.stack[-1] = (step.stage, step.micro, True)
        elif isinstance(step, Backward):
            assert self.newest == (names[at + 1], step.micro)
            assert self.stack.pop() == (step.stage, step.micro, True)
            self.newest = (step.stage, step.micro) if at > self.lowest else None
        else:
            assert self.newest == ((names[at - 1], step.micro) if at else None)
            self.newest = (step.stage, step.micro) if at > self.lowest and isinstance(step, Loss) else None


def wanted(outline: Outline, micros: int, strategy: str = "full_shard", once: bool = False) -> dict[str, list[object]]:
    """For each unit and reduction: what each parameter's gradient is the sum of, from the top down.

    Args:
        once: all micro-batches are added up before one reduction.
    """
    result: dict[str, list[object]] = {}
    rounds = [range(micros)] if once else [range(micro, micro + 1) for micro in range(micros)]
    for unit in outline.units:
        stages = [stage for stage in reversed(outline.stages) if any(name == unit.name for name, _ in stage.params)]
        sums: list[object] = [
            {
                param: tuple((s.name, micro) for micro in one for s in stages if (unit.name, param) in s.params)
                for param in unit.params
            }
            for one in rounds
        ]
        if strategy == "hybrid_shard":
            sums.append("all groups")
        result[unit.name] = sums if unit.params else ["garbage"]
    return result
