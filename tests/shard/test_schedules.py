"""Built schedules: legal, complete by a simulation that knows nothing of how they were built, and told apart."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mpishard.errors import ConfigError
from mpishard.shard.check import check
from mpishard.shard.instructions import (
    Absorb,
    Agree,
    AllReduce,
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
    Update,
    digest,
)
from mpishard.shard.schedule import RECOMPUTE, STRATEGIES, Settings, build_forward, build_step
from mpishard.shard.strategy import ALIASES, canonical, group_of
from tests.shard.outlines import KINDS, tied
from tests.shard.simulation import Simulation, wanted

PLAIN = [Settings(*one) for one in itertools.product(STRATEGIES, (0, 1, 2, 3), RECOMPUTE, (1, 2, 3))]
KEPT = [
    Settings(strategy, prefetch, "none", micros, reshard_after_forward=False)
    for strategy, prefetch, micros in itertools.product(("full_shard", "hybrid_shard"), (0, 1, 2, 3), (1, 2, 3))
]
ONCE = [
    Settings(strategy, prefetch, "block", micros, accumulate="no_sync")
    for strategy, prefetch, micros in itertools.product(STRATEGIES, (0, 2), (1, 2, 3))
]
EVERY = [
    *PLAIN,
    *KEPT,
    *ONCE,
    Settings("full_shard", 1, "none", 3, reshard_after_forward=False, accumulate="no_sync"),
    *(Settings("full_shard", 1, "block", 2, recompute_every=every) for every in (2, 3, 9)),
]


def outlines() -> Iterator[Outline]:
    for kind in KINDS.values():
        yield from map(kind, range(6))


def test_steps_are_legal_and_complete() -> None:
    for outline, settings in itertools.product(outlines(), EVERY):
        schedule = build_step(outline, settings)
        check(outline, schedule, settings.strategy)
        simulation = Simulation(outline, settings.strategy)
        simulation.run(schedule)
        once = settings.accumulate == "no_sync"
        assert simulation.shards == wanted(outline, settings.micros, settings.strategy, once)
        simulation.finish()
        assert simulation.most_reducing <= 1
        if not settings.resident and settings.reshard_after_forward:
            streamed = {unit.name for unit in outline.units if not unit.keep and not unit.beside}
            most = max(len(streamed.intersection(stage.units)) for stage in outline.stages)
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
        assert settings.resident or not simulation.readable


def test_every_kth_block_is_computed_again() -> None:
    for every, again in ((1, "01234"), (2, "13"), (3, "2"), (5, "4"), (6, "")):
        schedule = build_step(tied(5), Settings("full_shard", 1, "block", 2, recompute_every=every))
        blocks = {f"h.{i}" for i in again}
        dropped = {(s.stage, s.micro) for s in schedule if isinstance(s, Forward) and not s.keep}
        computed = {(s.stage, s.micro) for s in schedule if isinstance(s, Recompute)}
        assert dropped == computed == set(itertools.product(blocks, (0, 1)))


def test_nothing_is_kept_or_run_backward_below_the_lowest_stage_that_learns() -> None:
    for kind, recompute in itertools.product(("frozen", "parted", "tied"), RECOMPUTE):
        schedule = build_step(KINDS[kind](4), Settings("full_shard", 1, recompute, 1))
        backward = [s.stage for s in schedule if isinstance(s, Backward)]
        again = [s.stage for s in schedule if isinstance(s, Recompute)]
        kept = [s.stage for s in schedule if isinstance(s, Forward) and s.keep]
        if kind == "tied":
            assert backward == ["h.3", "h.2", "h.1", "h.0", "embed"]
        else:
            assert backward == ["h.3", "h.2", "h.1"]
        assert again == [stage for stage in backward if stage != "embed" and recompute == "block"]
        assert kept == [stage for stage in reversed(backward) if stage not in again]


def test_reductions_wait_for_the_end_of_the_micro_batch_under_shard_optimizer() -> None:
    for prefetch, micros in itertools.product((0, 1), (1, 3)):
        steps = build_step(tied(3), Settings("shard_optimizer", prefetch, "none", micros))
        at = 0
        for micro in range(micros):
            last = steps.index(Backward("embed", micro, ("table",)))
            assert not any(isinstance(step, Reduce) for step in steps[at:last])
            units = [step.unit for step in steps[last : last + 9] if isinstance(step, Reduce)]
            assert units == ["h.2", "h.1", "h.0", "root"]
            at = last + 9
        other = build_step(tied(3), Settings("shard_grad_op", prefetch, "none", micros))
        assert other.index(Reduce("h.2", False)) == other.index(Backward("h.2", 0)) + 1


def test_no_sync_reduces_once_and_adds_up_till_then() -> None:
    for settings in ONCE:
        schedule = build_step(tied(3), settings)
        reduced = [step for step in schedule if isinstance(step, Reduce)]
        assert reduced == [Reduce(unit, False) for unit in ("h.2", "h.1", "h.0", "root")]
        for step in schedule:
            if isinstance(step, Backward) and step.stage == "h.1":
                assert step.adds == (("weight", "bias") if step.micro else ())


def test_what_a_step_ends_with() -> None:
    """Groups are added up before ranks agree; where all keep the parameters, each unit is gathered as it is updated."""
    for kind, settings in itertools.product(("tied", "parted"), PLAIN):
        outline = KINDS[kind](3)
        steps = build_step(outline, settings)
        agree = steps.index(Agree())
        units = [unit.name for unit in outline.units if unit.params]
        across = [step.unit for step in steps if isinstance(step, AllReduce)]
        assert across == (units if settings.strategy == "hybrid_shard" else [])
        assert all(isinstance(step, AllReduce) for step in steps[agree - len(across) : agree])
        tail = steps[agree + 1 :]
        assert [step.unit for step in tail if isinstance(step, Update)] == units
        if settings.strategy in ("shard_grad_op", "shard_optimizer"):
            assert tail[: 2 * len(units)] == tuple(kind(unit) for unit in units for kind in (Update, Gather))
            assert tail[2 * len(units) :] == tuple(map(Await, units))
            assert not any(isinstance(step, Gather) for step in steps[:agree])


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


def windowed(outline: Outline, micros: int, prefetch: int, stays: bool = False) -> int:
    """All-gathers of a step, by moving a window of different units along what is read, one reader at a time.

    A unit and the frozen parameters beside it count as one. Where a unit ``stays``, it does so while its micro-batch
    still reads it.
    """
    kept = {unit.name for unit in outline.units if unit.keep}
    lead = {unit.name: unit.beside or unit.name for unit in outline.units}
    lowest = next((at for at, stage in enumerate(outline.stages) if stage.params), len(outline.stages) - 1)
    trace: list[tuple[int, tuple[str, ...]]] = []
    for micro in range(micros):
        trace += [(micro, stage.units) for stage in outline.stages]
        trace += [(micro, stage.backward_units) for stage in reversed(outline.stages[lowest:-1])]
    count = len({unit for _, units in trace for unit in units if unit in kept})
    streamed = [(micro, {lead[u] for u in units if u not in kept}) for micro, units in trace]
    streamed = [(micro, units) for micro, units in streamed if units]
    parts = Counter(lead[unit.name] for unit in outline.units)
    order = [[lead[u] for u in units if u not in kept] for _, units in trace]
    order = [units for units in order if units]
    live: set[str] = set()
    before = -1
    for at, (micro, units) in enumerate(streamed):
        ahead = dict.fromkeys(unit for later in order[at:] for unit in later)
        window = set(list(ahead)[: len(units) + prefetch])
        later = {unit for other, names in streamed[at:] if other == before for unit in names}
        stay = live & later if stays else set()
        count += sum(parts[unit] for unit in window - live)
        live, before = window | stay, micro
    return count


def formula(blocks: int, micros: int, prefetch: int, turns: int) -> int:
    """At each of the turns all blocks but those of the window are gathered again."""
    return 1 + blocks + turns * max(0, blocks - 1 - prefetch)


def test_gathers_are_as_few_as_the_window_allows() -> None:
    for outline, prefetch, micros in itertools.product(outlines(), (0, 1, 2, 3), (1, 2, 3)):
        for stays in (False, True):
            schedule = build_step(
                outline, Settings("full_shard", prefetch, "none", micros, reshard_after_forward=not stays)
            )
            assert sum(isinstance(step, Gather) for step in schedule) == windowed(outline, micros, prefetch, stays)
    for blocks, prefetch, micros in itertools.product(range(1, 9), range(5), (1, 2, 3, 5)):
        for strategy in STRATEGIES:
            for changes, turns, rounds in (
                ({}, 2 * micros - 1, micros),
                ({"reshard_after_forward": False}, micros - 1, micros),
                ({"accumulate": "no_sync"}, 2 * micros - 1, 1),
            ):
                schedule = build_step(tied(blocks), Settings(strategy, prefetch, "block", micros, **changes))
                gathers = {
                    "no_shard": 0,
                    "shard_optimizer": blocks + 1,
                    "shard_grad_op": blocks + 1,
                }.get(strategy, formula(blocks, micros, prefetch, turns))
                assert sum(isinstance(step, Gather) for step in schedule) == gathers
                assert sum(isinstance(step, Reduce) for step in schedule) == rounds * (blocks + 1)


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
        ({"strategy": "shard"}, "shard.strategy is 'shard'; it must be one of full_shard, shard_grad_op"),
        ({"recompute": "all"}, "shard.recompute is 'all'; it must be one of none, block"),
        ({"prefetch": -1}, "shard.prefetch is -1; it must be 0 or more"),
        ({"micros": 0}, "a rank has 0 micro-batches; it needs at least one"),
        ({"accumulate": "sometimes"}, "shard.accumulate is 'sometimes'; it must be one of reduce, no_sync"),
        ({"recompute_every": 0}, "shard.recompute_every is 0; it must be 1 or more"),
        ({"group": -2}, "shard.group is -2; it must be 1 or more, or 0 for the ranks of a node"),
    ],
)
def test_settings_are_checked(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**changes)


def test_aliases() -> None:
    assert {alias: Settings(alias).strategy for alias in ALIASES} == {
        "zero1": "shard_optimizer",
        "zero2": "shard_grad_op",
        "zero3": "full_shard",
        "ddp": "no_shard",
    }
    assert [canonical(strategy) for strategy in STRATEGIES] == list(STRATEGIES)
    assert canonical("zero4") == "zero4"
    for alias, strategy in ALIASES.items():
        assert build_step(tied(2), Settings(alias)) == build_step(tied(2), Settings(strategy))


def test_groups() -> None:
    assert group_of(Settings("full_shard"), 12, 4) == 12
    assert group_of(Settings("hybrid_shard"), 12, 4) == 4
    assert group_of(Settings("hybrid_shard", group=6), 12, 4) == 6
    with pytest.raises(ConfigError, match=r"shard.group is 5 and does not divide 12 ranks; set shard.group to "):
        group_of(Settings("hybrid_shard", group=5), 12, 4)
    with pytest.raises(ConfigError, match=r"a node has 8 ranks, which is the group and does not divide 12 ranks"):
        group_of(Settings("hybrid_shard"), 12, 8)
