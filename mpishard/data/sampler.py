"""Which window of the data is read when: a function of one global sample index, and of no rank.

Sample ``g = step * global_batch + i`` is window ``window_of(g)`` on any number of ranks. Nothing is stored but
the step, so a run resumes anywhere, on any number of ranks. This file uses no array library.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from mpishard.errors import ConfigError, EngineError

__all__ = ["Sampler", "permute", "window_count"]

_ROUNDS = 6
_MASK = (1 << 64) - 1


def window_count(tokens: int, sequence: int) -> int:
    """Return how many windows of ``sequence + 1`` tokens, ``sequence`` apart, lie in ``tokens`` tokens.

    The last target of a window is the first input of the next, so every token but the first is a target once.
    """
    return max(0, (tokens - 1) // sequence)


def permute(index: int, count: int, key: int) -> int:
    """Return the place of ``index`` in the permutation of ``0 .. count - 1`` that the 64-bit ``key`` selects.

    A Feistel network over pairs (left, right) with ``left < rows`` and ``right < columns``: each round adds a
    hash of one half to the other, modulo its size, which can be undone, so the network is a bijection of
    ``rows * columns >= count`` numbers. Numbers outside the count are mapped again until they fall inside
    (cycle walking; Black and Rogaway 2002, "Ciphers with arbitrary finite domains"), which keeps the
    bijection. As ``rows * columns < count + rows``, hardly any are.
    """
    rows = math.isqrt(count - 1) + 1
    columns = -(-count // rows)
    while True:
        left, right = divmod(index, columns)
        for turn in range(_ROUNDS):
            left = (left + _hash(right, key + 2 * turn)) % rows
            right = (right + _hash(left, key + 2 * turn + 1)) % columns
        index = left * columns + right
        if index < count:
            return index


def _hash(value: int, key: int) -> int:
    """Return 64 well-mixed bits of two numbers (the finaliser of SplitMix64, Steele et al. 2014)."""
    mixed = (value + key * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


@dataclass(frozen=True)
class Sampler:
    """The order of the windows.

    Attributes:
        windows: windows in the token file.
        global_batch: sequences per step, over all ranks.
        micro_batch: sequences in one forward and backward pass on one rank.
        seed: selects the order.
        epochs: passes over the data; each has an order of its own. 0 repeats without end. A global batch may
            begin in one epoch and end in the next; one that would cross the end of the last does not exist.

    Raises:
        ConfigError: a number is too small, or the micro-batch does not divide the global batch.
    """

    windows: int
    global_batch: int
    micro_batch: int
    seed: int
    epochs: int = 0

    def __post_init__(self) -> None:
        for name, least in (("windows", 1), ("global_batch", 1), ("micro_batch", 1), ("epochs", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"the sampler has {name} {getattr(self, name)}; it must be at least {least}")
        if self.global_batch % self.micro_batch:
            raise ConfigError(
                f"micro-batches of {self.micro_batch} sequences do not fill a global batch of {self.global_batch}; "
                "choose a divisor of it"
            )

    @property
    def micro_batches(self) -> int:
        """Micro-batches in one step, over all ranks."""
        return self.global_batch // self.micro_batch

    @property
    def steps(self) -> int | None:
        """Steps that the data allow; None where they repeat without end."""
        return self.epochs * self.windows // self.global_batch if self.epochs else None

    def has_step(self, step: int) -> bool:
        """Return whether there are data for step ``step``, counted from 0."""
        return step >= 0 and (self.steps is None or step < self.steps)

    def window_of(self, index: int) -> int:
        """Return the window that is global sample ``index``."""
        epoch, place = divmod(index, self.windows)
        digest = hashlib.blake2b(f"{self.seed} {epoch}".encode(), digest_size=8).digest()
        return permute(place, self.windows, int.from_bytes(digest, "little"))

    def samples(self, step: int, micro: int) -> list[int]:
        """Return the windows of global micro-batch ``micro`` of step ``step``, in order.

        Raises:
            EngineError: there is no such step or no such micro-batch.
        """
        if not self.has_step(step):
            raise EngineError(f"step {step} was read, the data end after {self.steps} steps; ask has_step() first")
        if not 0 <= micro < self.micro_batches:
            raise EngineError(f"micro-batch {micro} was read; a step has {self.micro_batches}, counted from 0")
        first = step * self.global_batch + micro * self.micro_batch
        return [self.window_of(index) for index in range(first, first + self.micro_batch)]

    def rank_micro_batches(self, rank: int, size: int) -> list[int]:
        """Return the global micro-batches of a rank, in the order of computation: ``rank, rank + size, ...``.

        Raises:
            ConfigError: the micro-batches cannot be dealt evenly to ``size`` ranks.
        """
        if self.micro_batches % size:
            raise ConfigError(
                f"{self.micro_batches} micro-batches a step cannot be dealt evenly to {size} ranks; "
                f"use a number of ranks that divides {self.micro_batches}"
            )
        return list(range(rank, self.micro_batches, size))
