"""Times of steps: what a rank writes, when, and how clocks are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpishard.comm.base import Communicator
from mpishard.comm.threads import run
from mpishard.shard.traced import traces
from mpishard.timeline.reading import read_run
from mpishard.train.tracing import Tracer, offset
from tests.shard.training import Job

JOB = Job(micros=4)


def train(folder: Path, first: int, last: int, steps: int = 4) -> list[str]:
    def main(comm: Communicator) -> str:
        engine = JOB.engine(comm)
        tracer = Tracer(engine, folder, first, last)
        for step in range(steps):
            tracer.at_step(step)
            engine.step(JOB.feed(step), lr=JOB.lr)
            engine.evaluate(JOB.feed(step))
        before = tracer.written
        tracer.finish()
        assert before == (last < steps - 1)
        return engine.checksum()

    return run(2, main)


def test_the_steps_that_were_asked_for_are_written_by_every_rank(tmp_path: Path) -> None:
    train(tmp_path, 1, 2)
    found = read_run(tmp_path)
    assert [(each.rank, each.ranks, each.transport, each.error) for each in found] == [
        (0, 2, "threads", 0.0), (1, 2, "threads", 0.0),
    ]  # fmt: skip
    for each in found:
        assert [step.number for step in each.steps] == [1, 2]
        assert each.instructions[0].startswith("Gather(")
        waits = [index for index, kind in enumerate(each.kinds) if kind == "wait"]
        for step in each.steps:
            assert sorted(step.arrivals) == waits
            assert step.came <= step.times[0]
            assert all(step.arrivals[index] <= step.times[index + 1] for index in waits)
    assert found[0].steps[0].times[-1] <= found[0].steps[1].came


def test_timing_changes_no_bit_and_old_times_go(tmp_path: Path) -> None:
    traces(tmp_path).mkdir()
    (traces(tmp_path) / "rank-00007.json").write_text("{}")
    timed = train(tmp_path, 0, 9)
    assert [path.name for path in sorted(traces(tmp_path).iterdir())] == ["rank-00000.json", "rank-00001.json"]
    assert [step.number for step in read_run(tmp_path)[1].steps] == [0, 1, 2, 3]
    (tmp_path / "other").mkdir()
    assert timed == train(tmp_path / "other", 100, 100)


def test_nothing_is_written_where_no_such_step_was_done(tmp_path: Path) -> None:
    train(tmp_path, 50, 51, steps=2)
    assert list(traces(tmp_path).iterdir()) == []


def test_a_step_that_was_left_is_left_out(tmp_path: Path) -> None:
    def main(comm: Communicator) -> None:
        engine = JOB.engine(comm)
        tracer = Tracer(engine, tmp_path, 0, 5)
        engine.step(JOB.feed(0), lr=JOB.lr)
        tracer.trace.begin(1)
        tracer.finish()

    run(2, main)
    record = json.loads((traces(tmp_path) / "rank-00001.json").read_text(encoding="utf-8"))
    assert [step["step"] for step in record["steps"]] == [0]


def test_clocks_are_compared_by_meetings() -> None:
    """Ranks come to a meeting, all leave when the last has come; the other clock is 5 s ahead and drifts not."""
    came0, came1 = [0.0, 10.0, 20.0], [0.4, 9.9, 20.1]
    meet = [max(one, two) for one, two in zip(came0, came1, strict=True)]
    left0, left1 = [each + 0.03 for each in meet], [each + 0.01 for each in meet]
    ahead, error = offset([each + 5 for each in came1], [each + 5 for each in left1], came0, left0)
    assert abs(ahead - 5) <= error
    assert error == pytest.approx(0.02, abs=0.06)
    assert offset(came0, left0, came0, left0)[0] == pytest.approx(0.0)
