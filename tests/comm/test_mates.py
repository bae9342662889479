"""Processes of other ranks: their end is noticed, and what they left is read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpishard.comm.mates import Mates, hurried, is_gone
from mpishard.comm.record import RankRecord, State, process_start, record_path

needs_handles = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs os.pidfd_open (Linux 5.3)")

#: A rank that does one operation and waits for a line.
CHILD = """
import pathlib, sys
from mpishard.comm.record import RankRecord, State
record = RankRecord(pathlib.Path(sys.argv[1]), int(sys.argv[2]), 3)
record.at_step(7)
record.note(b"Forward(h.%d)" % record._noted)
print(flush=True)
while line := sys.stdin.readline().strip():
    record.fail()
    print(flush=True)
record.close(State.ENDED)
"""

Start = Callable[[int], subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process that is a rank with a record."""
    children = []

    def make(rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, str(tmp_path), str(rank)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "\n"
        return child

    yield make
    for child in children:
        child.kill()
        child.communicate()


def mates_of(folder: Path, *children: subprocess.Popen[str]) -> Mates:
    """Make rank 0, which sees the children as ranks 1, 2, ..."""
    record = RankRecord(folder, 0, 3)
    record.at_step(7)
    seen = {rank: (child.pid, process_start(child.pid) or 0) for rank, child in enumerate(children, 1)}
    return Mates(folder, 0, seen)


@needs_handles
def test_who_is_killed_is_noticed_and_read_without_its_file(start: Start, tmp_path: Path) -> None:
    children = [start(1), start(2)]
    mates = mates_of(tmp_path, *children)
    assert mates.wait(0) == (False, [])
    shutil.rmtree(tmp_path)
    children[1].kill()  # nobody waits for it: it is a zombie, as it is under a launcher that is late
    assert mates.wait(60) == (False, [2])
    assert mates.wait(0) == (False, [])  # told once
    left = mates.read(2)
    assert left is not None
    assert (left.pid, left.state) == (children[1].pid, State.RUNNING)
    assert str(left) == "in step 7, last operation Forward(h.0)"
    assert mates.places(without=2) == (
        "; rank 0 was in step 7, no operation noted; rank 1 was in step 7, last operation Forward(h.0)"
    )
    mates.close()


@needs_handles
def test_what_a_rank_says_at_its_end_is_read(start: Start, tmp_path: Path) -> None:
    child = start(1)
    mates = mates_of(tmp_path, child)
    child.communicate("")
    assert mates.wait(60) == (False, [1])
    left = mates.read(1)
    assert left is not None
    assert left.state is State.ENDED
    mates.close()


def test_a_rank_that_fails_says_so_while_it_is_there(start: Start, tmp_path: Path) -> None:
    child = start(1)
    mates = mates_of(tmp_path, child)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("fail\n")
    child.stdin.flush()
    child.stdout.readline()
    left = mates.read(1)
    assert left is not None
    assert left.state is State.FAILED
    mates.close()


def test_a_process_that_ends_without_a_word_is_known_to_an_error(start: Start, tmp_path: Path) -> None:
    children = [start(1), start(2)]
    mates = mates_of(tmp_path, *children)
    assert mates.ending() is None
    children[0].communicate("")  # in order
    assert mates.ending() is None
    children[1].kill()
    os.waitid(os.P_PID, children[1].pid, os.WEXITED | os.WNOWAIT)  # and it stays a zombie
    assert mates.ending() == 2
    children[1].wait()
    assert mates.ending() == 2
    mates.close()


def test_a_bell_ends_a_wait(tmp_path: Path) -> None:
    mates = mates_of(tmp_path)
    waits = threading.Thread(target=mates.ring)
    waits.start()
    assert mates.wait(60) == (True, [])
    waits.join()
    mates.close()


def test_a_pid_that_another_process_has_now_is_not_waited_for(start: Start, tmp_path: Path) -> None:
    child = start(1)
    assert not is_gone(child.pid, process_start(child.pid) or 0)
    assert is_gone(child.pid, 1)
    RankRecord(tmp_path, 0, 2)
    mates = Mates(tmp_path, 0, {1: (child.pid, 1)})
    child.kill()
    child.wait()
    assert mates.wait(0.05) == (False, [])
    mates.close()


@pytest.mark.parametrize("old", [True, False])
def test_a_system_without_handles_waits_for_nobody(
    old: bool, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    if old:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    else:
        monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    child = start(1)
    mates = mates_of(tmp_path, child)
    child.kill()
    child.wait()
    assert mates.wait(0.05) == (False, [])
    left = mates.read(1)
    assert left is not None
    assert left.step == 7
    mates.close()


def test_a_record_that_is_not_there_yet_is_read_later(tmp_path: Path) -> None:
    RankRecord(tmp_path, 0, 2)
    mates = Mates(tmp_path, 0, {1: (os.getpid(), 1)})
    assert mates.read(1) is None
    assert "rank 1" not in mates.places(without=0)
    RankRecord(tmp_path, 1, 2).at_step(3)
    left = mates.read(1)
    assert left is not None
    assert left.step == 3
    mates.close()


def test_many_ranks_are_counted(tmp_path: Path) -> None:
    for rank in range(12):
        RankRecord(tmp_path, rank, 12)
    assert record_path(tmp_path, 11).exists()
    mates = Mates(tmp_path, 0, {rank: (os.getpid(), 1) for rank in range(1, 12)})
    told = mates.places(without=3)
    assert told.count("before the first step") == 8
    assert told.endswith("; rank 8 was before the first step, no operation noted; 3 ranks more are here")
    mates.close()


def test_hurry_ends_with_its_block() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(ValueError, match="broken"), hurried():
        assert sys.getswitchinterval() < before
        raise ValueError("broken")
    assert sys.getswitchinterval() == before
