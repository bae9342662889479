"""The memory in use while a step runs, by category: measured where :mod:`mpishard.shard.forecast` predicts.

Stacks tell their own peaks; buffers of the region are counted from the instruction that begins their life to the one
that ends it, with the sizes of the arrays that were bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mpishard.array.arena import CATEGORIES, POOLED, STACKS, Arena
from mpishard.shard.memory import Moment
from mpishard.shard.place import KINDS, aligned
from mpishard.shard.program import Action

__all__ = ["Ledger", "most_taken"]


class Ledger:
    """Notes a moment for each instruction of a step.

    Args:
        fixed: bytes by category that are in use at every moment.
    """

    def __init__(self, arena: Arena, program: Sequence[Action], fixed: Mapping[str, int]) -> None:
        self._stacks = (arena.saved, arena.workspace)
        self._first, self._last = program[0], program[-1]
        self._fixed = {name: fixed.get(name, 0) for name in CATEGORIES}
        self._now = dict.fromkeys(KINDS, 0)
        self._step: list[Moment] = []
        #: the moments of the last step that ran to its end
        self.moments: tuple[Moment, ...] = ()

    def before(self, action: Action) -> None:
        """An instruction is about to run."""
        if action is self._first:
            self._step.clear()
            self._now = dict.fromkeys(KINDS, 0)
        _add(self._now, action.takes, 1)
        for stack in self._stacks:
            stack.restart()

    def after(self, action: Action) -> None:
        """It has run."""
        found = dict(self._fixed)
        for name, nbytes in self._now.items():
            found[name] += nbytes
        for name, stack in zip(STACKS, self._stacks, strict=True):
            found[name] += stack.peak
        self._step.append(Moment(action.name.decode(), found))
        _add(self._now, action.gives, -1)
        if action is self._last:
            self.moments = tuple(self._step)


def most_taken(programs: Iterable[Sequence[Action]], *, pooled: bool) -> dict[str, int]:
    """Return the bytes of the region by category where they are most together, in any of the programs.

    ``pooled``: what is gathered lies elsewhere.
    """
    most: dict[str, int] = dict.fromkeys(KINDS, 0)
    for program in programs:
        now = dict.fromkeys(KINDS, 0)
        for action in program:
            takes, gives = (
                [held for held in each if not (pooled and held[0] == POOLED)] for each in (action.takes, action.gives)
            )
            _add(now, takes, 1)
            if sum(now.values()) > sum(most.values()):
                most = dict(now)
            _add(now, gives, -1)
    return most


def _add(now: dict[str, int], buffers: Iterable[tuple[str, int]], sign: int) -> None:
    for name, nbytes in buffers:
        now[name] += sign * aligned(nbytes)
