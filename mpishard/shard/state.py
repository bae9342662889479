"""What a rank holds between steps: its part of every unit's parameters, gradients and optimiser state.

Under ``full_shard`` a part is 1/N of the unit's flat buffer; under ``no_shard`` it is all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mpishard.array.arena import Arena
from mpishard.array.dtypes import Array
from mpishard.array.ops import Draw, Ops
from mpishard.array.random import stream
from mpishard.nn.model import Model, Unit
from mpishard.shard.layout import Layout, Piece
from mpishard.shard.precision import Precision

__all__ = ["State", "UnitState", "fingerprint", "initialise", "make_state", "own_pieces", "refresh"]


@dataclass(frozen=True)
class UnitState:
    """One unit's part on this rank.

    Attributes:
        start, stop: the elements of the flat buffer that this rank holds.
        own: those that it reduces: its 1/N, counted in the flat buffer.
        arrays: ``param`` and, where the model is trained, ``grad`` and the optimiser's states by name, each
            (stop - start,); ``cast``, the parameters in the narrower type that they are computed with, where that
            copy is kept.
    """

    unit: Unit
    layout: Layout
    start: int
    stop: int
    own: slice
    arrays: Mapping[str, Array]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The parts of parameters that lie in this rank's elements."""
        return self.layout.pieces(self.start, self.stop)

    def slice_of(self, name: str) -> Array:
        """Return this rank's 1/N of one of the arrays."""
        return self.arrays[name][self.own.start - self.start : self.own.stop - self.start]

    def refresh(self, ops: Ops) -> None:
        """Round parameters that have changed into their narrower copy, where there is one."""
        if "cast" in self.arrays:
            ops.copy(self.arrays["param"], self.arrays["cast"])

    def segments(self, decay: float) -> tuple[tuple[int, int, float], ...]:
        """Return (start, stop, decay) of the trainable elements."""
        return tuple((p.offset, p.end, decay if p.slot.decay else 0.0) for p in self.pieces if p.slot.trainable)


State = dict[str, UnitState]


def make_state(
    model: Model,
    layouts: Mapping[str, Layout],
    arena: Arena,
    ops: Ops,
    types: Precision,
    names: tuple[str, ...],
    *,
    trained: bool,
    sharded: bool,
    rank: int,
) -> State:
    """Reserve every unit's part, one block per kind, padding and all zero.

    Args:
        names: the optimiser's states.
        trained: hold gradients too.
        sharded: hold 1/N of each unit, else all of it.
    """
    sizes = {unit.name: (layouts[unit.name].shard if sharded else layouts[unit.name].total) for unit in model.units}
    total, wide = sum(sizes.values()), types.wide
    blocks = {"param": arena.reserve("masters" if types.mixed else "parameters", total, wide)}
    if types.mixed and not sharded:
        blocks |= {"cast": arena.reserve("parameters", total, types.kind)}
    if trained:
        blocks |= {"grad": arena.reserve("gradients", total, wide)}
    blocks |= {name: arena.reserve("optimizer", total, wide) for name in names}
    for block in blocks.values():
        ops.fill(block, 0.0)
    state: State = {}
    offset = 0
    for unit in model.units:
        flat, size = layouts[unit.name], sizes[unit.name]
        start = rank * flat.shard if sharded else 0
        own = slice(rank * flat.shard, (rank + 1) * flat.shard)
        arrays = {name: block[offset : offset + size] for name, block in blocks.items()}
        state[unit.name] = UnitState(unit, flat, start, start + size, own, arrays)
        offset += size
    return state


def refresh(state: State, ops: Ops) -> None:
    """Round parameters that were changed by other than the optimiser into their narrower copies."""
    for part in state.values():
        part.refresh(ops)


def initialise(state: State, ops: Ops, seed: int) -> None:
    """Draw this rank's part of the initial values; no number depends on the number of ranks."""
    for part in state.values():
        specs = {spec.name: spec for spec in part.unit.specs}
        for piece in part.pieces:
            spec = specs[piece.slot.name]
            out = part.arrays["param"][piece.offset : piece.end]
            if spec.std > 0.0:
                ops.normal(out, Draw(seed, stream(part.unit.prefix + spec.name), 0, piece.start), spec.std)
            else:
                ops.fill(out, spec.value)
    refresh(state, ops)


def own_pieces(state: State) -> Iterator[tuple[UnitState, Piece]]:
    """Yield what this rank's 1/N of each unit holds; offsets count from the start of that 1/N."""
    for part in state.values():
        for piece in part.layout.pieces(part.own.start, part.own.stop):
            yield part, piece


def fingerprint(state: State, ops: Ops, names: tuple[str, ...]) -> int:
    """Return this rank's share of the checksum of parameters and optimiser states.

    Sums of shares modulo 2**64 name the values of every parameter by name and place, and nothing else: no
    padding, no offset, no number of ranks.
    """
    total = 0
    for part, piece in own_pieces(state):
        for name in ("param", *names):
            values = part.slice_of(name)[piece.offset : piece.end]
            label = stream(f"{name}:{part.unit.prefix}{piece.slot.name}")
            total += ops.fingerprint(values, Draw(0, label, 0, piece.start))
    return total % 2**64
