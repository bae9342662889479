"""Which steps of a run are timed, and where their times lie: what those who write and who read them share."""

from __future__ import annotations

from pathlib import Path

from mpishard.errors import ConfigError

__all__ = ["FORMAT", "MOST_STEPS", "traced_steps", "traces"]

#: what a file of times says that it is; its last number is the version
FORMAT = "mpishard trace 1"
#: steps that may be timed, so that memory and files stay small
MOST_STEPS = 100


def traces(run: Path) -> Path:
    """Return where the times of a run's ranks lie."""
    return run / "trace"


def traced_steps(text: str) -> tuple[int, int] | None:
    """Return the first and the last step that ``debug.trace`` names; None where it is empty.

    Raises:
        ConfigError: it names none, or too many.
    """
    if not text:
        return None
    first, dash, last = (part.strip() for part in text.partition("-"))
    last = last if dash else first
    if not all(part.isascii() and part.isdecimal() and len(part) <= 12 for part in (first, last)):
        raise ConfigError(f"debug.trace is {text!r}; it must be steps, counted from 0, as in 10-12 or 10")
    if not int(first) <= int(last) < int(first) + MOST_STEPS:
        raise ConfigError(f"debug.trace is {text!r}; it must be at least 1 step and at most {MOST_STEPS}, as in 10-12")
    return int(first), int(last)
