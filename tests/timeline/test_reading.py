"""Ranks' times are read as they were left; what is missing or damaged is told in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpishard.errors import ConfigError
from mpishard.shard.traced import MOST_STEPS, traced_steps, traces
from mpishard.timeline.reading import read_run
from tests.timeline.made import NAMES, record, write


def test_what_was_left_is_read_with_one_clock_for_all(tmp_path: Path) -> None:
    plain, ahead = read_run(write(tmp_path, record(0), record(1, ahead=7.0)))
    assert plain.instructions == tuple(NAMES)
    assert [step.number for step in plain.steps] == [10, 11]
    assert plain.steps[0].came == pytest.approx(99.998)
    assert plain.steps[1].times[0] == pytest.approx(101.0)
    assert ahead.steps[1].times[0] == pytest.approx(101.0)
    assert ahead.steps[0].arrivals[2] == pytest.approx(100.002)
    assert (ahead.rank, ahead.ranks, ahead.host, ahead.transport) == (1, 2, "n1", "mpi")


def said(run: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_run(run)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_run_and_no_times(tmp_path: Path) -> None:
    assert "there is no such run directory" in said(tmp_path / "nowhere")
    assert "holds no times of steps; run the training again with --trace" in said(tmp_path)


def test_a_rank_that_is_missing(tmp_path: Path) -> None:
    write(tmp_path, record(0, ranks=3), record(1, ranks=3))
    assert "holds 2 of 3 ranks' times" in said(tmp_path)


def test_a_file_that_was_not_written_to_its_end(tmp_path: Path) -> None:
    path = traces(write(tmp_path)) / "rank-00001.json"
    whole = path.read_bytes()
    for length in (0, 1, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert said(tmp_path).startswith(f"{path}: is damaged or was not written to its end; ")
    path.write_bytes(b"\xff\xfe" + whole)
    assert "is damaged" in said(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"kinds": []},
        {"kinds": ["compute"] * 9 + ["sleep"]},
        {"steps": None},
        {"steps": [{"step": 10}]},
        {"steps": [{"step": 10, "came": 0, "times": [1, 2], "arrivals": []}]},
        {"steps": [{"step": 10, "came": 0, "times": [2, 1] + [3] * 9, "arrivals": []}]},
        {"steps": [{"step": 10, "came": 5, "times": [1] * 11, "arrivals": []}]},
        {"steps": [{"step": 10, "came": 0, "times": [1] * 11, "arrivals": [[99, 1]]}]},
        {"steps": [{"step": 10, "came": 0, "times": [float("nan")] * 11, "arrivals": []}]},
        {"steps": [{"step": 10, "came": 0, "times": [1] * 11, "arrivals": [[2, float("inf")]]}]},
        {"clock": [1]},
        {"clock": ["x", 0]},
        {"rank": "zero"},
    ],
    ids=str,
)
def test_what_does_not_fit_together(changes: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, record(0) | changes, record(1))
    assert "rank-00000.json: is damaged: what it holds does not fit together; " in said(tmp_path)


def test_another_format_other_steps_and_no_step(tmp_path: Path) -> None:
    write(tmp_path / "a", record(0, format="mpishard trace 2"), record(1))
    assert "says that it is 'mpishard trace 2', and 'mpishard trace 1' is needed" in said(tmp_path / "a")
    write(tmp_path / "b", record(0), record(1, steps=1))
    assert "rank-00001.json: has other steps or another schedule than rank 0's" in said(tmp_path / "b")
    write(tmp_path / "c", record(0, steps=0), record(1, steps=0))
    assert "no step was timed to its end" in said(tmp_path / "c")


@pytest.mark.parametrize(("text", "steps"), [("", None), ("10-12", (10, 12)), ("7", (7, 7)), (" 0 - 99 ", (0, 99))])
def test_steps_are_named_by_the_first_and_the_last(text: str, steps: tuple[int, int] | None) -> None:
    assert traced_steps(text) == steps


@pytest.mark.parametrize("text", ["-", "a", "1-", "-1", "3-2", "0-100", "1:2", "1-2-3", "²", "9" * 13])
def test_what_names_no_steps_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"debug\.trace is "):
        traced_steps(text)
    assert MOST_STEPS == 100
