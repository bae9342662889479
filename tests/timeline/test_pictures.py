"""The picture and the trace file: what they hold, for a few ranks and for many."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpishard import pictures
from mpishard.errors import ConfigError
from mpishard.timeline import picture
from mpishard.timeline.perfetto import events, lanes, write_trace
from mpishard.timeline.picture import draw
from mpishard.timeline.reading import read_run
from mpishard.timeline.spans import Span
from tests.timeline.made import record, write


def span(begin: float, end: float) -> Span:
    return Span("communicating", "x", begin, end, 0)


def test_spans_that_overlap_have_lanes_of_their_own() -> None:
    assert lanes([span(0, 2), span(1, 3), span(2, 4), span(3, 5)]) == [0, 1, 0, 1]
    assert lanes([span(5, 6), span(0, 1)]) == [0, 0]
    assert lanes([]) == []


def test_a_rank_is_a_process_with_threads_for_what_it_did(tmp_path: Path) -> None:
    found = list(events(read_run(write(tmp_path))))
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert names == {0: "rank 0 (n0)", 1: "rank 1 (n1), late"}
    threads = {event["args"]["name"] for event in found if event["name"] == "thread_name" and event["pid"] == 0}
    assert {"planned: computing", "planned: in flight", "computing", "waiting", "in flight", "in flight 2"} <= threads
    spans = [event for event in found if event["ph"] == "X"]
    assert min(event["ts"] for event in spans) == 0
    assert all(event["dur"] >= 0 for event in spans)
    waits = [event for event in spans if event["cat"] == "waiting"]
    assert {event["cname"] for event in waits} == {"terrible"}
    assert len(waits) == 2 * 2 * 5
    (wait,) = [e for e in waits if e["name"] == "wait: Absorb(h.1)" and (e["pid"], e["args"]["step"]) == (0, 10)]
    assert (wait["ts"], wait["dur"]) == (pytest.approx(35e3, abs=1), pytest.approx(40e3, abs=1))


def test_spans_of_one_thread_do_not_overlap(tmp_path: Path) -> None:
    ends: dict[tuple[int, int], float] = {}
    spans = [event for event in events(read_run(write(tmp_path))) if event["ph"] == "X"]
    for event in sorted(spans, key=lambda event: (event["ts"], event["dur"])):
        where = event["pid"], event["tid"]
        assert event["ts"] >= ends.get(where, 0.0) - 0.01
        ends[where] = event["ts"] + event["dur"]


def test_the_trace_file_is_json(tmp_path: Path) -> None:
    write_trace(read_run(write(tmp_path / "run")), tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert data["displayTimeUnit"] == "ms"
    assert len(data["traceEvents"]) > 50
    with pytest.raises(ConfigError, match="choose another with --perfetto"):
        write_trace(read_run(tmp_path / "run"), tmp_path / "no" / "trace.json")


@pytest.mark.parametrize(("suffix", "begin"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_a_picture_is_drawn(suffix: str, begin: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"picture{suffix}"
    pictures.check_picture(path)
    draw(read_run(write(tmp_path / "run")), 1, path)
    assert path.read_bytes().startswith(begin)


def test_what_the_picture_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are red, the late rank is named, and of many ranks the late one is shown."""
    monkeypatch.setattr(picture, "MOST_RANKS", 1)
    draw(read_run(write(tmp_path / "run")), 1, tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text(encoding="utf-8")
    assert picture.COLOURS["waiting"] in text
    assert "rank 1 (late)" in text
    assert "step 11, 2 ranks over mpi: the others waited 29.00 ms a step for rank 1" in text
    assert "rank 0" not in text.replace("rank 0 came", "")


def test_a_run_of_one_rank_can_be_drawn(tmp_path: Path) -> None:
    draw(read_run(write(tmp_path / "run", record(0, ranks=1))), 0, tmp_path / "x.svg")
    assert (tmp_path / "x.svg").exists()


def test_what_cannot_be_drawn_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"its name must end in \.png, \.svg or \.pdf"):
        pictures.check_picture(tmp_path / "x.gif")
    with pytest.raises(ConfigError, match="there is no folder"):
        pictures.check_picture(tmp_path / "no" / "x.png")
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--plot needs matplotlib"):
        pictures.check_picture(tmp_path / "x.png")
