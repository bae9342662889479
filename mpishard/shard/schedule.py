"""One step as an ordered list, computed before anything runs. Strategies are different lists.

[Note: the window]
Units that are not kept stream through ``prefetch + 1`` gathered buffers. As soon as a stage has computed, the
next ``prefetch + 1`` *different* units that the step will read are gathered or in flight, and no others. So a block
at a turning point (the last blocks between forward and backward, the first ones between two
micro-batches) is not released only to be gathered again: each turn saves ``prefetch + 1`` all-gathers.

[Note: reductions]
One reduction is in flight at a time, first in first out: a unit's Reduce follows the last backward that
touches its gradient, and is absorbed before the next Reduce, and before its buffer is written again.
With ``prefetch = 0`` it is absorbed at once: nothing overlaps and one block's buffers are enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mpishard.errors import ConfigError
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

__all__ = ["RECOMPUTE", "STRATEGIES", "Compute", "Settings", "build_forward", "build_step", "reads"]

STRATEGIES = ("full_shard", "no_shard")
RECOMPUTE = ("none", "block")

Compute: TypeAlias = "Forward | Recompute | Loss | Backward | Evaluate | Predict"


@dataclass(frozen=True)
class Settings:
    """What shapes a step.

    Attributes:
        strategy: ``full_shard`` (ZeRO-3) or ``no_shard`` (replicated; Rajbhandari et al. 2020, section 5).
        prefetch: units gathered ahead of the one that computes.
        recompute: ``none``, or ``block``: stages between the first and the loss keep only their input
            (Chen et al. 2016).
        micros: micro-batches of this rank in a step.
    """

    strategy: str = "full_shard"
    prefetch: int = 1
    recompute: str = "none"
    micros: int = 1

    def __post_init__(self) -> None:
        for name, value, known in (
            ("shard.strategy", self.strategy, STRATEGIES),
            ("shard.recompute", self.recompute, RECOMPUTE),
        ):
            if value not in known:
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
        if self.prefetch < 0:
            raise ConfigError(f"shard.prefetch is {self.prefetch}; it must be 0 or more")
        if self.micros < 1:
            raise ConfigError(f"a rank has {self.micros} micro-batches; it needs at least one")


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
    for micro in range(settings.micros):
        computes += _micro_batch(outline, micro, settings.recompute == "block")
    steps = _with_reductions(outline, computes, settings)
    if settings.strategy == "full_shard":
        steps = _with_gathers(outline, steps, settings.prefetch)
    steps.append(Agree())
    for unit in outline.units:
        if settings.strategy == "no_shard":
            steps.append(Replicate(unit.name))
        steps.append(Update(unit.name))
    return tuple(steps)


def build_forward(
    outline: Outline, settings: Settings, last: type[Evaluate] | type[Predict]
) -> tuple[Instruction, ...]:
    """Return a pass without gradients that ends each micro-batch in ``last``."""
    computes: list[Instruction] = []
    for micro in range(settings.micros):
        computes += [Forward(stage.name, micro, keep=False) for stage in outline.stages[:-1]]
        computes.append(last(outline.stages[-1].name, micro))
    if settings.strategy == "full_shard":
        computes = _with_gathers(outline, computes, settings.prefetch)
    return tuple(computes)


def _micro_batch(outline: Outline, micro: int, recompute: bool) -> list[Compute]:
    *inner, head = outline.stages
    again = {stage.name for stage in inner[1:]} if recompute else set()
    computes: list[Compute] = [Forward(stage.name, micro, stage.name not in again) for stage in inner]
    written: set[tuple[str, str]] = set()

    def adds(params: Sequence[tuple[str, str]]) -> tuple[str, ...]:
        """The first gradient of a parameter in a micro-batch is written, later ones are added."""
        repeated = tuple(name for unit, name in params if (unit, name) in written)
        written.update(params)
        return repeated

    computes.append(Loss(head.name, micro, adds(head.params)))
    for stage in reversed(inner):
        if stage.name in again:
            computes.append(Recompute(stage.name, micro))
        computes.append(Backward(stage.name, micro, adds(stage.params)))
    return computes


def _with_reductions(outline: Outline, computes: list[Compute], settings: Settings) -> list[Instruction]:
    """Put Reduce after the last touch of a gradient in its micro-batch, and Absorb where the notes say."""
    touches = [
        outline.stage(c.stage).gradient_units if isinstance(c, Loss | Backward) else () for c in computes
    ]
    last = {(c.micro, unit): i for i, c in enumerate(computes) for unit in touches[i]}
    steps: list[Instruction] = []
    pending: str | None = None
    for i, compute in enumerate(computes):
        if pending in touches[i]:
            steps.append(Absorb(str(pending)))
            pending = None
        steps.append(compute)
        for unit in touches[i]:
            if last[compute.micro, unit] != i:
                continue
            if pending is not None:
                steps.append(Absorb(pending))
            steps.append(Reduce(unit, add=compute.micro > 0))
            pending = unit
            if settings.prefetch == 0:
                steps.append(Absorb(unit))
                pending = None
    if pending is not None:
        steps.append(Absorb(pending))
    return steps


def _with_gathers(outline: Outline, steps: list[Instruction], prefetch: int) -> list[Instruction]:
    """Put Gather, Await and Release around what reads units."""
    kept = {unit.name for unit in outline.units if unit.keep}
    readers = [(i, units) for i, step in enumerate(steps) if (units := reads(outline, step))]
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, units in readers:
        for unit in units:
            first.setdefault(unit, i)
            last[unit] = i
    streams = [(i, [u for u in units if u not in kept]) for i, units in readers]
    streams = [(i, units) for i, units in streams if units]
    different = len({unit for _, units in streams for unit in units})
    windows = {i: _window(streams, n, prefetch, different) for n, (i, _) in enumerate(streams)}
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
            done += [u for u in live if u not in kept and u not in following[i]]
        for unit in done:
            result.append(Release(unit))
            live.remove(unit)
            arrived.discard(unit)
        if prefetch > 0:
            issue(following.get(i, []))
    return result


def _window(streams: list[tuple[int, list[str]]], start: int, prefetch: int, different: int) -> list[str]:
    """Return the units of stream ``start`` and the next ``prefetch`` others; there are ``different`` ones in all."""
    window = list(streams[start][1])
    size = min(len(window) + prefetch, different)
    for later in range(start + 1, len(streams)):  # no slice: it would copy the rest of the step for every reader
        for unit in streams[later][1]:
            if len(window) >= size:
                return window
            if unit not in window:
                window.append(unit)
    return window
