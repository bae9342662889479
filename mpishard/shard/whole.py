"""One parameter whole, on every rank, put together from the ranks' shards."""

from __future__ import annotations

from mpishard.array.dtypes import Array
from mpishard.array.ops import Ops
from mpishard.comm.base import Communicator
from mpishard.comm.together import same_on_all_ranks
from mpishard.errors import ConfigError
from mpishard.shard.layout import Slot
from mpishard.shard.state import State, UnitState
from mpishard.shard.world import World

__all__ = ["parameter_names", "whole_parameter"]


def parameter_names(state: State) -> tuple[str, ...]:
    """Return the public names (unit prefix and name), unit by unit, tied parameters once."""
    return tuple(_name(part, slot) for part in state.values() for slot in part.layout.slots)


def whole_parameter(state: State, comm: Communicator, ops: Ops, name: str, world: World) -> Array:
    """Return a fresh host array with the values of a parameter, in its shape. Collective; every rank gets all of it.

    Shards are sent one after another, so nothing but the result is held.

    Raises:
        ConfigError: on every rank, when no parameter has the name or the ranks ask for different ones.
    """
    same_on_all_ranks(comm, [f"parameter {name}"])
    found = [(part, slot) for part in state.values() for slot in part.layout.slots if _name(part, slot) == name]
    if not found:
        names = parameter_names(state)
        some = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise ConfigError(f"the model has no parameter {name!r}; it has {some}")
    ((part, slot),) = found
    values, home = part.arrays["param"], part.home("param", ops)
    flat = ops.empty(slot.size, values.dtype)
    for piece in part.pieces:
        if piece.slot is slot:
            here, there = values[piece.offset : piece.end], flat[piece.start : piece.stop]
            (ops.copy if home is ops else ops.upload)(here, there)
    if values.size < part.layout.total:  # sharded: the others hold the rest
        for own in range(comm.size):
            for piece in part.layout.pieces(own * part.layout.shard, (own + 1) * part.layout.shard):
                if piece.slot is slot:
                    comm.broadcast(flat[piece.start : piece.stop], world.owner(own))
    return ops.fetch(flat).reshape(slot.shape)


def _name(part: UnitState, slot: Slot) -> str:
    return part.unit.prefix + slot.name
