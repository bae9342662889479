"""The rule by which a job stands still, and whom it blames; records are played, and no time passes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mpishard.comm import stall as module
from mpishard.comm.record import RankRecord, Snapshot, State, kernel_identity, process_stopped, read_record
from mpishard.comm.stall import Stall
from mpishard.comm.standstill import Standing, late, read_standings, report, stack_path, write_stack

WAITS = ("Await", "Agree")


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, bool]]:
    """Let the main thread have used no processor; put in what it is to have used instead."""
    used = [(0.0, False)]
    monkeypatch.setattr(module, "main_thread", lambda: used[-1])
    return used


class Ranks:
    """The records of three ranks, of which this process is rank 0."""

    def __init__(self, folder: Path, mates: list[int], leaders: list[int], seconds: float) -> None:
        self.records = [RankRecord(folder, rank, 3) for rank in range(3)]
        self.stall = Stall(folder, self.records[0], mates, leaders, seconds=seconds, waits=WAITS)

    def ticks(self, count: int, *beating: int) -> Iterator[bool]:
        """Tick once a second; the ranks that beat say that they have stood still since the beginning."""
        for _ in range(count):
            for rank in beating:
                self.records[rank].beat()
            yield self.stall.tick(1.0)


def test_all_ranks_have_to_stand_still(tmp_path: Path, idle: object) -> None:
    ranks = Ranks(tmp_path, [1, 2], [], 10)
    ranks.records[0].note(b"Await(h.1)")
    ranks.records[1].stand(20, 20, 20)
    ranks.records[2].stand(3, 3, 3)
    assert not any(ranks.ticks(30, 1, 2))  # rank 2 has moved lately, as it says
    ranks.records[2].stand(20, 20, 20)
    assert any(ranks.ticks(1, 1, 2))
    ranks.records[0].note(b"Await(h.2)")
    assert not any(ranks.ticks(10, 1, 2))
    assert any(ranks.ticks(1, 1, 2))


def test_a_record_that_does_not_change_counts_as_still(tmp_path: Path, idle: object) -> None:
    ranks = Ranks(tmp_path, [1, 2], [], 10)
    ranks.records[0].note(b"Await(h.1)")
    ranks.records[2].stand(20, 20, 20)
    assert list(ranks.ticks(11, 2)) == [False] * 10 + [True]  # rank 1 beats no more
    assert ranks.stall.quiet(1) >= 4
    assert ranks.stall.quiet(2) == 0


def test_another_node_is_asked_by_its_first_rank(tmp_path: Path, idle: object) -> None:
    ranks = Ranks(tmp_path, [1], [2], 10)
    ranks.records[0].note(b"Await(h.1)")
    ranks.records[1].stand(20, 20, 0)
    ranks.records[2].stand(20, 20, 1)  # a rank of its node moves
    assert not any(ranks.ticks(20, 1, 2))
    ranks.records[2].stand(20, 20, 20)
    assert any(ranks.ticks(2, 1, 2))


def test_who_says_little_of_itself_says_the_least_of_its_node(tmp_path: Path, idle: object) -> None:
    ranks = Ranks(tmp_path, [1], [2], 10)
    ranks.records[1].stand(7, 7, 0)
    list(ranks.ticks(9, 1, 2))
    found = read_record(ranks.records[0].path)
    assert found is not None
    assert (found.inside, found.still, found.node_still) == (8, 8, 7)


@pytest.mark.parametrize(("operation", "still"), [(b"Forward(h.1)", 2.0), (b"Await(h.1)", 20.0)])
def test_work_makes_time_count_less_but_not_while_waiting(
    operation: bytes, still: float, tmp_path: Path, idle: list[tuple[float, bool]]
) -> None:
    ranks = Ranks(tmp_path, [1, 2], [], 100)
    ranks.records[0].note(operation)
    ranks.stall.tick(1.0)
    for second in range(20):
        idle.append((0.2 * (second + 1), False))
        ranks.stall.tick(1.0)
    assert (ranks.stall.inside, ranks.stall.still) == (20, pytest.approx(still))


def test_waiting_for_a_disk_is_work_and_sleeping_is_none(tmp_path: Path, idle: list[tuple[float, bool]]) -> None:
    ranks = Ranks(tmp_path, [1, 2], [], 100)
    ranks.records[0].note(b"Save")
    ranks.stall.tick(1.0)
    ranks.stall.tick(1.0)
    assert ranks.stall.still == 1.0
    idle.append((0.0, True))
    ranks.stall.tick(1.0)
    assert ranks.stall.still == pytest.approx(1.1)


def test_the_main_threads_time_is_known() -> None:
    before, _ = module.main_thread()
    while module.main_thread()[0] <= before:
        sum(range(10000))


# --- whom the others wait for


def standing(rank: int, noted: int, *, stopped: bool = False, stack: str = "wait (work.py:5)") -> Standing:
    names = ((noted - 1, "Gather(h.2)"), (noted, f"Await(h.{noted})"))
    snapshot = Snapshot(rank, 3, 10 + rank, 1, b"x", "n1", State.RUNNING, 5, 4, names, noted, 7.0)
    return Standing(rank, snapshot, stopped, stack, 7.0)


def test_a_stopped_rank_is_late_then_a_silent_one_then_the_hindmost() -> None:
    ranks = [standing(0, 9), standing(1, 7), standing(2, 8)]
    assert late(ranks) == ([1], "it is 2 operations behind the furthest")
    assert late([ranks[0], standing(1, 9), standing(2, 9)]) == ([], "")
    assert late([*ranks[:2], standing(2, 8, stack="")]) == ([2], "it does not answer")
    assert late([standing(0, 9, stopped=True), ranks[1], standing(2, 8, stack="")]) == ([0], "its process is stopped")


def test_of_who_cannot_say_the_least_time_is_told(tmp_path: Path) -> None:
    lines = report([standing(0, 9), standing(1, 9, stopped=True)], 300, tmp_path)
    assert "rank 1 is late: in step 4, in Await(h.9), for at least 7 s; its process is stopped" in lines[0]
    assert "  rank 0 (host n1, pid 10): in step 4, in Await(h.9), for 7 s" in lines


def test_the_report_tells_of_every_rank_the_late_one_first(tmp_path: Path) -> None:
    lines = report([standing(0, 9), standing(1, 7), standing(2, 9)], 300, tmp_path)
    assert lines[0] == (
        "mpishard: no rank has made progress for 300 s; rank 1 is late: in step 4, in Await(h.7), for 7 s; it is 2 "
        "operations behind the furthest"
    )
    assert lines[1:4] == [
        "  rank 1 (host n1, pid 11): in step 4, in Await(h.7), for 7 s",
        "    before it: Gather(h.2)",
        "    stack: wait (work.py:5)",
    ]
    assert [line.split(" (")[0] for line in lines if line.startswith("  rank")] == ["  rank 1", "  rank 0", "  rank 2"]
    assert lines[-1].startswith("mpishard: the ranks end with exit code 4; look at rank 1 first, then resume")
    together = report([standing(rank, 9) for rank in range(40)], 300, tmp_path)
    assert "all ranks are in step 4, in Await(h.9): what they wait for does not come" in together[0]
    assert together[-2] == "  and 8 ranks more"


def test_standings_are_read_from_records_and_stacks(tmp_path: Path) -> None:
    record = RankRecord(tmp_path, 0, 2)
    record.at_step(3)
    record.note(b"Agree")
    record.stand(5, 5, 5)
    write_stack(tmp_path, 0)
    mine, other = read_standings(tmp_path, 2, [0.0, 2.0])
    assert (mine.place, mine.stopped, mine.seconds, mine.noted) == ("in step 3, in Agree", False, 5, 1)
    assert mine.stack.startswith("write_stack (comm/standstill.py:")
    assert "test_standings_are_read_from_records_and_stacks (" in mine.stack
    assert "most recent call first" in stack_path(tmp_path, 0).read_text(encoding="utf-8")
    assert (other.place, other.stack, other.seconds) == ("without a record", "", 2.0)


def test_a_running_process_is_not_stopped() -> None:
    import os

    assert kernel_identity()
    assert not process_stopped(os.getpid())
    assert not process_stopped(2**22 + 1)
