"""All memory that a step uses, by category, taken before the first step.

[Note: three rules that make stacks enough]
1. The caller allocates every output, so it decides its lifetime: a stage's output lies below its saved frame.
2. What a communication engine touches is never on a stack; it is placed from its start to its completion.
3. All else is a frame: on ``saved`` until backward has run, or on ``workspace`` for one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import TracebackType

import numpy as np

from mpishard.array.dtypes import Array, DType
from mpishard.array.ops import Ops
from mpishard.errors import ArenaError

__all__ = ["CATEGORIES", "POOLED", "REGION", "SENT", "STACKS", "Arena", "Stack"]

CATEGORIES = (
    "parameters",
    "masters",
    "optimizer",
    "gradients",
    "gathered",
    "unreduced",
    "saved",
    "workspace",
    "staging",
)
STACKS = ("saved", "workspace")
#: the block that transports read and write, in which several categories lie
REGION = "region"
#: the category of what ranks share
POOLED = "gathered"
#: blocks of which collectives read or write parts
SENT = (REGION, "parameters", "gradients")
_UNPLANNED = 1 << 40  # bytes of each stack while a plan is being made, where the address space has room
_BYTES = np.dtype(np.uint8)
_NAN = 255  # every byte of it: a NaN in each floating type, -1 in signed integers


class _Mark:
    """A frame of a stack as a ``with`` block."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._top = stack.top

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.cut(self._top)


class Stack:
    """Memory given out from the bottom up and taken back from the top."""

    def __init__(self, category: str, base: Array, ops: Ops, poison: bool) -> None:
        self.category = category
        self.top = 0
        self.peak = 0
        self._base = base
        self._ops = ops
        self._poison = poison

    @property
    def capacity(self) -> int:
        """Bytes of the stack."""
        return int(self._base.size)

    def push(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return an uninitialised array of the top of the stack, at a multiple of 64 bytes.

        Raises:
            ArenaError: the step uses more than was planned.
        """
        start = self.top
        end = start + math.prod(shape) * dtype.itemsize
        self.top = -(-end // 64) * 64
        if self.top > self._base.size:
            raise ArenaError(
                f"{self.category}: {self.top} bytes are needed and {self._base.size} were planned; "
                "the step that runs is not the step that was planned"
            )
        self.peak = max(self.peak, self.top)
        array: Array = self._base[start:end].view(dtype).reshape(shape)
        return array

    def cut(self, top: int) -> None:
        """Take back everything above ``top``, an earlier value of :attr:`top`."""
        if self._poison and self.top > top:
            self._ops.fill(self._base[top : self.top], _NAN)
        self.top = top

    def restart(self) -> None:
        """Forget the peak that there was."""
        self.peak = self.top

    def frame(self) -> _Mark:
        """Take back at the end of a ``with`` block what was pushed inside it."""
        return _Mark(self)


class Arena:
    """One rank's memory, one block for each category.

    Args:
        peaks: bytes of the two stacks; None while a plan is being made (memory without bound, on shapes only).
        poison: fill with NaN whatever is taken back.
        reserved: bytes by category, and of the region, that :meth:`reserve` will be asked for; without it each reserve
            takes a block of its own.
        allocate: takes the blocks called SENT, which a transport may want to own.
        pool: the bytes that several ranks share.
    """

    def __init__(
        self,
        ops: Ops,
        peaks: Mapping[str, int] | None,
        poison: bool = False,
        reserved: Mapping[str, int] | None = None,
        allocate: Callable[[int, DType], Array] | None = None,
        pool: Array | None = None,
    ) -> None:
        self._ops, self._pool = ops, pool
        self.poison = poison
        self._reserved: dict[str, int] = dict.fromkeys((*CATEGORIES, REGION), 0)
        self._planning = peaks is None
        sizes = dict.fromkeys(STACKS, min(_UNPLANNED, ops.room // 4)) if peaks is None else peaks
        self._blocks: dict[str, Array] = {}
        for name, size in (reserved or {}).items():
            if name == POOLED:
                continue
            take = allocate if allocate is not None and name in SENT else ops.empty
            self._blocks[name] = take(size + sizes.get(name, 0), _BYTES)
        self._stacks = {name: Stack(name, self._stack_memory(name, sizes[name]), ops, poison) for name in STACKS}
        self.saved, self.workspace = self._stacks["saved"], self._stacks["workspace"]
        if poison:
            for name, stack in self._stacks.items():
                stack.top = sizes[name]
                stack.cut(0)

    def _stack_memory(self, name: str, size: int) -> Array:
        block = self._blocks.get(name)
        return self._ops.empty(size, _BYTES) if block is None else block[block.size - size :]

    def reserve(self, category: str, count: int, dtype: DType) -> Array:
        """Return a 1-D array at a multiple of 64 bytes that lives as long as the arena.

        Raises:
            ArenaError: the step uses more than was planned.
        """
        nbytes = count * dtype.itemsize
        start = self._reserved[category]
        self._reserved[category] = end = -(-(start + nbytes) // 64) * 64
        block = self._blocks.get(category)
        if block is None:
            array = self._ops.empty(count, dtype)
        else:
            planned = block.size - (self._stacks[category].capacity if category in self._stacks else 0)
            if end > planned:
                raise ArenaError(f"{category}: {end} bytes are to be reserved and {planned} were planned")
            array = block[start : start + nbytes].view(dtype)
        self.spoil(array)
        return array

    def reserve_pool(self, nbytes: int, sharers: int) -> Array | None:
        """Return ``nbytes * sharers`` bytes that ranks share; ``nbytes`` are this rank's. None of no bytes."""
        if not nbytes:
            return None
        self._reserved[POOLED] += nbytes
        return self._ops.empty(nbytes * sharers, _BYTES) if self._pool is None else self._pool

    def spoil(self, array: Array) -> None:
        """Fill an array with NaN where poisoning is on."""
        if self.poison:
            self._ops.fill(array.view(_BYTES), _NAN)

    def peaks(self) -> dict[str, int]:
        """Return the bytes that the stacks have needed at most."""
        return {name: stack.peak for name, stack in self._stacks.items()}

    def reserved(self) -> dict[str, int]:
        """Return the bytes that :meth:`reserve` has given out, by category, and of the region."""
        return dict(self._reserved)

    def held(self) -> dict[str, int]:
        """Return bytes by category, and of the region; a stack holds what was planned for it, or its peak while a plan
        is made."""
        held = dict(self._reserved)
        held["workspace"] += self._ops.own_bytes
        for name, stack in self._stacks.items():
            held[name] += stack.peak if self._planning else stack.capacity
        return held
