"""Updates, and masters and optimiser states in host memory, which pass through the device in chunks meanwhile.

[Note: a chunk's way]
A unit's part is cut into chunks. An Update copies each into a slot of device memory, updates it there beside the
gradient and the narrow parameters, which stay on the device, and copies it back. There are two slots, which the chunks
of all units take in turn: while one is updated, the next comes in and the one before leaves, across units too. The host
waits for none of this; who reads the arrays in host memory waits (:meth:`~mpishard.shard.state.UnitState.home`). Each
chunk has the same slot in every step, so it comes in behind its own way out. An update is elementwise, so the bits are
those of an update in one piece. (Ren et al. 2021 keep the same states in host memory, but update them there.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from mpishard.array.arena import Arena
from mpishard.array.dtypes import Array
from mpishard.array.ops import Ops
from mpishard.array.pinned import SLOTS, Pairs, PinnedHost
from mpishard.comm.base import Communicator
from mpishard.comm.together import together
from mpishard.errors import ConfigError
from mpishard.shard.precision import Precision
from mpishard.shard.results import Optimizer
from mpishard.shard.state import State, UnitState

__all__ = ["ELEMENTS", "OFFLOAD", "Slot", "Updates", "pinned_for", "reserve_slots", "take_together"]

OFFLOAD = ("none", "optimizer")
#: of a chunk: a copy takes far longer than to begin it, and slots are small beside any model that needs them
ELEMENTS = 1 << 20

#: device arrays of one chunk, by name
Slot: TypeAlias = "Mapping[str, Array]"
_Segments: TypeAlias = "tuple[tuple[int, int, float], ...]"


def pinned_for(offload: str, ops: Ops) -> PinnedHost | None:
    """Return the host memory that ``offload`` needs, of which nothing is taken yet.

    Raises:
        ConfigError: it is unknown, or there is no device.
    """
    if offload not in OFFLOAD:
        raise ConfigError(f"offload is {offload!r}; it must be one of {', '.join(OFFLOAD)}")
    if offload == "none":
        return None
    found = ops.pinned_host()
    if found is None:
        raise ConfigError(
            f"offload is {offload!r} and arrays are in host memory already ({ops.device}); leave it out, or compute on "
            "a GPU"
        )
    return found


def take_together(comm: Communicator, pinned: PinnedHost, nbytes: int) -> None:
    """Take the host memory. Collective.

    Raises:
        ConfigError: on all ranks, when one of them cannot have it.
    """

    def take() -> None:
        try:
            pinned.take(nbytes)
        except MemoryError as error:
            raise ConfigError(
                f"rank {comm.rank} cannot keep the optimiser in host memory ({error}); use more ranks, or leave "
                "offload out"
            ) from None

    together(comm, take)


def reserve_slots(state: State, arena: Arena, types: Precision) -> tuple[Slot, ...]:
    """Reserve device memory for the chunks on their way; none where nothing is updated, or all of it on the device."""
    trained = [part for part in state.values() if part.trained]
    names = sorted({name for part in trained for name in part.offloaded})
    if not names:
        return ()
    count = min(ELEMENTS, max(part.stop - part.start for part in trained))
    return tuple({name: arena.reserve("staging", count, types.wide) for name in names} for _ in range(SLOTS))


class _Chunk(NamedTuple):
    """Elements ``start`` to ``stop`` of a unit's part.

    Attributes:
        slot: number of the slot that ``pairs`` pass through: (host, device) arrays.
        arrays: all arrays, on the device.
    """

    start: int
    stop: int
    slot: int
    pairs: Pairs
    arrays: Mapping[str, Array]


class Updates:
    """Updates units: in place, or in chunks where the optimiser's states are in host memory.

    Args:
        slots: as :func:`reserve_slots` made them; none to update in place.
        ops: operations on the device.
    """

    def __init__(
        self, state: State, slots: tuple[Slot, ...], pinned: PinnedHost | None, ops: Ops, optimizer: Optimizer
    ) -> None:
        self._state, self._pinned, self._ops, self._optimizer = state, pinned, ops, optimizer
        self._chunks: dict[str, list[_Chunk]] = {}
        number = 0
        for name, part in state.items():
            if not part.trained:
                continue
            size = part.stop - part.start
            if not slots:
                self._chunks[name] = [_Chunk(0, size, 0, (), part.arrays)]
                continue
            most = next(iter(slots[0].values())).size
            spans = [(start, min(start + most, size)) for start in range(0, size, most)]
            # Where nothing is to be updated nothing is copied.
            spans = [span for span in spans if _clipped(part.segments(0.0), *span)]
            places = [(number + i) % SLOTS for i in range(len(spans))]
            self._chunks[name] = [_chunk(part, *span, at, slots[at]) for span, at in zip(spans, places, strict=True)]
            number += len(spans)

    def run(self, unit: str, factor: float, lr: float, count: int) -> None:
        """Update a unit; on a device, returns when all is queued."""
        optimizer, pinned = self._optimizer, self._pinned
        segments = self._state[unit].segments(optimizer.decay)
        for chunk in self._chunks[unit]:
            if pinned is not None and chunk.pairs:
                pinned.copy_in(chunk.slot, chunk.pairs)
            parts = _clipped(segments, chunk.start, chunk.stop)
            optimizer.update(self._ops, chunk.arrays, parts, factor, lr, count)
            if "cast" in chunk.arrays and not getattr(optimizer, "writes_cast", False):
                self._ops.copy(chunk.arrays["param"], chunk.arrays["cast"])
            if pinned is not None and chunk.pairs:
                pinned.copy_out(chunk.slot, chunk.pairs)


def _chunk(part: UnitState, start: int, stop: int, number: int, slot: Slot) -> _Chunk:
    pieces = {name: array[start:stop] for name, array in part.arrays.items()}
    inside = {name: array[: stop - start] for name, array in slot.items()}
    return _Chunk(start, stop, number, tuple((pieces[name], inside[name]) for name in inside), pieces | inside)


def _clipped(segments: _Segments, start: int, stop: int) -> _Segments:
    """Return what of the segments is between two elements, counted from the first."""
    return tuple(
        (max(first, start) - start, min(last, stop) - start, decay)
        for first, last, decay in segments
        if first < stop and last > start
    )
