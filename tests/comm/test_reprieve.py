"""A launcher does not see at once that a rank has died."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys

import pytest

from mpishard.comm.record import process_start
from mpishard.comm.reprieve import Reprieve

#: A rank whose standard output and socket its launcher looks at.
RANK = """
import sys
from mpishard.comm.reprieve import Reprieve
reprieve = Reprieve()
print(reprieve._holder.pid, flush=True)
if sys.stdin.readline() == "close\\n":
    reprieve.close()
"""


def start(number: int) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_STEP")}
    return subprocess.Popen(
        [sys.executable, "-c", RANK],
        env=environment | {"PMI_FD": str(number)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[number],
    )


def readable(*files: object, seconds: float) -> list[object]:
    return select.select(files, [], [], seconds)[0]


def test_descriptors_of_a_rank_that_is_killed_stay_open_for_a_while() -> None:
    launcher, end = socket.socketpair()
    with launcher, end, start(end.fileno()) as rank:
        end.close()
        assert rank.stdout is not None
        holder = int(rank.stdout.readline())
        assert os.getsid(holder) == holder  # who ends the rank's process group does not end it
        os.kill(holder, signal.SIGSTOP)  # the while
        rank.kill()
        rank.wait()
        assert readable(launcher, rank.stdout, seconds=0.1) == []
        os.kill(holder, signal.SIGCONT)
        assert readable(launcher, seconds=60) == [launcher]
        assert launcher.recv(1) == b""
        assert rank.stdout.read() == ""


def test_a_rank_that_ends_in_order_holds_nothing() -> None:
    launcher, end = socket.socketpair()
    with launcher, end, start(end.fileno()) as rank:
        end.close()
        assert rank.stdout is not None
        holder = int(rank.stdout.readline())
        rank.communicate("close\n")
        assert process_start(holder) is None
        assert readable(launcher, seconds=60) == [launcher]


@pytest.mark.parametrize("number", [None, "", "4000", "-1"])
def test_other_launchers_are_left_alone(number: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PMI_FD", raising=False)
    if number is not None:
        monkeypatch.setenv("PMI_FD", number)
    reprieve = Reprieve()
    assert reprieve._holder is None
    reprieve.close()
    reprieve.close()


def test_a_step_of_slurm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PMI_FD": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    assert Reprieve()._holder is None
