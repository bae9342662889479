"""Watching peers that are processes of this machine: who has died is named at once, who has told its end is not."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpishard.comm import watch as module
from mpishard.comm.base import Node
from mpishard.comm.record import RankRecord, State, kernel_identity, process_start
from mpishard.comm.watch import EXIT_PEER_GONE
from mpishard.errors import CommError
from tests.comm.test_watch import Played, Spared, own, wait_for


class Seen(Played):
    """Rank 0 and others on the same machine, which are processes with records made in its own process."""

    def __init__(self, folder: Path, states: list[State]) -> None:
        self.children = [subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in states]
        pids = [child.pid for child in self.children]
        super().__init__([(Node(rank, 9, 0, 1), pid, kernel_identity()) for rank, pid in enumerate(pids, 1)])
        self.records: list[RankRecord] = []
        self.states, self.into = states, folder

    def exchange(self, record: bytes, what: str = "an exchange") -> list[bytes]:
        if what != "places of the ranks":
            return super().exchange(record, what)
        for rank, state in enumerate(self.states, 1):
            other = RankRecord(self.into, rank, self.size)
            other.at_step(4)
            other.note(b"Reduce(h.1)")
            self.records.append(other)
            if state is State.FAILED:
                other.fail()
            elif state is State.ENDED:
                other.close(state)
        places = [list(module._PLACE.unpack(place)) for place in self.places]
        for place in places:
            place[3] = process_start(place[2])
        return [record, *(module._PLACE.pack(*place) for place in places)]


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Seen, Spared]]]:
    """Make and enter the watch of a rank beside processes that it sees; its ticks are far away."""
    made: list[tuple[Seen, Spared]] = []

    def make(*states: State, tick: float = 60.0) -> tuple[Seen, Spared]:
        monkeypatch.setattr(module, "TICK", tick)
        comm = Seen(tmp_path, list(states))
        watch = Spared(comm, tmp_path, 0.0)
        made.append((comm, watch))
        watch.__enter__()
        return comm, watch

    yield make
    for comm, watch in made:
        watch._stop.set()
        if watch._thread is not None and watch._thread.is_alive():
            watch._mates.ring()
            watch._thread.join()
        for child in comm.children:
            child.kill()
            child.communicate()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs os.pidfd_open (Linux 5.3)")
def test_a_process_that_is_killed_is_named_before_the_next_tick(
    seen: Callable[..., tuple[Seen, Spared]], capfd: pytest.CaptureFixture[str]
) -> None:
    comm, watch = seen(State.RUNNING, State.RUNNING)
    watch.at_step(4)
    watch.note(b"Await(h.1)")
    comm.children[1].kill()
    assert wait_for(lambda: watch.codes)
    assert watch.codes == [EXIT_PEER_GONE]
    told = capfd.readouterr().err
    assert told.startswith("mpishard: rank 2 (host ")
    assert "in step 4, last operation Reduce(h.1)) is gone; the other ranks end with exit code 3" in told
    assert told.endswith(
        "; rank 0 was in step 4, last operation Await(h.1); rank 1 was in step 4, last operation Reduce(h.1)\n"
    )
    assert (watch.folder / "why").read_text(encoding="utf-8") == told


@pytest.mark.parametrize("state", [State.ENDED, State.FAILED])
def test_a_process_that_has_said_why_it_ends_is_not_gone(
    state: State, seen: Callable[..., tuple[Seen, Spared]], capfd: pytest.CaptureFixture[str]
) -> None:
    comm, watch = seen(state)
    comm.children[0].kill()
    assert wait_for(lambda: not watch._peers)
    assert watch.codes == []
    assert capfd.readouterr().err == ""


def test_who_ends_while_another_rank_has_failed_is_not_the_cause(
    seen: Callable[..., tuple[Seen, Spared]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "GRACE", 0.3)
    comm, watch = seen(State.RUNNING, State.FAILED, tick=0.01)
    comm.children[0].kill()
    assert wait_for(lambda: watch._peers[0].quiet >= 10)
    assert watch.codes == []
    assert capfd.readouterr().err == ""
    assert wait_for(lambda: watch.codes)  # nobody has ended the job
    assert "rank 1 (host" in capfd.readouterr().err


def test_an_error_that_a_dead_peer_has_caused_names_the_peer(
    seen: Callable[..., tuple[Seen, Spared]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)  # so that the thread is the later one
    comm, watch = seen(State.RUNNING)
    comm.children[0].kill()
    comm.children[0].wait()
    watch.__exit__(CommError, CommError("reduce-scatter number 3 failed in MPI"), None)
    told = capfd.readouterr().err
    assert told.startswith("mpishard: rank 1 (host ")
    assert "last operation Reduce(h.1)) is gone; " in told
    assert told.count("\n") == 1


def test_an_abort_is_said_in_the_record(seen: Callable[..., tuple[Seen, Spared]]) -> None:
    comm, watch = seen(State.RUNNING)
    assert comm.before_abort is not None
    comm.before_abort()
    assert own(watch).state is State.FAILED
