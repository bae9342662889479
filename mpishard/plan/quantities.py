"""Numbers as people write them on a command line: counts of parameters and ranks, sizes of memory.

What cannot be meant is refused with the remedy; nothing is guessed, since a plan in the wrong unit looks like a plan.
"""

from __future__ import annotations

import re
from decimal import Decimal

from mpishard.errors import ConfigError

__all__ = ["MOST_PARAMETERS", "MOST_RANKS", "memory", "parameter_count", "rank_counts", "readable"]

#: beyond any model; a whole copy of it on one rank is within what a plan can compute
MOST_PARAMETERS = 10**13
#: beyond any machine
MOST_RANKS = 10**6
_NUMBER = r"\d[\d_]*(?:\.\d*)?(?:[eE][+-]?\d{1,3})?"
_SCALES = {"": 0, "K": 3, "M": 6, "B": 9, "T": 12}
_UNITS = {
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def parameter_count(text: str) -> int:
    """Return a number of parameters: ``7000000000``, ``7_000_000_000``, ``7e9`` or ``7B`` (K, M, B, T).

    Raises:
        ConfigError: it is no whole number, below 1, or beyond ``MOST_PARAMETERS``.
    """
    found = re.fullmatch(rf"\s*({_NUMBER})\s*([KMBT]?)\s*", text, re.ASCII)
    if not found:
        raise ConfigError(f"--params is {text!r}; it must be a whole number above 0, such as 175e9, 7B or 124_439_808")
    value = Decimal(found[1]).scaleb(_SCALES[found[2]])
    if value and value.adjusted() > 30:  # not to be written out
        raise ConfigError(f"--params is {text!r}; it must be at most {MOST_PARAMETERS:.0e}".replace("e+", "e"))
    if value != value.to_integral_value():
        raise ConfigError(f"--params is {text!r}; there are no parts of parameters: give a whole number, such as 7e9")
    count = int(value)
    if count < 1:
        raise ConfigError(f"--params is {text!r}; a model has at least 1 parameter: give its number, such as 7e9")
    if count > MOST_PARAMETERS:
        raise ConfigError(f"--params is {text!r}; it must be at most {MOST_PARAMETERS:.0e}".replace("e+", "e"))
    return count


def rank_counts(text: str) -> tuple[int, ...]:
    """Return numbers of ranks from ``8`` or ``1,8,64``: in the order given, each once.

    Raises:
        ConfigError: one is no whole number in 1 .. ``MOST_RANKS``.
    """
    counts = []
    for part in text.split(","):
        if not re.fullmatch(r"\s*[+-]?\d{1,18}\s*", part, re.ASCII):
            raise ConfigError(
                f"--ranks is {text!r}; it must be whole numbers between commas, as in --ranks 8 or --ranks 1,8,64"
            )
        if not 1 <= int(part) <= MOST_RANKS:
            what = "zero" if int(part) == 0 else str(int(part))
            raise ConfigError(
                f"--ranks {text}: there is no plan for {what} ranks; give 1 to {MOST_RANKS:,} of them, "
                "as in --ranks 8 or --ranks 1,8,64"
            )
        counts.append(int(part))
    return tuple(dict.fromkeys(counts))


def memory(text: str) -> tuple[str, int]:
    """Return the name and the bytes of a size of memory with its unit: ``24GB`` is 24e9, ``24GiB`` 24 x 2**30.

    Raises:
        ConfigError: it has no unit, an unknown one, or is not at least a byte.
    """
    found = re.fullmatch(rf"\s*({_NUMBER})\s*([A-Za-z]*)\s*", text, re.ASCII)
    known = ", ".join(_UNITS)
    if not found:
        raise ConfigError(f"--device-memory is {text!r}; it must be a number with a unit ({known}), such as 24GB")
    number, unit = found[1], next((unit for unit in _UNITS if unit.lower() == found[2].lower()), "")
    if not found[2]:
        raise ConfigError(
            f"--device-memory is {text!r}, without a unit; write {number}GB (10**9 bytes) or {number}GiB (2**30 bytes)"
        )
    if not unit:
        raise ConfigError(f"--device-memory is {text!r}; {found[2]} is no unit of memory: use one of {known}")
    value = Decimal(number)
    if value and value.adjusted() > 9:
        raise ConfigError(f"--device-memory is {text!r}; no device has so much: use a smaller number or unit")
    nbytes = int(value * _UNITS[unit])
    if nbytes < 1:
        raise ConfigError(f"--device-memory is {text!r}; a device has at least a byte: give its memory, such as 24GB")
    return f"{number}{unit}", nbytes


def readable(nbytes: float) -> str:
    """Return bytes in a readable unit, powers of 1000 up to TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} TB"
