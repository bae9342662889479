"""How the micro-batches of a step are dealt to ranks: evenly, or not at all."""

from __future__ import annotations

import math

from mpishard.errors import ConfigError

__all__ = ["deal", "divisors"]


def deal(global_batch: int, micro_batch: int, ranks: int, prefix: str = "") -> int:
    """Return how many micro-batches each rank has in a step.

    Args:
        prefix: of the settings' names in errors.

    Raises:
        ConfigError: they cannot be dealt evenly; the message lists what could.
    """
    micros, rest = divmod(global_batch, micro_batch)
    if rest:
        raise ConfigError(
            f"{prefix}micro_batch {micro_batch} does not divide {prefix}global_batch {global_batch}; "
            f"use {divisors(global_batch)}"
        )
    each, rest = divmod(micros, ranks)
    if rest:
        raise ConfigError(
            f"{micros} micro-batch{'' if micros == 1 else 'es'} a step ({prefix}global_batch {global_batch} / "
            f"{prefix}micro_batch {micro_batch}) cannot be dealt evenly to {ranks} ranks; "
            f"use {divisors(micros)} rank{'' if micros == 1 else 's'}, or change the batches"
        )
    return each


def divisors(number: int) -> str:
    """Return the divisors of a number in words: ``1, 2, 3 or 6``."""
    found = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    found = sorted({*found, *(number // n for n in found)})
    if len(found) == 1:
        return str(found[0])
    shown = [str(n) for n in found] if len(found) <= 12 else [*map(str, found[:11]), "...", str(found[-1])]
    return f"{', '.join(shown[:-1])} or {shown[-1]}"
