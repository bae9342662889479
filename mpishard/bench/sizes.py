"""Sizes of messages, as people write and read them."""

from __future__ import annotations

import re
from decimal import Decimal

from mpishard.errors import ConfigError

__all__ = ["MOST_BYTES", "fitted", "nbytes", "readable", "sweep"]

#: the largest message: no count of an MPI call is beyond 2**31 then
MOST_BYTES = 4 * 2**30
_UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
_NAMES = {unit.lower(): unit for unit in _UNITS}


def nbytes(option: str, text: str) -> int:
    """Return the bytes of a size with its unit, as ``4KiB`` or ``1.5MB``; ``option`` names where it was written.

    Raises:
        ConfigError: it has no unit, an unknown one, is no whole number of bytes, or beyond 1 .. MOST_BYTES.
    """
    found = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    known = ", ".join(_UNITS)
    if not found:
        raise ConfigError(f"{option} is {text!r}; it must be a number with a unit ({known}), such as 64MiB")
    number, unit = found[1], _NAMES.get(found[2].lower())
    if not found[2]:
        raise ConfigError(f"{option} is {text!r}, without a unit; write {number}KiB (2**10 bytes) or {number}MiB")
    if unit is None:
        raise ConfigError(f"{option} is {text!r}; {found[2]} is no unit of a size: use one of {known}")
    value = Decimal(number) * _UNITS[unit]
    if value != value.to_integral_value() or not 1 <= value <= MOST_BYTES:
        raise ConfigError(f"{option} is {text!r}; it must be a whole number of bytes, 1 to {readable(MOST_BYTES)}")
    return int(value)


def sweep(least: int, most: int, factor: int) -> tuple[int, ...]:
    """Return the sizes from ``least`` to ``most``, each ``factor`` times the one before; the last is ``most``.

    Raises:
        ConfigError: ``least`` is the larger one, or the factor is below 2.
    """
    if least > most:
        raise ConfigError(f"--min is {readable(least)} and --max is {readable(most)}; --min must not be the larger one")
    if factor < 2:
        raise ConfigError(f"--factor is {factor}; each size is so many times the one before, so it must be 2 or more")
    found = []
    while least < most:
        found.append(least)
        least *= factor
    return (*found, most)


def fitted(size: int, ranks: int, itemsize: int) -> int:
    """Return the elements of a message of about ``size`` bytes: a multiple of ``ranks``, and of one each at least."""
    return max(1, size // (ranks * itemsize)) * ranks


def readable(size: float) -> str:
    """Return bytes in powers of 1024: ``64 MiB``, ``4096.5 KiB``."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{round(size / scale, 1):g} {unit}"
    return f"{size:g} B"
