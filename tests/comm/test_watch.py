"""Watching peers: what is taken for a failure and what is not. Ranks are threads; peers' records are played."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm import Communicator, LocalCommunicator, run_threads
from mpishard.comm import watch as module
from mpishard.comm.base import Node
from mpishard.comm.record import RankRecord, Snapshot, State, kernel_identity, read_record, record_path
from mpishard.comm.watch import EXIT_PEER_GONE, Watch
from mpishard.errors import ConfigError

#: A pid that no process has.
NOBODY = 2**22 + 1


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK", 0.01)
    monkeypatch.setattr(module, "GRACE", 0.05)


class Played(LocalCommunicator):
    """Rank 0 of several; the others say where they are, and do nothing else."""

    def __init__(self, places: list[tuple[Node, int, bytes]]) -> None:
        super().__init__(NumpyOps())
        self.size = 1 + len(places)
        nodes = {0, *(node.index for node, _, _ in places)}
        self.node = Node(0, 1 + sum(node.index == 0 for node, _, _ in places), 0, len(nodes))
        self.places = [module._PLACE.pack(node.index, node.local_rank, pid, 1, who) for node, pid, who in places]
        self.folder: Path | None = None

    def exchange(self, record: bytes, what: str = "an exchange") -> list[bytes]:
        return [record, *(self.places if what == "places of the ranks" else [record] * (self.size - 1))]


class Spared(Watch):
    """Lists the exit codes by which it would end the process."""

    def __init__(self, comm: Communicator, folder: Path, silence: float) -> None:
        super().__init__(comm, folder, silence=silence)
        self.codes: list[int] = []
        self._exit = self.codes.append


ELSEWHERE = Node(0, 1, 1, 2)
Lone = Callable[..., Spared]


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Lone]:
    """Make and enter the watch of a rank with one peer."""
    entered: list[Spared] = []

    def make(node: Node = ELSEWHERE, pid: int = 1, who: bytes = b"another kernel", silence: float = 0.0) -> Spared:
        watch = Spared(Played([(node, pid, who)]), tmp_path, silence)
        entered.append(watch)
        watch.__enter__()
        return watch

    yield make
    for watch in entered:
        watch._stop.set()
        if watch._thread:
            watch._thread.join()


def wait_for(condition: Callable[[], object], seconds: float = 5.0) -> bool:
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.005)
    return bool(condition())


def look(folder: Path, rank: int) -> Snapshot:
    snapshot = read_record(record_path(folder, rank))
    assert snapshot is not None
    return snapshot


def own(watch: Watch) -> Snapshot:
    return look(watch.folder, 0)


def passes(watch: Watch, ticks: int = 20) -> None:
    """Let some ticks pass."""
    beats = own(watch).beats
    assert wait_for(lambda: own(watch).beats >= beats + ticks)


def test_one_rank_keeps_its_record_and_watches_nobody(tmp_path: Path) -> None:
    with Watch(LocalCommunicator(NumpyOps()), tmp_path / "deep" / "ranks", silence=1) as watch:
        watch.at_step(2)
        watch.note(b"Agree")
        assert watch._thread is None
        assert str(own(watch)) == "in step 2, last operation Agree"
    assert own(watch).state is State.ENDED


def test_ranks_that_are_threads_do_not_watch_each_other(tmp_path: Path) -> None:
    def main(comm: Communicator) -> int:
        with Watch(comm, tmp_path, silence=0.02) as watch:
            threads = [thread for thread in threading.enumerate() if thread.name == "mpishard-watch"]
            return len(threads) + len(watch._peers)

    assert run_threads(3, main) == [0, 0, 0]
    assert [look(tmp_path, rank).state for rank in range(3)] == [State.ENDED] * 3


def test_leaving_in_order_waits_for_all(tmp_path: Path) -> None:
    working: list[int] = []

    def main(comm: Communicator) -> bool:
        with Watch(comm, tmp_path, silence=0):
            if comm.rank == 1:
                time.sleep(0.1)
                working.append(comm.rank)
        return bool(working)

    assert run_threads(3, main) == [True] * 3


def test_a_failing_thread_leaves_its_state_and_the_others_their_own_error(tmp_path: Path) -> None:
    def main(comm: Communicator) -> None:
        with Watch(comm, tmp_path, silence=0.02):
            if comm.rank == 1:
                raise ValueError("broken")
            comm.barrier()

    with pytest.raises(ValueError, match="broken"):
        run_threads(2, main)
    assert look(tmp_path, 1).state is State.FAILED


def test_what_an_earlier_run_left_does_not_count(lone: Lone, tmp_path: Path) -> None:
    RankRecord(tmp_path, 5, 6).close(State.FAILED)
    (tmp_path / "ended").write_bytes(module._ENDED.pack(b"gone", 5))
    (tmp_path / "found").touch()
    watch = lone()
    passes(watch)
    assert watch.codes == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ended", "rank-00000"]


def test_a_peer_that_is_gone_is_named_once(lone: Lone, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    peer = RankRecord(tmp_path.parent, 1, 2)
    peer.at_step(4)
    peer.note(b"Gather(h.1)")
    watch = lone(Node(1, 2, 0, 1), os.getppid(), kernel_identity())  # its start time does not fit: another process now
    watch._peers[0].visible = True
    peer.path.rename(record_path(tmp_path, 1))
    assert wait_for(lambda: watch.codes)
    assert watch.codes[0] == EXIT_PEER_GONE == 3
    assert capfd.readouterr().err == (
        f"mpishard: rank 1 (host {os.uname().nodename}, pid {os.getpid()}, in step 4, last operation Gather(h.1)) is "
        "gone; the other ranks end with exit code 3; look for the cause where it ran (memory, a signal, a traceback), "
        "then resume from the last checkpoint; rank 0 was before the first step, no operation noted\n"
    )


def test_the_second_to_find_it_is_quiet(lone: Lone, capfd: pytest.CaptureFixture[str]) -> None:
    watch = lone()
    (watch.folder / "found").touch()
    watch._end(1, "is gone")
    assert watch.codes == [3]
    assert capfd.readouterr().err == ""


def test_what_another_rank_found_ends_this_one(lone: Lone, capfd: pytest.CaptureFixture[str]) -> None:
    watch = lone()
    watch._tell(module._GONE, 7)
    assert wait_for(lambda: watch.codes)
    assert capfd.readouterr().err == ""


def test_a_peer_that_ended_in_order_is_no_failure(lone: Lone, tmp_path: Path) -> None:
    RankRecord(tmp_path.parent, 1, 2).close(State.ENDED)
    watch = lone(Node(1, 2, 0, 1), NOBODY, kernel_identity(), silence=0.02)
    assert not watch._peers[0].visible  # it was never seen, so beats have to do
    record_path(tmp_path.parent, 1).rename(record_path(tmp_path, 1))
    assert wait_for(lambda: not watch._peers)
    passes(watch)
    assert watch.codes == []


@pytest.mark.parametrize("visible", [True, False])
def test_a_peer_that_failed_is_given_some_time(
    visible: bool, lone: Lone, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    RankRecord(tmp_path.parent, 1, 2).close(State.FAILED)
    watch = lone(Node(1, 2, 0, 1), NOBODY, kernel_identity())
    watch._peers[0].visible = visible
    record_path(tmp_path.parent, 1).rename(record_path(tmp_path, 1))
    assert wait_for(lambda: watch._failed_ticks)
    assert capfd.readouterr().err == ""
    assert wait_for(lambda: watch.codes)
    assert "rank 1 (host" in capfd.readouterr().err


def test_a_silent_peer_is_ended_after_its_time(lone: Lone, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    watch = lone(silence=0.5)
    peer = RankRecord(tmp_path, 1, 2)
    for _ in range(25):  # more than 0.5 s, with beats
        peer.beat()
        passes(watch, 4)
    assert watch.codes == []
    assert wait_for(lambda: watch.codes)
    assert "has given no sign of life for 0.5 s" in capfd.readouterr().err


def test_silence_zero_waits_for_ever(lone: Lone, tmp_path: Path) -> None:
    watch = lone()
    RankRecord(tmp_path, 1, 2)
    passes(watch, 30)
    assert watch._peers[0].quiet >= 20
    assert watch.codes == []


def test_ticks_without_a_file_system_count_for_nobody(
    lone: Lone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def stalled(self: RankRecord, flush: bool = False) -> None:
        tried.append(flush)
        raise OSError(5, "stale")

    monkeypatch.setattr(RankRecord, "beat", stalled)
    watch = lone(silence=0.05)
    RankRecord(tmp_path, 1, 2)
    assert wait_for(lambda: len(tried) > 20)
    assert watch._peers[0].quiet == 0
    assert watch.codes == []
    assert tried[0] is True  # another node reads this record


def test_a_folder_that_is_removed_ends_nobody(lone: Lone, tmp_path: Path) -> None:
    watch = lone(silence=0.05)
    for path in tmp_path.iterdir():
        path.unlink()
    time.sleep(0.3)
    assert watch.codes == []


def test_first_ranks_watch_the_next_node_and_all_their_own(tmp_path: Path) -> None:
    nodes = [Node(1, 2, 0, 3), Node(0, 2, 1, 3), Node(1, 2, 1, 3), Node(0, 2, 2, 3), Node(1, 2, 2, 3)]
    watch = Watch(Played([(node, NOBODY, b"x") for node in nodes]), tmp_path, silence=0)
    with watch:
        assert [peer.rank for peer in watch._peers] == [1, 2]


def test_a_folder_that_cannot_be_made_is_one_line_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def main(comm: Communicator) -> str:
        try:
            with Watch(comm, tmp_path / "file" / "ranks", silence=0):
                return ""
        except ConfigError as error:
            return str(error)

    told = run_threads(3, main)
    assert told[0] == told[1] == told[2]
    assert "Not a directory; choose a place that can be read and written" in told[0]


@pytest.mark.parametrize("silence", [-1.0, float("inf"), float("nan")])
def test_a_silence_that_is_none_is_refused(silence: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give seconds, or 0 to wait for ever"):
        Watch(LocalCommunicator(NumpyOps()), tmp_path, silence=silence)
