"""Signals only set a flag, and from the very start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mpishard.train.signals import Signals, install


@pytest.fixture
def signals() -> Iterator[Signals]:
    installed = install()
    yield installed
    installed.restore()


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_a_signal_is_noted_and_ends_nothing(signals: Signals, name: str) -> None:
    assert signals.asked == ""
    signal.raise_signal(signal.Signals[name])
    assert signals.asked == name


def test_the_first_signal_is_the_one_that_asked(signals: Signals) -> None:
    for name in ("SIGUSR1", "SIGTERM", "SIGTERM"):
        signal.raise_signal(signal.Signals[name])
    assert signals.asked == "SIGUSR1"


def test_an_interrupt_stays_an_exception(signals: Signals) -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signals.asked == ""


def test_the_handlers_before_come_back() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    term = signal.getsignal(signal.SIGTERM)
    try:
        signals = install()
        signals.restore()
        signals.restore()
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        assert signals.asked == ""
        assert signal.getsignal(signal.SIGTERM) == term
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_nothing_slow_is_imported_before_signals_are_noted() -> None:
    code = (
        "import sys\nfrom mpishard.train.signals import install\nsignals = install()\n"
        "print(*{'numpy', 'mpi4py', 'click', 'pydantic'} & set(sys.modules), 'ready', flush=True)\n"
        "sys.stdin.readline()\nprint(signals.asked)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        os.kill(child.pid, signal.SIGTERM)
        printed, _ = child.communicate("\n")
    assert child.returncode == 0
    assert printed == "SIGTERM\n"
