"""What a link is given in words: rates and times as ``tc`` writes them."""

from __future__ import annotations

import re

__all__ = ["bits", "burst", "microseconds"]

_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
#: Bytes that may go at once after a pause: little, lest every message begin with what costs nothing, but no less than
#: the largest packet that Linux hands to a network card.
_LEAST_BURST = 1 << 17
_BURST_SECONDS = 5e-4


def bits(rate: str) -> int:
    """Return bits a second of ``1gbit``, ``200mbit`` or ``2.5mbit``.

    Raises:
        ValueError: it is none of them, or below 1 kbit.
    """
    found = _RATE.fullmatch(rate.lower())
    number = round(float(found[1]) * 10.0 ** {"": 0, "k": 3, "m": 6, "g": 9}[found[2]]) if found else 0
    if number < 1000:
        raise ValueError(f"the rate is {rate!r}; give bits a second such as 1gbit, 200mbit or 2.5mbit, 1kbit or more")
    return number


def microseconds(delay: str) -> int:
    """Return microseconds of ``1ms``, ``250us`` or ``0.1s``.

    Raises:
        ValueError: it is none of them, or below one microsecond.
    """
    found = _TIME.fullmatch(delay.lower())
    number = round(float(found[1]) * {"us": 1, "ms": 1e3, "s": 1e6}[found[2]]) if found else 0
    if number < 1:
        raise ValueError(f"the delay is {delay!r}; give a time such as 1ms, 250us or 0.1s, 1us or more")
    return number


def burst(rate: int) -> int:
    """Return the bytes that a link of ``rate`` bits a second sends at once after a pause."""
    return max(_LEAST_BURST, round(rate / 8 * _BURST_SECONDS))
