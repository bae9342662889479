"""All memory of one rank's engine, reserved in one place: by the engine, and by its plan on shapes.

[Note: categories]
``parameters``, ``masters``, ``optimizer`` and ``gradients`` are held from step to step. ``gathered``, ``unreduced`` and
``staging`` share one region (:mod:`mpishard.shard.place`); what is reported of them is what they hold when they are
most together. Where ranks of a host share one gathered copy it lies in their pool, and a rank's ``gathered`` is its
part of that. ``saved`` and ``workspace`` are stacks. To ``workspace`` and ``staging`` also belongs what is reserved
for good: the tokens, losses, and two buffers of activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpishard.array.arena import REGION, Arena
from mpishard.array.constants import EXACT_WORDS
from mpishard.array.dtypes import Array, dtype
from mpishard.array.ops import Ops
from mpishard.array.pinned import PinnedHost
from mpishard.comm.base import Communicator
from mpishard.comm.pool import Pool
from mpishard.errors import EngineError
from mpishard.nn.layer import LossLayer
from mpishard.nn.model import Model
from mpishard.shard.layout import Layout
from mpishard.shard.offload import Slot, reserve_slots
from mpishard.shard.precision import Precision
from mpishard.shard.runner import Runner
from mpishard.shard.state import State, make_state
from mpishard.shard.steps import Steps
from mpishard.shard.strategy import Settings
from mpishard.shard.world import World

__all__ = ["Memory", "Moment", "pool_of", "reserve"]


@dataclass(frozen=True)
class Moment:
    """Bytes in use by category, at most, while an instruction ran; ``name`` is the instruction's."""

    name: str
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Memory:
    """What an engine works on.

    Attributes:
        region: the bytes that communication touches.
        pool: those that ranks share, where they do.
        logits: (1, outputs) predictions of one position.
        squares: words of the exact sum of squares.
        slots: where chunks of what is kept in host memory are while they are updated.
    """

    state: State
    runner: Runner
    region: Array
    pool: Array | None
    logits: Array
    squares: Array
    slots: tuple[Slot, ...]


def pool_of(comms: Sequence[Communicator], steps: Steps) -> Pool | None:
    """Return the memory in which the ranks of the first communicator share what they gather, where they do. Collective.

    Raises:
        ConfigError: on all ranks, when there is not as much.
    """
    return comms[0].pool(steps.pool * steps.sharers) if steps.sharers > 1 else None


def reserve(
    model: Model,
    layouts: Mapping[str, Layout],
    arena: Arena,
    ops: Ops,
    types: Precision,
    states: tuple[str, ...] | None,
    *,
    settings: Settings,
    world: World,
    steps: Steps,
    micro_batch: int,
    seed: int,
    lowest: int,
    pinned: PinnedHost | None = None,
) -> Memory:
    """Reserve everything.

    Args:
        states: what the optimiser keeps for each element; None where nothing is trained.
        steps: what is to be run.
        lowest: the first stage with a trainable parameter.
        pinned: host memory for masters and optimiser states; None to keep them with all else.
    """
    state = make_state(
        model, layouts, arena, ops, types, states or (), trained=states is not None, settings=settings, world=world,
        pinned=pinned,
    )  # fmt: skip
    slots = reserve_slots(state, arena, types) if pinned is not None else ()
    runner = Runner(
        model, ops, arena, types, micro_batch=micro_batch, seed=seed, rank=world.rank, size=world.size, lowest=lowest
    )
    place = arena.reserve(REGION, steps.region, dtype("uint8"))
    pool = arena.reserve_pool(steps.pool, steps.sharers)
    head = model.stages[-1]
    if not isinstance(head.layer, LossLayer):
        raise EngineError(f"the last stage, {head.name}, is no LossLayer")
    logits = arena.reserve("workspace", head.layer.outputs(), types.kind).reshape(1, -1)
    squares = arena.reserve("workspace", EXACT_WORDS, dtype("int64"))
    return Memory(state, runner, place, pool, logits, squares, slots)
