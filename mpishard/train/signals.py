"""Signals that ask a run to stop: they are noted, and acted on when a step has ended.

A cluster sends SIGUSR1 some time before a limit, when asked to, and SIGTERM when a job is cancelled or preempted.
The handler runs on one rank, between two instructions of Python, at a time of its own; so it only sets a flag.
Ranks agree on it at the end of a step, and all of them save and stop after the same one.

Without a handler either signal ends a process at once. So this is installed first, before the slow imports, and
this module imports nothing that is.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

__all__ = ["Signals", "install"]

_WATCHED = (signal.SIGUSR1, signal.SIGTERM)


class Signals:
    """The signals that this process was sent since :func:`install`.

    Ctrl-C stays a KeyboardInterrupt.
    """

    def __init__(self) -> None:
        #: the name of the first signal, such as ``SIGUSR1``; empty while there was none
        self.asked = ""
        self._before: dict[signal.Signals, Any] = {}

    def restore(self) -> None:
        """Put back the handlers that were there before; ``asked`` stays. Again is free."""
        while self._before:
            number, handler = self._before.popitem()
            # None is a handler that was not installed from Python and cannot be given back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or signal.Signals(number).name


def install() -> Signals:
    """Note SIGUSR1 and SIGTERM from now on instead of ending the process.

    Raises:
        ValueError: called outside the main thread, where Python allows no handlers.
    """
    signals = Signals()
    for number in _WATCHED:
        signals._before[number] = signal.signal(number, signals._note)
    return signals
