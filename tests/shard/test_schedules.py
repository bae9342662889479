"""Built schedules: legal, complete by a simulation that knows nothing of how they were built, and told apart."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mpishard.errors import ConfigError
from mpishard.shard.check import check
from mpishard.shard.instructions import (
    Absorb,
    Await,
    Backward,
    Evaluate,
    Forward,
    Gather,
    Loss,
    Outline,
    Predict,
    Recompute,
    Reduce,
    digest,
)
from mpishard.shard.schedule import RECOMPUTE, STRATEGIES, Settings, build_forward, build_step
from tests.shard.outlines import KINDS, tied
from tests.shard.simulation import Simulation, wanted

EVERY = [Settings(*one) for one in itertools.product(STRATEGIES, (0, 1, 2, 3), RECOMPUTE, (1, 2, 3))]


def outlines() -> Iterator[Outline]:
    for kind in KINDS.values():
        yield from map(kind, range(6))


def test_steps_are_legal_and_complete() -> None:
    for outline, settings in itertools.product(outlines(), EVERY):
        schedule = build_step(outline, settings)
        check(outline, schedule, settings.strategy)
        simulation = Simulation(outline, settings.strategy)
        simulation.run(schedule)
        assert simulation.shards == wanted(outline, settings.micros)
        simulation.finish()
        assert simulation.most_reducing <= 1
        if settings.strategy == "full_shard":
            most = max(
                sum(not unit.keep for unit in outline.units if unit.name in stage.units) for stage in outline.stages
            )
            assert simulation.most_live <= most + settings.prefetch


def test_the_order_of_computing_is_that_of_one_micro_batch_after_the_other() -> None:
    for recompute, micros in itertools.product(RECOMPUTE, (1, 3)):
        schedule = build_step(tied(2), Settings("full_shard", 1, recompute, micros))
        again = recompute == "block"
        computing = [s for s in schedule if isinstance(s, Forward | Loss | Backward | Recompute)]
        one = ["Forward embed", "Forward h.0", "Forward h.1", "Loss head"]
        for block in ("h.1", "h.0"):
            one += [f"Recompute {block}"] * again + [f"Backward {block}"]
        one += ["Backward embed"]
        assert [f"{type(s).__name__} {s.stage}" for s in computing] == one * micros
        assert [s.micro for s in computing] == [micro for micro in range(micros) for _ in one]
        kept = {s.stage: s.keep for s in computing if isinstance(s, Forward)}
        assert kept == {"embed": True, "h.0": not again, "h.1": not again}


def test_forward_passes_are_legal() -> None:
    for outline, settings, last in itertools.product(outlines(), EVERY, (Evaluate, Predict)):
        schedule = build_forward(outline, settings, last)
        check(outline, schedule, settings.strategy)
        simulation = Simulation(outline, settings.strategy)
        simulation.run(schedule)
        assert sum(isinstance(step, last) for step in schedule) == settings.micros
        assert not simulation.flying
        assert settings.strategy == "no_shard" or not simulation.readable


def test_without_prefetch_nothing_is_in_flight_while_it_computes() -> None:
    for outline in outlines():
        schedule = build_step(outline, Settings("full_shard", 0, "none", 2))
        for step, then in itertools.pairwise(schedule):
            if isinstance(step, Gather | Await):
                assert isinstance(then, Gather | Await | Forward | Loss | Backward)
            if isinstance(step, Reduce):
                assert then == Absorb(step.unit)


def test_prefetch_starts_a_gather_before_the_stage_that_hides_it() -> None:
    for prefetch, blocks in itertools.product((1, 2, 3), (5, 6)):
        schedule = build_step(tied(blocks), Settings("full_shard", prefetch, "none", 1))
        computing = 0
        started: dict[str, int] = {}
        for step in schedule:
            if isinstance(step, Gather):
                started[step.unit] = computing
            elif isinstance(step, Await) and step.unit not in ("root", "h.0"):
                # The first window sets out together; from then on each unit is under way for `prefetch` stages.
                ahead = computing - started[step.unit]
                assert ahead == prefetch or started[step.unit] == 0
            elif isinstance(step, Forward | Loss | Backward):
                computing += 1


def windowed(outline: Outline, micros: int, prefetch: int) -> int:
    """All-gathers of a step, by moving a window of different units along what is read, one reader at a time."""
    kept = {unit.name for unit in outline.units if unit.keep}
    trace: list[tuple[str, ...]] = []
    for _ in range(micros):
        trace += [stage.units for stage in outline.stages]
        trace += [stage.backward_units for stage in reversed(outline.stages[:-1])]
    count = len({unit for units in trace for unit in units if unit in kept})
    streamed = [tuple(u for u in units if u not in kept) for units in trace]
    streamed = [units for units in streamed if units]
    live: set[str] = set()
    for at, units in enumerate(streamed):
        order = dict.fromkeys(unit for later in streamed[at:] for unit in later)
        window = set(list(order)[: len(units) + prefetch])
        count += len(window - live)
        live = window
    return count


def formula(blocks: int, micros: int, prefetch: int) -> int:
    streamed = blocks
    if blocks > prefetch + 1:
        streamed += (2 * micros - 1) * (blocks - 1 - prefetch)
    return 1 + streamed


def test_gathers_are_as_few_as_the_window_allows() -> None:
    for outline, prefetch, micros in itertools.product(outlines(), (0, 1, 2, 3), (1, 2, 3)):
        schedule = build_step(outline, Settings("full_shard", prefetch, "none", micros))
        assert sum(isinstance(step, Gather) for step in schedule) == windowed(outline, micros, prefetch)
    for blocks, prefetch, micros in itertools.product(range(1, 9), range(5), (1, 2, 3, 5)):
        schedule = build_step(tied(blocks), Settings("full_shard", prefetch, "block", micros))
        assert sum(isinstance(step, Gather) for step in schedule) == formula(blocks, micros, prefetch)
        assert sum(isinstance(step, Reduce) for step in schedule) == micros * (blocks + 1)


def test_digest() -> None:
    schedule = build_step(tied(3), Settings(micros=2))
    first = digest(schedule, "facts")
    assert len(first) == 8
    assert digest(list(schedule), "facts") == first
    assert digest(schedule, "other facts") != first
    seen = {first}
    for i, step in enumerate(schedule):
        others = [schedule[:i] + schedule[i + 1 :], schedule[:i] + (step, step) + schedule[i + 1 :]]
        for name in getattr(step, "__dataclass_fields__", {}):
            value = getattr(step, name)
            changed = {str: "x", bool: None, int: 77, tuple: ("x",)}[type(value)]
            others.append(schedule[:i] + (replace(step, **{name: changed}),) + schedule[i + 1 :])
        if i and schedule[i - 1] != step:
            others.append(schedule[: i - 1] + (step, schedule[i - 1]) + schedule[i + 1 :])
        digests = {digest(other, "facts") for other in others}
        assert len(digests) == len(others)
        assert not digests & seen
        seen |= digests


def test_different_settings_have_different_digests() -> None:
    schedules = {build_step(outline, settings) for outline in outlines() for settings in EVERY}
    assert len({digest(schedule) for schedule in schedules}) == len(schedules)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "shard"}, "shard.strategy is 'shard'; it must be one of full_shard, no_shard"),
        ({"recompute": "all"}, "shard.recompute is 'all'; it must be one of none, block"),
        ({"prefetch": -1}, "shard.prefetch is -1; it must be 0 or more"),
        ({"micros": 0}, "a rank has 0 micro-batches; it needs at least one"),
    ],
)
def test_settings_are_checked(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**changes)
