"""How much communication was hidden, and the reason that is told where it was little."""

from __future__ import annotations

import pytest

from mpishard.comm.base import Communicator
from mpishard.comm.threads import run
from mpishard.shard.instructions import Absorb, AllReduce, Await, Forward, Gather, Instruction, Reduce, Update
from mpishard.shard.results import hidden_share
from mpishard.shard.text import hideable
from mpishard.train.overlap import Overlap, why_low
from tests.shard.training import Job

SIZES = {"root": 1, "h.0": 10, "h.1": 20}


def test_the_share_is_one_less_what_was_waited_for() -> None:
    assert hidden_share(4.0, 1.0) == 0.75
    assert hidden_share(4.0, 5.0) == 0.0
    assert hidden_share(0.0, 0.0) is None


@pytest.mark.parametrize(
    ("schedule", "share"),
    [
        ([Gather("h.0"), Await("h.0"), Forward("h.0", 0)], 0.0),
        ([Gather("h.0"), Gather("h.1"), Await("h.0"), Forward("h.0", 0), Await("h.1")], 20 / 30),
        ([Gather("root"), Await("root"), Gather("h.0"), Forward("embed", 0), Await("h.0")], 10 / 11),
        ([Reduce("h.1", False), Forward("h.0", 0), Absorb("h.1"), Reduce("h.0", False), Absorb("h.0")], 20 / 30),
        ([Gather("root"), Update("h.0"), Await("root"), AllReduce("h.0")], 1 / 11),
        ([Forward("h.0", 0)], 1.0),
    ],
)
def test_what_a_schedule_could_hide(schedule: list[Instruction], share: float) -> None:
    assert hideable(schedule, SIZES) == pytest.approx(share)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"share": None}, ""),
        ({"share": 0.9}, ""),
        ({"progress": "copies"}, "ranks of one host copy with their own cores"),
        ({"progress": "none"}, "less than MPI_THREAD_SERIALIZED"),
        ({"prefetch": 0}, "shard.prefetch is 0"),
        ({"ceiling": 0.5}, "the first gather and the last reduction have nothing beside them: 50 % can be hidden"),
        ({"computing": 1.0}, "it takes longer than the computing beside it"),
        ({}, "ranks wait for one that is late"),
    ],
)
def test_the_reason_why_it_is_low(changes: dict[str, object], reason: str) -> None:
    usual = {
        "share": 0.5, "ceiling": 0.95, "prefetch": 1, "progress": "background", "computing": 3.0, "in_flight": 2.0,
    }  # fmt: skip
    said = why_low(**(usual | changes))  # type: ignore[arg-type]
    assert said.startswith(reason) or (reason and reason in said)
    assert bool(said) == bool(reason)


def test_a_run_sums_its_steps() -> None:
    sums = Overlap(1, "background", 0.9)
    assert sums.told() == "communication: none"
    for _ in range(2):
        sums.add({"computing": 3.0, "in_flight": 2.0, "exposed": 0.5})
    assert sums.told() == "communication: 75 % hidden, 0.5000 of 2.0000 s a step exposed on rank 0; " + sums.why
    record = sums.record()
    assert (record["hidden"], record["ceiling"], record["exposed"]) == (0.75, 0.9, 0.5)


def test_an_engine_tells_what_a_step_hid() -> None:
    """Threads copy in wait(): so nothing is hidden, and that is the reason."""
    job = Job(micros=4)

    def main(comm: Communicator) -> tuple[float | None, str]:
        engine = job.engine(comm)
        sums = Overlap.of(engine)
        result = engine.step(job.feed(0), lr=job.lr)
        sums.add(result.seconds)
        assert result.seconds["exposed"] == result.seconds["in_flight"] > 0
        assert 0 < sums.ceiling < 1
        return result.hidden, sums.why

    assert {(share, why[:22]) for share, why in run(2, main)} == {(0.0, "ranks of one host copy")}
