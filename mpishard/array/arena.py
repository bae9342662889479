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

__all__ = ["CATEGORIES", "STACKS", "Arena", "Stack"]

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

    def frame(self) -> _Mark:
        """Take back at the end of a ``with`` block what was pushed inside it."""
        return _Mark(self)


class Arena:
    """One rank's memory.

    Args:
        peaks: bytes of the two stacks; None while a plan is being made (memory without bound, on shapes only).
        poison: fill with NaN whatever is taken back.
    """

    def __init__(self, ops: Ops, peaks: Mapping[str, int] | None, poison: bool = False) -> None:
        self._ops = ops
        self.poison = poison
        self._held: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self._held["workspace"] = ops.own_bytes
        self._planning = peaks is None
        sizes = dict.fromkeys(STACKS, min(_UNPLANNED, ops.room // 4)) if peaks is None else peaks
        self._stacks = {
            name: Stack(name, ops.empty(sizes[name], _BYTES), ops, poison) for name in STACKS
        }
        self.saved, self.workspace = self._stacks["saved"], self._stacks["workspace"]
        if poison:
            for name, stack in self._stacks.items():
                stack.top = sizes[name]
                stack.cut(0)

    def reserve(
        self, category: str, count: int, dtype: DType, allocate: Callable[[int, DType], Array] | None = None
    ) -> Array:
        """Return a 1-D array that lives as long as the arena, from ``allocate`` where a transport wants to own it."""
        array = (allocate or self._ops.empty)(count, dtype)
        self._held[category] += array.nbytes
        if self.poison:
            self.spoil(array)
        return array

    def spoil(self, array: Array) -> None:
        """Fill an array with NaN where poisoning is on."""
        if self.poison:
            self._ops.fill(array.view(_BYTES), _NAN)

    def peaks(self) -> dict[str, int]:
        """Return the bytes that the stacks have needed at most."""
        return {name: stack.peak for name, stack in self._stacks.items()}

    def held(self) -> dict[str, int]:
        """Return bytes by category; a stack holds what was planned for it, or its peak while a plan is made."""
        held = dict(self._held)
        for name, stack in self._stacks.items():
            held[name] += stack.peak if self._planning else stack.capacity
        return held
