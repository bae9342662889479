"""What every picture that a command draws has: a file that can be written, and matplotlib without windows."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpishard.errors import ConfigError

__all__ = ["SUFFIXES", "check_picture", "figure", "save"]

#: what a picture can be written as, by the end of the file's name
SUFFIXES = (".png", ".svg", ".pdf")


def check_picture(path: Path) -> None:
    """Check that a picture can be drawn, before there is one.

    Raises:
        ConfigError: the name's end is none of ``SUFFIXES``, there is no such folder, or matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot is {path}; its name must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: cannot be written, there is no folder {path.parent}; choose another with --plot")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed; pip install 'mpishard[plot]'")


def figure(width: float, height: float) -> Any:
    """Return an empty figure, in inches."""
    # No pyplot: it chooses a window system and keeps every figure.
    return import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def save(drawn: Any, path: Path, dots: int = 120) -> None:
    """Write a figure.

    Args:
        dots: for each inch.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        drawn.savefig(path, dpi=dots)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); choose another with --plot") from None
