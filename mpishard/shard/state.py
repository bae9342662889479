"""What a rank holds between steps: its part of every unit's parameters, gradients and optimiser state.

A part is 1/N of the unit's flat buffer, 1/G of it in groups of G ranks, or all of it (``no_shard``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mpishard.array.arena import Arena
from mpishard.array.dtypes import Array
from mpishard.array.ops import Draw, Ops
from mpishard.array.pinned import PinnedHost
from mpishard.array.random import stream
from mpishard.nn.model import Model, Unit
from mpishard.shard.layout import Layout, Piece
from mpishard.shard.precision import Precision
from mpishard.shard.strategy import Settings
from mpishard.shard.world import World

__all__ = ["State", "UnitState", "fingerprint", "initialise", "make_state", "own_pieces", "refresh"]


@dataclass(frozen=True)
class UnitState:
    """One unit's part on this rank.

    Attributes:
        start, stop: the elements of the flat buffer that this rank holds.
        own: its 1/N of them, which it alone counts and saves; counted in the flat buffer.
        arrays: ``param`` and, where it is trained, ``grad`` and the optimiser's states by name, each (stop - start,);
            ``cast``, the parameters in the narrower type that they are computed with, where that copy is kept.
        resident: all of the unit's parameters (total,) in the type that is computed with, where a rank keeps them;
            ``param`` or ``cast`` is the part of it from ``start`` to ``stop``.
        pinned: where the arrays called ``offloaded`` are, host memory beside the device.
    """

    unit: Unit
    layout: Layout
    start: int
    stop: int
    own: slice
    arrays: Mapping[str, Array]
    resident: Array | None = None
    pinned: PinnedHost | None = None
    offloaded: frozenset[str] = frozenset()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The parts of parameters that lie in this rank's elements."""
        return self.layout.pieces(self.start, self.stop)

    @property
    def trained(self) -> bool:
        """Whether there are gradients."""
        return "grad" in self.arrays

    @property
    def kept(self) -> Array:
        """This rank's part of the parameters in the type that is computed with, where it is kept; else ``param``."""
        return self.arrays["cast" if "cast" in self.arrays else "param"]

    def slice_of(self, name: str) -> Array:
        """Return this rank's 1/N of one of the arrays."""
        return self.arrays[name][self.own.start - self.start : self.own.stop - self.start]

    def home(self, name: str, ops: Ops) -> Ops:
        """Return the operations on an array: ``ops``, those of the device, or those of host memory.

        Whoever reads or writes an array asks for them first: returns when no copy of it is under way.
        """
        if self.pinned is None or name not in self.offloaded:
            return ops
        self.pinned.settle()
        return self.pinned.ops

    def refresh(self, ops: Ops) -> None:
        """Round parameters that have changed into their narrower copy, where there is one."""
        if "cast" not in self.arrays:
            return
        param, cast, home = self.arrays["param"], self.arrays["cast"], self.home("param", ops)
        if home is ops:
            ops.copy(param, cast)
            return
        for start in range(0, param.size, _ROUNDED):
            there = cast[start : start + _ROUNDED]
            here = ops.host_like(there)
            home.copy(param[start : start + _ROUNDED], here)
            ops.upload(here, there)

    def segments(self, decay: float) -> tuple[tuple[int, int, float], ...]:
        """Return (start, stop, decay) of the trainable elements."""
        return tuple((p.offset, p.end, decay if p.slot.decay else 0.0) for p in self.pieces if p.slot.trainable)


State = dict[str, UnitState]
#: elements rounded at a time on their way from host memory to a device
_ROUNDED = 1 << 20


def make_state(
    model: Model,
    layouts: Mapping[str, Layout],
    arena: Arena,
    ops: Ops,
    types: Precision,
    names: tuple[str, ...],
    *,
    trained: bool,
    settings: Settings,
    world: World,
    pinned: PinnedHost | None = None,
) -> State:
    """Reserve every unit's part, one block per kind, padding and all zero.

    Args:
        names: the optimiser's states.
        trained: hold gradients too.
        pinned: takes the optimiser's states, and the parameters where they are kept in a wider type than they are
            computed with.
    """
    flats = [layouts[unit.name] for unit in model.units]
    held = [flat.total if settings.replicated else flat.shard * world.groups for flat in flats]
    learning = [trained and any(spec.trainable for spec in unit.specs) for unit in model.units]
    everything, total, taught = (
        sum(flat.total for flat in flats),
        sum(held),
        sum(size for size, learns in zip(held, learning, strict=True) if learns),
    )
    blocks: dict[str, Array] = {}
    offloaded = frozenset((*names, *(("param",) if types.mixed else ()))) if pinned is not None else frozenset()

    def reserve(name: str, category: str, count: int) -> None:
        if pinned is not None and name in offloaded:
            blocks[name] = pinned.reserve(count, types.wide)
            pinned.ops.fill(blocks[name], 0.0)
        else:
            blocks[name] = arena.reserve(category, count, types.kind if name in ("resident", "cast") else types.wide)
            ops.fill(blocks[name], 0.0)

    if settings.resident:
        reserve("resident", "parameters", everything)
    elif "param" in offloaded:
        reserve("cast", "parameters", total)
    if types.mixed or not settings.resident:
        reserve("param", "masters" if types.mixed else "parameters", total)
    if trained:
        reserve("grad", "gradients", taught)
    for name in names:
        reserve(name, "optimizer", taught)
    state: State = {}
    at = dict.fromkeys(blocks, 0)

    def take(name: str, count: int) -> Array:
        at[name] += count
        return blocks[name][at[name] - count : at[name]]

    for unit, flat, size, learns in zip(model.units, flats, held, learning, strict=True):
        start = 0 if settings.replicated else world.part * size
        own = slice(world.own * flat.shard, (world.own + 1) * flat.shard)
        arrays: dict[str, Array] = {}
        resident = take("resident", flat.total) if settings.resident else None
        if resident is not None:
            arrays["cast" if types.mixed else "param"] = resident[start : start + size]
        if "cast" in blocks:
            arrays["cast"] = take("cast", size)
        if "param" not in arrays:
            arrays["param"] = take("param", size)
        if learns:
            arrays |= {name: take(name, size) for name in ("grad", *names)}
        state[unit.name] = UnitState(unit, flat, start, start + size, own, arrays, resident, pinned, offloaded)
    return state


def refresh(state: State, ops: Ops) -> None:
    """Round parameters that were changed by other than the optimiser into their narrower copies.

    Where ranks keep all parameters and each changes a part, call the engine's ``refresh`` instead, which gathers them.
    """
    for part in state.values():
        part.refresh(ops)


def initialise(state: State, ops: Ops, seed: int) -> None:
    """Draw this rank's part of the initial values; no number depends on the number of ranks."""
    for part in state.values():
        specs = {spec.name: spec for spec in part.unit.specs}
        for piece in part.pieces:
            spec = specs[piece.slot.name]
            out = part.arrays["param"][piece.offset : piece.end]
            home = part.home("param", ops)
            if spec.std > 0.0:
                home.normal(out, Draw(seed, stream(part.unit.prefix + spec.name), 0, piece.start), spec.std)
            else:
                home.fill(out, spec.value)
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
        for name in ("param", *(names if part.trained else ())):
            values = part.slice_of(name)[piece.offset : piece.end]
            label = stream(f"{name}:{part.unit.prefix}{piece.slot.name}")
            total += part.home(name, ops).fingerprint(values, Draw(0, label, 0, piece.start))
    return total % 2**64
