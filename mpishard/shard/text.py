"""A schedule as people read it, and what it sends and gathers. Nothing runs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
    Predict,
    Recompute,
    Reduce,
    Release,
    Replicate,
    Update,
    short,
)

__all__ = ["MEANINGS", "Sent", "hideable", "legend", "lines", "most_gathered", "sent"]

#: what each instruction does, in a line
MEANINGS: dict[type[Instruction], str] = {
    Gather: "start the all-gather of a unit's shards into a buffer",
    Await: "wait until the unit has arrived; from here on it may be read",
    Forward: "compute a stage; where a backward follows, keep what it needs (its input alone, to recompute)",
    Recompute: "compute a stage again from its input, to keep what its backward needs",
    Loss: "head and loss, forward and backward in one",
    Backward: "gradients of a stage: of its parameters into the unit's gradient buffer, and of its input",
    Evaluate: "head and loss, without gradients",
    Predict: "the predictions at one position",
    Release: "the unit is read no more; its buffer is free",
    Reduce: "start the reduce-scatter of a unit's gradient buffer into the shards (the first writes, later ones add)",
    Absorb: "wait until it is reduced; the gradient buffer is free",
    AllReduce: "add up the groups' sums of a unit's gradient",
    Agree: "one record from every rank: norm, loss, whether all are well and have data",
    Replicate: "all-gather the reduced slices of a unit's gradient",
    Update: "clip, and AdamW on what this rank holds of the unit",
}
_COMPUTES = (Forward, Recompute, Loss, Backward, Evaluate, Predict)


@dataclass(frozen=True)
class Sent:
    """Collectives that a rank takes part in, and the bytes that it sends to the others in them."""

    calls: int
    bytes: int


def lines(schedule: Sequence[Instruction], *, every: bool = False, width: int = 110) -> list[str]:
    """Return a schedule as lines, one for each computing instruction.

    A line begins with what the instruction waits for and ends with what follows it. What comes before the first of
    them, and from Agree on, has lines of its own. Longer lines go on below, indented.

    Args:
        every: write all micro-batches; else those that repeat the one before are told in a line.
        width: characters of a line, where its names are not longer.
    """
    written = []
    before: list[str] = []
    repeated: list[int] = []

    def tell() -> None:
        if repeated:
            first, last = repeated[0], repeated[-1]
            which = f"micro-batch {first}" if first == last else f"micro-batches {first} to {last}"
            written.append(f"... {which} as micro-batch {first - 1} ...")
            repeated.clear()

    for micro, groups in _by_micro(_groups(schedule)):
        plain = [" ".join(short(_first(step)) for step in group) for group in groups]
        if micro is not None and not every and plain == before:
            repeated.append(micro)
            continue
        tell()
        before = plain
        for group in groups:
            text = " ".join(short(step).replace(", ", ",\0") for step in group)
            wrapped = [text]
            if len(text) > width:
                wrapped = textwrap.wrap(
                    text, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
                )
            written += [line.replace("\0", " ") for line in wrapped]
    tell()
    return written


def legend(schedule: Sequence[Instruction]) -> list[tuple[str, str]]:
    """Return (name, meaning) of the instructions that a schedule has."""
    kinds = {type(step) for step in schedule}
    return [(kind.__name__, meaning) for kind, meaning in MEANINGS.items() if kind in kinds]


def sent(
    schedule: Sequence[Instruction], sizes: Mapping[str, int], ranks: int, record: int
) -> dict[type[Instruction], Sent]:
    """Return what a rank sends, by the instruction that sends it.

    Args:
        sizes: unit -> bytes of its flat buffer, of which each rank holds 1 / ranks.
        record: bytes of the record of an Agree.
    """
    totals: dict[type[Instruction], Sent] = {}
    for step in schedule:
        if not isinstance(step, Gather | Reduce | Replicate | Agree):
            continue
        each = record if isinstance(step, Agree) else sizes[step.unit] // ranks
        so_far = totals.get(type(step), Sent(0, 0))
        totals[type(step)] = Sent(so_far.calls + 1, so_far.bytes + each * (ranks - 1))
    return totals


def hideable(schedule: Sequence[Instruction], sizes: Mapping[str, int]) -> float:
    """Return the share of what a schedule communicates that has something computed between its start and its wait.

    Args:
        sizes: unit -> how much its collectives carry, in any unit of measure.
    """
    total = hidden = 0
    open_: dict[tuple[type[Instruction], str], bool] = {}
    ends = {Await: Gather, Absorb: Reduce}
    for step in schedule:
        if isinstance(step, Gather | Reduce):
            open_[type(step), step.unit] = False
        elif isinstance(step, Await | Absorb):
            size = sizes[step.unit]
            total += size
            hidden += size if open_.pop((ends[type(step)], step.unit), False) else 0
        elif isinstance(step, AllReduce | Replicate):
            total += sizes[step.unit]
        elif isinstance(step, (*_COMPUTES, Update)):
            open_ = dict.fromkeys(open_, True)
    return hidden / total if total else 1.0


def most_gathered(schedule: Sequence[Instruction], sizes: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """Return the units that are gathered or in flight where they are largest together, and their size."""
    live: list[str] = []
    most: tuple[str, ...] = ()
    largest = 0
    for step in schedule:
        if isinstance(step, Gather):
            live.append(step.unit)
            if (together := sum(sizes[unit] for unit in live)) > largest:
                most, largest = tuple(live), together
        elif isinstance(step, Release):
            live.remove(step.unit)
    return most, largest


def _groups(schedule: Sequence[Instruction]) -> list[list[Instruction]]:
    """Cut a schedule into what stands on a line."""
    groups: list[list[Instruction]] = [[]]
    for step in schedule:
        if isinstance(step, Agree):
            groups.append([])
        elif isinstance(step, _COMPUTES):
            waits: list[Instruction] = []
            while len(groups) > 1 and groups[-1] and isinstance(groups[-1][-1], Await):
                waits.insert(0, groups[-1].pop())
            groups.append(waits)
        groups[-1].append(step)
    return [group for group in groups if group]


def _by_micro(groups: list[list[Instruction]]) -> Iterator[tuple[int | None, list[list[Instruction]]]]:
    """Yield the lines of each micro-batch; those that belong to none come with None."""
    part: list[list[Instruction]] = []
    current: int | None = None
    for group in groups:
        micro = next((step.micro for step in group if isinstance(step, _COMPUTES)), None)
        if part and micro != current:
            yield current, part
            part = []
        current = micro
        part.append(group)
    if part:
        yield current, part


def _first(step: Instruction) -> Instruction:
    """Return the instruction as it is in micro-batch 0."""
    return replace(step, micro=0) if isinstance(step, _COMPUTES) else step
