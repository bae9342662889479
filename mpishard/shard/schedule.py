"""One step as an ordered list, computed before anything runs. Strategies are different lists.

[Note: the window]
Units that are not kept stream through ``prefetch + 1`` gathered buffers. As soon as a stage has computed, the
next ``prefetch + 1`` *different* units that the step will read are gathered or in flight, and no others. So a block
at a turning point (the last blocks between forward and backward, the first ones between two
micro-batches) is not released only to be gathered again: each turn saves ``prefetch + 1`` all-gathers.
Without ``reshard_after_forward`` a unit also stays from its forward to its backward. What lies beside a unit (its
frozen parameters) comes and goes with it, and is not counted.

[Note: reductions]
One reduction is in flight at a time, first in first out: a unit's Reduce follows the last backward that
touches its gradient, and is absorbed before the next Reduce, and before its buffer is written again.
With ``prefetch = 0`` it is absorbed at once: nothing overlaps and one block's buffers are enough. ``shard_optimizer``
puts a micro-batch's Reduces after its last backward; ``no_sync`` has those of the last micro-batch alone.

[Note: resident parameters]
Under ``shard_optimizer`` and ``shard_grad_op`` a rank updates its 1/N of the parameters, and the step ends with an
all-gather of each unit into the copy that the rank keeps; it runs while the next unit is updated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

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
from mpishard.shard.strategy import ALIASES, RECOMPUTE, STRATEGIES, Settings, canonical

__all__ = [
    "ALIASES",
    "RECOMPUTE",
    "STRATEGIES",
    "Compute",
    "Settings",
    "build_forward",
    "build_step",
    "canonical",
    "reads",
]

Compute: TypeAlias = "Forward | Recompute | Loss | Backward | Evaluate | Predict"


def reads(outline: Outline, instruction: Instruction) -> tuple[str, ...]:
    """Return the units whose parameters an instruction reads."""
    if isinstance(instruction, Forward | Recompute | Loss | Evaluate | Predict):
        return outline.stage(instruction.stage).units
    if isinstance(instruction, Backward):
        return outline.stage(instruction.stage).backward_units
    return ()


def build_step(outline: Outline, settings: Settings) -> tuple[Instruction, ...]:
    """Return a training step: compute, reduce, agree, update."""
    computes: list[Compute] = []
    written: set[tuple[str, str]] = set()
    for micro in range(settings.micros):
        if settings.accumulate == "reduce":
            written = set()
        computes += _micro_batch(outline, micro, settings, written)
    steps = _with_reductions(outline, computes, settings)
    if not settings.resident:
        steps = _with_gathers(outline, steps, settings)
    if settings.hybrid:
        steps += map(AllReduce, outline.trainable)
    steps.append(Agree())
    for unit in outline.trainable:
        if settings.replicated:
            steps.append(Replicate(unit))
        steps.append(Update(unit))
        if settings.resident and not settings.replicated:
            steps.append(Gather(unit))
    if settings.resident and not settings.replicated:
        steps += map(Await, outline.trainable)
    return tuple(steps)


def build_forward(
    outline: Outline, settings: Settings, last: type[Evaluate] | type[Predict]
) -> tuple[Instruction, ...]:
    """Return a pass without gradients that ends each micro-batch in ``last``."""
    computes: list[Instruction] = []
    for micro in range(settings.micros):
        computes += [Forward(stage.name, micro, keep=False) for stage in outline.stages[:-1]]
        computes.append(last(outline.stages[-1].name, micro))
    if not settings.resident:
        computes = _with_gathers(outline, computes, settings)
    return tuple(computes)


def _micro_batch(outline: Outline, micro: int, settings: Settings, written: set[tuple[str, str]]) -> list[Compute]:
    """Return what a micro-batch computes; ``written`` holds the gradients that have a value, and is brought on."""
    *inner, head = outline.stages
    trained = inner[outline.lowest :]
    every = settings.recompute_every
    again = {stage.name for stage in inner[1:][every - 1 :: every]} if settings.recompute == "block" else set()
    again &= {stage.name for stage in trained}
    keep = {stage.name for stage in trained} - again
    computes: list[Compute] = [Forward(stage.name, micro, stage.name in keep) for stage in inner]

    def adds(params: Sequence[tuple[str, str]]) -> tuple[str, ...]:
        """The first gradient of a parameter is written, later ones are added."""
        repeated = tuple(name for unit, name in params if (unit, name) in written)
        written.update(params)
        return repeated

    computes.append(Loss(head.name, micro, adds(head.params)))
    for stage in reversed(trained):
        if stage.name in again:
            computes.append(Recompute(stage.name, micro))
        computes.append(Backward(stage.name, micro, adds(stage.params)))
    return computes


def _with_reductions(outline: Outline, computes: list[Compute], settings: Settings) -> list[Instruction]:
    """Put Reduce where the notes say, and Absorb after it."""
    touches = [
        outline.stage(c.stage).gradient_units if isinstance(c, Loss | Backward) else () for c in computes
    ]
    once = settings.accumulate == "no_sync"
    rounds = [0 if once else c.micro for c in computes]
    last = {(rounds[i], unit): i for i in range(len(computes)) for unit in touches[i]}
    ends = {number: i for i, number in enumerate(rounds)}
    steps: list[Instruction] = []
    pending: str | None = None
    put_off: list[str] = []

    def absorb() -> None:
        nonlocal pending
        if pending is not None:
            steps.append(Absorb(pending))
            pending = None

    for i, compute in enumerate(computes):
        if pending in touches[i]:
            absorb()
        steps.append(compute)
        due = [unit for unit in touches[i] if last[rounds[i], unit] == i]
        if settings.strategy == "shard_optimizer":
            put_off += due
            due = []
            if ends[rounds[i]] == i:
                due, put_off = put_off, []
        for unit in due:
            absorb()
            steps.append(Reduce(unit, add=rounds[i] > 0))
            pending = unit
            if settings.prefetch == 0:
                absorb()
    absorb()
    return steps


def _with_gathers(outline: Outline, steps: list[Instruction], settings: Settings) -> list[Instruction]:
    """Put Gather, Await and Release around what reads units."""
    prefetch = settings.prefetch
    kept = {unit.name for unit in outline.units if unit.keep}
    readers = [(i, units) for i, step in enumerate(steps) if (units := reads(outline, step))]
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    #: where a unit is read for the last time in a micro-batch
    turns: dict[tuple[int, str], int] = {}
    for i, units in readers:
        for unit in units:
            first.setdefault(unit, i)
            last[unit] = i
            turns[_micro(steps[i]), unit] = i
    streams = [(i, [u for u in units if u not in kept]) for i, units in readers]
    streams = [(i, units) for i, units in streams if units]
    windows = _windows(outline, streams, prefetch)
    following = {i: windows[then] for (i, _), (then, _) in itertools.pairwise(streams)}
    following |= {i: [] for i, _ in streams[-1:]}
    # A kept unit sets out one reader ahead of its first use, where anything may be in flight ahead.
    order = [i for i, _ in readers]
    early = {u: order[max(0, order.index(i) - min(prefetch, 1))] for u, i in first.items() if u in kept}

    result: list[Instruction] = []
    live: list[str] = []
    arrived: set[str] = set()
    reading = dict(readers)

    def issue(units: list[str]) -> None:
        for unit in units:
            if unit not in live:
                result.append(Gather(unit))
                live.append(unit)

    def stays(unit: str, at: int) -> bool:
        """Whether it waits for its backward in this micro-batch."""
        return not settings.reshard_after_forward and turns.get((_micro(steps[at]), unit), -1) > at

    for i, step in enumerate(steps):
        issue([u for u, at in early.items() if at == i])
        if prefetch == 0:
            issue(windows.get(i, []))
        elif i == 0 and streams:
            issue(windows[streams[0][0]])
        for unit in reading.get(i, ()):
            if unit not in arrived:
                result.append(Await(unit))
                arrived.add(unit)
        result.append(step)
        done = [u for u in reading.get(i, ()) if u in kept and last[u] == i]
        if i in following:
            done += [u for u in live if u not in kept and u not in following[i] and not stays(u, i)]
        for unit in done:
            result.append(Release(unit))
            live.remove(unit)
            arrived.discard(unit)
        if prefetch > 0:
            issue(following.get(i, []))
    return result


def _micro(step: Instruction) -> int:
    return getattr(step, "micro", -1)


def _windows(outline: Outline, streams: list[tuple[int, list[str]]], prefetch: int) -> dict[int, list[str]]:
    """Return, by reader, its units and those of the next ``prefetch`` others, each with what lies beside it."""
    leads = {unit.name: unit.beside or unit.name for unit in outline.units}
    different = len({leads[unit] for _, units in streams for unit in units})
    windows = {}
    for n, (i, units) in enumerate(streams):
        window = list(units)
        found = {leads[unit] for unit in units}
        size = min(len(found) + prefetch, different)
        for later in range(n + 1, len(streams)):  # no slice: it would copy the rest of the step for every reader
            if len(found) >= size:
                break
            for unit in streams[later][1]:
                if len(found) < size or leads[unit] in found:
                    found.add(leads[unit])
                    if unit not in window:
                        window.append(unit)
        windows[i] = window
    return windows
