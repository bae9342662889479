"""Schedules as text: nothing left out, nothing out of order, and sums that are those of engines that ran."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from mpishard.comm.frames import FRAME_BYTES
from mpishard.comm.threads import run
from mpishard.shard import instructions
from mpishard.shard.engine import outline_of
from mpishard.shard.instructions import (
    Agree,
    Await,
    Evaluate,
    Gather,
    Instruction,
    Outline,
    Predict,
    Reduce,
    Release,
    Replicate,
    short,
)
from mpishard.shard.layout import layout
from mpishard.shard.schedule import RECOMPUTE, STRATEGIES, Settings, build_forward, build_step
from mpishard.shard.text import MEANINGS, Sent, legend, lines, most_gathered, sent
from tests.shard.outlines import KINDS, tied
from tests.shard.tallies import measured
from tests.shard.training import SMALL, Job

COMPUTES = ("Forward", "Recompute", "Loss", "Backward", "Evaluate", "Predict")
SETTINGS = [Settings(*each) for each in itertools.product(STRATEGIES, (0, 1, 2), RECOMPUTE, (1, 4))]
TOKEN = re.compile(r"\w+(?:\([^)]*\))?")


def schedules(outline: Outline, settings: Settings) -> list[tuple[Instruction, ...]]:
    return [build_step(outline, settings), *(build_forward(outline, settings, last) for last in (Evaluate, Predict))]


def tokens(text: list[str]) -> list[str]:
    return TOKEN.findall(" ".join(text))


@pytest.mark.parametrize("kind", KINDS)
def test_every_instruction_is_there_in_order(kind: str) -> None:
    for settings in SETTINGS:
        for schedule in schedules(KINDS[kind](3), settings):
            for width in (20, 110):
                assert tokens(lines(schedule, every=True, width=width)) == [short(step) for step in schedule]


def test_a_line_has_one_computing_instruction_with_what_it_waits_for_before_it() -> None:
    for settings in SETTINGS:
        for schedule in schedules(tied(4), settings):
            for line in lines(schedule, every=True, width=10_000):
                names = [token.partition("(")[0] for token in tokens([line])]
                computing = [i for i, name in enumerate(names) if name in COMPUTES]
                if computing:
                    assert len(computing) == 1
                    assert set(names[: computing[0]]) <= {"Await"}
                    assert names[-1] != "Await" or line.startswith("Gather")


def test_long_lines_go_on_below_and_names_are_not_broken() -> None:
    schedule = build_step(tied(60), Settings(micros=2))
    text = lines(schedule)
    assert max(map(len, text)) <= 110
    assert text[-1].startswith("    Update(")
    narrow = lines(schedule, width=1)
    assert {line.strip() for line in narrow} >= {"Forward(embed, 1)", "Agree"}


def unfolded(text: list[str]) -> list[str]:
    """Write out what 'as micro-batch K' stands for."""
    result: list[str] = []
    part: list[str] = []
    for line in text:
        found = re.fullmatch(r"\.\.\. micro-batch(?:es)? (\d+)(?: to (\d+))? as micro-batch (\d+) \.\.\.", line)
        if not found:
            start = re.search(r"Forward\(embed", line)
            part = [line] if start else [*part, line]
            result.append(line)
            continue
        first, last, like = int(found[1]), int(found[2] or found[1]), int(found[3])
        assert like == first - 1
        for micro in range(first, last + 1):
            result += [line.replace(f", {like})", f", {micro})") for line in part]
    return result


@pytest.mark.parametrize("micros", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_micro_batches_that_repeat_the_one_before_are_told_in_a_line(strategy: str, micros: int) -> None:
    schedule = build_step(tied(3), Settings(strategy, micros=micros))
    short_form, whole = lines(schedule), lines(schedule, every=True)
    assert unfolded(short_form) == whole
    assert any(line.startswith("...") for line in short_form) == (micros > 3)
    if micros == 9:
        told = next(line for line in short_form if line.startswith("..."))
        assert told == "... micro-batches 2 to 7 as micro-batch 1 ..."


def test_each_instruction_has_a_meaning_and_a_legend_has_those_that_occur() -> None:
    kinds = {name for name in instructions.__all__ if name in str(instructions.Instruction).split(" | ")}
    assert {kind.__name__ for kind in MEANINGS} == kinds
    assert len(kinds) == 15
    names = [name for name, _ in legend(build_step(tied(2), Settings("no_shard")))]
    assert names == ["Forward", "Loss", "Backward", "Reduce", "Absorb", "Agree", "Replicate", "Update"]
    for strategy in STRATEGIES:
        schedule = build_step(tied(2), Settings(strategy))
        names = [name for name, _ in legend(schedule)]
        assert ("AllReduce" in names) == (strategy == "hybrid_shard")
        assert sorted(names) == sorted({type(step).__name__ for step in schedule})


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("ranks", "local", "prefetch"), [(1, 2, 1), (2, 1, 0), (3, 2, 1)])
def test_what_a_rank_sends_is_what_engines_sent(strategy: str, ranks: int, local: int, prefetch: int) -> None:
    job = Job(replace(SMALL, dropout=0.0), micro_batch=1, micros=ranks * local)
    job = job.with_settings(strategy=strategy, prefetch=prefetch)
    sizes = {unit.name: 4 * layout(unit.specs, ranks).total for unit in job.model.units}
    counted = run(ranks, lambda comm: measured(comm, job))[0]
    settings = replace(job.settings, micros=local)
    outline = outline_of(job.model)
    none = Sent(0, 0)
    for name, schedule in {
        "step": build_step(outline, settings),
        "evaluate": build_forward(outline, settings, Evaluate),
        "predict": build_forward(outline, replace(settings, micros=1), Predict),
    }.items():
        found = sent(schedule, sizes, ranks, FRAME_BYTES)
        gathers = [found.get(kind, none) for kind in (Gather, Replicate)]
        reduced = found.get(Reduce, none)
        assert (sum(s.calls for s in gathers), sum(s.bytes for s in gathers)) == counted[name]["all_gather"]
        assert (reduced.calls, reduced.bytes) == counted[name]["reduce_scatter"]
        if name == "step":
            begins = 1, FRAME_BYTES * (ranks - 1)
            assert (found[Agree].calls + begins[0], found[Agree].bytes + begins[1]) == counted[name]["exchange"]


@pytest.mark.parametrize("prefetch", [0, 1, 2, 7])
def test_what_is_gathered_at_most(prefetch: int) -> None:
    sizes = {"root": 1000, **{f"h.{i}": 10 for i in range(5)}}
    for settings in (Settings(prefetch=prefetch, micros=micros) for micros in (1, 3)):
        schedule = build_step(tied(5), settings)
        units, size = most_gathered(schedule, sizes)
        assert size == 1000 + 10 * min(5, prefetch + 1)
        assert units == ("root", *(f"h.{i}" for i in range(min(5, prefetch + 1))))
    assert most_gathered(build_step(tied(5), Settings("no_shard")), sizes) == ((), 0)


def test_the_largest_is_found_wherever_it_is() -> None:
    schedule = [Gather("a"), Await("a"), Gather("b"), Await("b"), Release("a"), Gather("c"), Await("c")]
    assert most_gathered(schedule, {"a": 1, "b": 2, "c": 3}) == (("b", "c"), 5)
    assert most_gathered(schedule, {"a": 9, "b": 2, "c": 3}) == (("a", "b"), 11)
