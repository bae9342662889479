"""Spans, what was planned, and who waited for whom, on times that were made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpishard.timeline.reading import read_run
from mpishard.timeline.spans import communications, measured, pairs, planned, unit_of
from mpishard.timeline.summary import late_rank, lines, summarise
from tests.timeline.made import NAMES, record, write

MS = 1e-3


def test_units_and_pairs_follow_from_names() -> None:
    assert [unit_of(name) for name in ("Gather(h.0)", "Backward(h.3, 2)", "Agree")] == ["h.0", "h.3", "Agree"]
    assert pairs(NAMES) == {2: 0, 4: 1, 7: 6, 8: 8}
    # A unit may be gathered several times in a step.
    assert pairs(["Gather(a)", "Await(a)", "Release(a)", "Gather(a)", "Await(a)"]) == {1: 0, 4: 3}


def test_a_step_is_cut_into_spans_without_gaps(tmp_path: Path) -> None:
    first, _ = read_run(write(tmp_path))
    spans = measured(first, first.steps[0])
    assert [(span.begin, span.end) for span in spans[1:]] == list(zip(first.steps[0].times, first.steps[0].times[1:]))
    assert (spans[0].name, spans[0].seconds) == ("Meet", pytest.approx(2 * MS))
    assert [span.name for span in spans if span.lane == "waiting"] == [
        "Meet", "Await(h.0)", "Await(h.1)", "Absorb(h.1)", "Agree",
    ]  # fmt: skip


def test_a_collective_lasts_from_its_start_to_its_arrival(tmp_path: Path) -> None:
    first, _ = read_run(write(tmp_path))
    found = {span.name: span.seconds for span in communications(first, first.steps[0])}
    assert found["Gather(h.0)"] == pytest.approx(2 * MS)
    assert found["Gather(h.1)"] == pytest.approx(11 * MS)
    assert found["Reduce(h.1)"] == pytest.approx(41 * MS)


def test_the_plan_waits_for_nobody(tmp_path: Path) -> None:
    runs = read_run(write(tmp_path))
    in_order, beside = planned(runs, 0)
    assert [span.name for span in in_order] == [name for name in NAMES if name.split("(")[0] not in (
        "Await", "Absorb", "Agree",
    )]  # fmt: skip
    # Forward(h.0) took 10 ms on one rank and 40 on the other.
    assert sum(span.seconds for span in in_order) == pytest.approx((1 + 1 + 25 + 20 + 1 + 5) * MS)
    assert [span.name for span in beside] == ["Gather(h.0)", "Gather(h.1)", "Reduce(h.1)"]
    assert beside[1].seconds == pytest.approx((1 + 25) * MS)


@pytest.mark.parametrize("ahead", [0.0, 7.0])
def test_the_rank_for_which_the_others_wait_is_the_late_one(ahead: float, tmp_path: Path) -> None:
    runs = read_run(write(tmp_path, record(0), record(1, ahead=ahead)))
    rows = summarise(runs)
    late = late_rank(rows)
    assert late is rows[1]
    # Rank 0 came to Absorb 29 ms before rank 1 started its Reduce: 30 later, 1 for its own Reduce.
    assert late.caused == pytest.approx(2 * 29 * MS)
    assert rows[0].caused == pytest.approx(0.0, abs=1e-9)
    assert rows[0].units["h.1"] == pytest.approx(2 * 40 * MS)
    assert rows[1].computing == pytest.approx(2 * 68 * MS)
    assert rows[0].waiting == pytest.approx(2 * 42 * MS)
    # in flight 2 + 11 + 41 ms, of which it stood still for 40
    assert rows[0].hidden == pytest.approx(1 - 40 / 54)
    assert rows[0].last + rows[1].last == 2 * 5


def test_nothing_is_hidden_where_nothing_moves_in_the_background(tmp_path: Path) -> None:
    copies = [record(rank, progress="copies") for rank in range(2)]
    assert [row.hidden for row in summarise(read_run(write(tmp_path, *copies)))] == [0.0, 0.0]


def test_a_clock_is_believed_within_its_error_only(tmp_path: Path) -> None:
    unsure = record(1, clock=[0.0, 0.02])
    runs = read_run(write(tmp_path, record(0), unsure))
    assert summarise(runs)[1].caused == pytest.approx(2 * 9 * MS)
    assert "clocks within 20000 us" in lines(summarise(runs), runs)[0]


def test_the_table_names_the_late_rank(tmp_path: Path) -> None:
    runs = read_run(write(tmp_path))
    text = lines(summarise(runs), runs)
    assert text[0] == "steps 10 to 11 of 2 ranks over mpi, one clock"
    assert text[1].startswith("rank 1 is late: it came last to ")
    assert text[1].endswith(" of 10 meetings, and the others waited 29.00 ms a step for it")
    assert text[-2].split()[:4] == ["0", "38.00", "42.00", "26"]
    assert text[-2].endswith("h.1 40.00, the step's begin 2.00, h.0 0.00")


def test_one_rank_waits_for_nobody(tmp_path: Path) -> None:
    runs = read_run(write(tmp_path, record(0, ranks=1, steps=1)))
    assert late_rank(summarise(runs)) is None
    assert lines(summarise(runs), runs)[0] == "step 10 of 1 rank over mpi, one clock"
    assert lines(summarise(runs), runs)[1] == ""
