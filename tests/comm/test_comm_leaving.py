"""What a process keeps at its end, and what a closed stream or an absurd variable must not break at its start."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, cast

import pytest

from mpishard.comm import launch, starting
from mpishard.comm.base import Communicator
from mpishard.comm.reprieve import Reprieve


@dataclass(eq=False)
class Named:
    """What the end of a process looks at."""

    transport: str = "node"
    closed: bool = False


def test_of_closed_communicators_the_last_alone_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    registered: list[object] = []
    monkeypatch.setattr(launch, "_open", kept)
    monkeypatch.setattr(launch.atexit, "register", registered.append)
    still_open = Named()
    launch.leave_together(cast("Communicator", still_open))
    for _ in range(5):
        one = Named()
        launch.leave_together(cast("Communicator", one))
        one.closed = True
    assert kept == [still_open, one]
    assert len(registered) == 1


def test_a_meeting_without_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with starting.meeting(several=True):
        pass


@pytest.mark.parametrize("number", [str(2**31), str(2**80), "9" * 5000])
def test_a_descriptor_beyond_all_numbers(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_FD", number)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    reprieve = Reprieve()
    assert reprieve._holder is None
    reprieve.close()
