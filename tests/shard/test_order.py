"""Ranks that are about to run different things are told which, before anything hangs."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from mpishard.comm.base import Communicator
from mpishard.comm.threads import run
from mpishard.errors import CommError
from mpishard.shard.control import first_difference
from mpishard.shard.instructions import Gather
from mpishard.shard.outline import outline_of
from mpishard.shard.schedule import build_step
from tests.shard.training import Job

JOB = Job(micros=3)
RANKS = 3


def differing(place: int) -> str:
    """Return what is said when two instructions of rank 2's schedule have changed places."""
    whole = list(build_step(outline_of(JOB.model), replace(JOB.settings, micros=1)))
    changed = [*whole[:place], whole[place + 1], whole[place], *whole[place + 2 :]]

    def main(comm: Communicator) -> None:
        JOB.engine(comm, schedule=tuple(changed if comm.rank == 2 else whole))

    with pytest.raises(CommError) as caught:
        run(RANKS, main)
    return str(caught.value)


def test_schedules_that_differ_by_one_step_are_told_with_the_instruction_and_its_unit() -> None:
    whole = build_step(outline_of(JOB.model), replace(JOB.settings, micros=1))
    # Two gathers in a row may begin in either order.
    pairs = enumerate(itertools.pairwise(whole))
    place = next(i for i, (one, two) in pairs if isinstance(one, Gather) and isinstance(two, Gather))
    said = differing(place)
    assert re.match(r"rank 2 has schedules [0-9a-f]+, rank 0 [0-9a-f]+; ", said)
    which = f"{whole[place + 1]!r} on rank 2 and {whole[place]!r} on rank 0; "
    assert f"instruction {place} of the training step is {which}" in said


@pytest.mark.parametrize("place", [0, 3, 40])
def test_the_first_difference_is_found_wherever_it_is(place: int) -> None:
    def main(comm: Communicator) -> tuple[int, list[str]] | None:
        parts = [str(number) for number in range(41)]
        if comm.rank == 1:
            parts[place] = "x"
        return first_difference(comm, parts)

    assert run(RANKS, main) == [(place, [str(place), "x", str(place)])] * RANKS


def test_a_list_that_ends_early_and_lists_that_are_alike() -> None:
    def main(comm: Communicator) -> tuple[int, list[str]] | None:
        return first_difference(comm, ["a", "b"][: 1 if comm.rank == 2 else 2])

    assert run(RANKS, main) == [(1, ["b", "b", "nothing more"])] * RANKS
    assert run(RANKS, lambda comm: first_difference(comm, ["a"])) == [None] * RANKS
    assert run(2, lambda comm: first_difference(comm, [])) == [None] * 2


def test_a_setting_that_differs_is_named() -> None:
    def main(comm: Communicator) -> None:
        JOB.engine(comm, seed=6 if comm.rank == 1 else 5, optimizer=None)

    with pytest.raises(CommError, match=r"rank 1 has 6 where rank 0 has 5; all ranks need the same model"):
        run(RANKS, main)


def test_what_differs_in_a_step_is_named_with_the_step() -> None:
    def main(comm: Communicator) -> None:
        engine = JOB.engine(comm)
        engine.step(JOB.feed(0), lr=0.5)
        engine.step(JOB.feed(1), lr=0.25 if comm.rank == 1 else 0.5)

    said = r"; in step 1 rank 1 has learning rate 0\.25 where rank 0 has learning rate 0\.5$"
    with pytest.raises(CommError, match=said):
        run(RANKS, main)


def test_a_collective_that_was_not_run_is_named() -> None:
    def main(comm: Communicator) -> None:
        engine = JOB.engine(comm)
        if comm.rank == 2:
            index = next(i for i, action in enumerate(engine._train) if action.mark.startswith(b"reduce h.1"))
            engine._train[index] = engine._train[index]._replace(mark=b"reduce h.1, but otherwise")
        engine.step(JOB.feed(0), lr=0.5)

    said = r"; in step 0 rank 2 has reduce h\.1, but otherwise where rank 0 has reduce h\.1 "
    with pytest.raises(CommError, match=said):
        run(RANKS, main)
