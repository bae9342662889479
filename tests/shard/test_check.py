"""Schedules broken on purpose, each refused with the instruction and the state; and what check accepts is right."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from mpishard.errors import ScheduleError
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
    Instruction,
    Loss,
    Outline,
    Recompute,
    Reduce,
    Release,
    Replicate,
    Update,
)
from mpishard.shard.schedule import RECOMPUTE, STRATEGIES, Settings, build_forward, build_step
from tests.shard.outlines import KINDS, parted, tied
from tests.shard.simulation import Simulation, wanted

Steps = tuple[Instruction, ...]
OUTLINE = tied(4)
FULL = build_step(OUTLINE, Settings("full_shard", 1, "block", 2))
REPLICATED = build_step(OUTLINE, Settings("no_shard", 1, "none", 2))
RESIDENT = build_step(OUTLINE, Settings("shard_grad_op", 1, "none", 2))
HYBRID = build_step(OUTLINE, Settings("hybrid_shard", 1, "none", 2))
FROZEN = build_step(parted(4), Settings("full_shard", 1, "block", 1))
STRATEGY = {FULL: "full_shard", REPLICATED: "no_shard", RESIDENT: "shard_grad_op", HYBRID: "hybrid_shard"}


def drop(step: Instruction) -> Callable[[Steps], Steps]:
    """Without the first of these instructions."""
    return lambda steps: steps[: steps.index(step)] + steps[steps.index(step) + 1 :]


def swap(old: Instruction, new: Instruction) -> Callable[[Steps], Steps]:
    """Another instruction in its place."""
    return lambda steps: steps[: steps.index(old)] + (new,) + steps[steps.index(old) + 1 :]


def put(step: Instruction, before: Instruction) -> Callable[[Steps], Steps]:
    """One more instruction."""
    return lambda steps: steps[: steps.index(before)] + (step,) + steps[steps.index(before) :]


def move(step: Instruction, before: Instruction) -> Callable[[Steps], Steps]:
    """The instruction elsewhere."""
    return lambda steps: put(step, before)(drop(step)(steps))


EMBED, HEAD = Backward("embed", 0, ("table",)), Loss("head", 0)

BROKEN: dict[str, tuple[Steps, Callable[[Steps], Steps], str]] = {
    "gather missing": (FULL, drop(Gather("h.1")), "unit h.1 is sharded, it must be gathering"),
    "gather and await missing": (
        FULL,
        lambda steps: drop(Gather("h.1"))(drop(Await("h.1"))(steps)),
        r"Forward\(stage='h.1'.*it reads unit h.1, which is sharded",
    ),
    "gathered twice": (FULL, put(Gather("h.1"), Forward("h.1", 0, False)), "h.1 is gathered, it must be sharded"),
    "await missing": (FULL, drop(Await("h.1")), "it reads unit h.1, which is gathering"),
    "await too late": (FULL, move(Await("h.1"), Forward("h.2", 0, False)), "it reads unit h.1, which is gathering"),
    "read when released": (FULL, move(Release("h.1"), Forward("h.1", 0, False)), "it reads unit h.1, which is sharded"),
    "release missing": (FULL, drop(Release("h.0")), "unit h.0 is gathered, it must be sharded"),
    "release too late": (FULL, lambda steps: move(Release("root"), Update("root"))(steps), "after Agree"),
    "release missing at the end": (
        FULL,
        drop(Release("root")),
        r"Update\(unit='root'\): unit root is gathered; peers may still read its shards",
    ),
    "reduction missing": (FULL, drop(Reduce("h.2", False)), "the gradient of unit h.2 is open, it must be reducing"),
    "absorbed before reduced": (
        FULL,
        move(Absorb("h.2"), Reduce("h.2", False)),
        r"Absorb\(unit='h.2'\): the gradient of unit h.2 is open, it must be reducing",
    ),
    "absorb missing": (FULL, drop(Absorb("h.2")), "reductions are absorbed first in, first out"),
    "written while it is reduced": (
        FULL,
        lambda steps: move(Absorb("root"), Backward("embed", 1, ("table",)))(steps),
        r"Loss\(stage='head', micro=1.*the gradient of unit root is reducing, it must be closed",
    ),
    "reduced before it is whole": (
        FULL,
        lambda steps: move(Reduce("root", False), Backward("h.3", 0))(drop(Absorb("h.0"))(steps)),
        "the gradient of positions of unit root has not been written",
    ),
    "first reduction adds": (FULL, swap(Reduce("h.1", False), Reduce("h.1", True)), "number 0 of unit h.1 must write"),
    "second reduction writes": (FULL, swap(Reduce("h.1", True), Reduce("h.1", False)), "number 1 of unit h.1 must add"),
    "write for add": (FULL, swap(EMBED, Backward("embed", 0)), "parameter table of unit root is written twice"),
    "add for write": (
        FULL,
        swap(EMBED, Backward("embed", 0, ("table", "positions"))),
        "parameter positions of unit root is added to nothing",
    ),
    "writes and adds exchanged": (
        FULL,
        lambda steps: swap(HEAD, Loss("head", 0, ("table",)))(swap(EMBED, Backward("embed", 0))(steps)),
        "parameter table of unit root is added to nothing",
    ),
    "agree missing": (FULL, drop(Agree()), "it must come after Agree"),
    "update before agree": (FULL, move(Update("h.1"), Agree()), r"Update\(unit='h.1'\): it must come after Agree"),
    "agree before the last absorb": (FULL, move(Agree(), Reduce("root", True)), "unit root is still open"),
    "agreed twice": (FULL, put(Agree(), Update("h.0")), "only Replicate, Update, and the Gather of what was updated"),
    "update missing": (FULL, drop(Update("h.3")), "the end of the step: unit h.3 was not updated"),
    "updated twice": (FULL, put(Update("h.0"), Update("h.1")), "unit h.0 was updated already"),
    "shards replicated": (FULL, put(Replicate("h.0"), Update("h.0")), "has nothing to replicate"),
    "replication missing": (REPLICATED, drop(Replicate("h.1")), "unit h.1 has not been replicated"),
    "replicated twice": (REPLICATED, put(Replicate("h.1"), Update("h.1")), "unit h.1 was replicated already"),
    "replicated before agree": (REPLICATED, move(Replicate("h.1"), Agree()), "it must come after Agree"),
    "gathered although resident": (
        REPLICATED,
        put(Gather("h.1"), HEAD),
        "no_shard keeps parameters whole, and gathers nothing before Agree",
    ),
    "gathered although updated whole": (
        REPLICATED,
        put(Gather("h.0"), Update("h.1")),
        "unit h.0 is gathered, it must be sharded",
    ),
    "gathered in the forward although resident": (
        RESIDENT,
        put(Gather("h.1"), HEAD),
        "shard_grad_op keeps parameters whole, and gathers nothing before Agree",
    ),
    "gathered before it is updated": (
        RESIDENT,
        move(Gather("h.1"), Update("h.1")),
        r"Gather\(unit='h.1'\): unit h.1 has not been updated",
    ),
    "not gathered when it was updated": (
        RESIDENT,
        lambda steps: drop(Gather("h.1"))(drop(Await("h.1"))(steps)),
        "the end of the step: unit h.1 is still sharded",
    ),
    "not there at the end": (RESIDENT, drop(Await("h.1")), "the end of the step: unit h.1 is still gathering"),
    "updated when it was gathered": (
        RESIDENT,
        put(Update("h.1"), Await("h.1")),
        "unit h.1 was updated already",
    ),
    "released although resident": (
        RESIDENT,
        lambda steps: (*steps, Release("h.1")),
        "only Replicate, Update, and the Gather of what was updated",
    ),
    "groups not added up": (HYBRID, drop(AllReduce("h.1")), "unit h.1 has not been added up across groups"),
    "groups added up twice": (HYBRID, put(AllReduce("h.1"), AllReduce("h.2")), "was added up across groups already"),
    "groups added up after agree": (HYBRID, move(AllReduce("h.1"), Update("root")), "come after Agree"),
    "groups added up before the unit is reduced": (
        HYBRID,
        move(AllReduce("root"), Absorb("root")),
        r"AllReduce\(unit='root'\): the gradient of unit root is not reduced inside the groups",
    ),
    "groups added up between micro-batches": (
        HYBRID,
        move(AllReduce("h.2"), Forward("h.2", 1)),
        r"Reduce\(unit='h.2', add=True\): unit h.2 was added up across groups already",
    ),
    "one group added up": (FULL, put(AllReduce("h.1"), Agree()), "full_shard has one group, and nothing to add up"),
    "forward missing": (FULL, drop(Forward("h.1", 0, False)), "the activation of stage h.1, micro-batch 0 and finds"),
    "forward twice": (FULL, put(Forward("h.1", 0, False), Forward("h.1", 0, False)), "did this already"),
    "loss missing": (FULL, drop(HEAD), "it needs the gradient of stage head, micro-batch 0 and finds the activation"),
    "recomputation missing": (FULL, drop(Recompute("h.1", 0)), "stage h.1 has kept nothing for micro-batch 0"),
    "recomputed although kept": (REPLICATED, put(Recompute("h.1", 0), Backward("h.1", 0)), "keeps what it needs"),
    "backward missing": (REPLICATED, drop(Backward("h.2", 0)), "the gradient of unit h.2 is closed, it must be open"),
    "backward before forward": (REPLICATED, move(Backward("h.1", 0), Forward("h.0", 0)), "has not been forward"),
    "backwards exchanged": (
        REPLICATED,
        move(Backward("h.1", 0), Backward("h.2", 0)),
        "it needs the gradient of stage h.2, micro-batch 0 and finds the gradient of stage h.3",
    ),
    "micro-batches mixed": (FULL, move(Forward("embed", 1), HEAD), "it needs no activation or gradient and finds"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_refused(case: str) -> None:
    steps, damage, message = BROKEN[case]
    strategy = STRATEGY[steps]
    check(OUTLINE, steps, strategy)
    with pytest.raises(ScheduleError, match=message):
        check(OUTLINE, damage(steps), strategy)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop(Await("h.2.frozen")), "it reads unit h.2.frozen, which is gathering"),
        (drop(Gather("h.2.frozen")), "unit h.2.frozen is sharded, it must be gathering"),
        (move(Release("h.2.frozen"), Forward("h.2", 0, False)), "it reads unit h.2.frozen, which is sharded"),
        (lambda steps: (*steps, Update("h.2.frozen")), "unit h.2.frozen has no gradient"),
        (put(Backward("h.0", 0), Release("h.0")), "it needs the gradient of stage h.1, micro-batch 0 and finds the"),
        (swap(Forward("h.0", 0, False), Forward("h.0", 0)), "stage h.0 has no backward, and nothing to keep for one"),
    ],
    ids=["awaited", "gathered", "released", "updated", "backward", "kept"],
)
def test_frozen_parameters(damage: Callable[[Steps], Steps], message: str) -> None:
    check(parted(4), FROZEN, "full_shard", 1)
    with pytest.raises(ScheduleError, match=message):
        check(parted(4), damage(FROZEN), "full_shard", 1)


def test_micro_batches_come_in_order_and_none_is_left_out() -> None:
    """Their order is that of the sums; only who knows how many are due can miss the last one."""
    one, two = (build_step(OUTLINE, Settings("no_shard", 1, "none", micros)) for micros in (1, 2))
    turned = tuple(replace(step, micro=1 - step.micro) if hasattr(step, "micro") else step for step in two)
    with pytest.raises(ScheduleError, match="it is the turn of micro-batch 0"):
        check(OUTLINE, turned, "no_shard")
    check(OUTLINE, one, "no_shard")
    check(OUTLINE, two, "no_shard", 2)
    with pytest.raises(ScheduleError, match="1 micro-batches were computed, 2 are due"):
        check(OUTLINE, one, "no_shard", 2)


def test_a_forward_pass_that_releases_nothing() -> None:
    steps = build_forward(OUTLINE, Settings("full_shard", 1), Evaluate)
    with pytest.raises(ScheduleError, match="the end of the step: unit root is still gathered"):
        check(OUTLINE, drop(Release("root"))(steps), "full_shard")


def test_the_message_names_the_place() -> None:
    at = FULL.index(Await("h.1"))
    with pytest.raises(ScheduleError) as caught:
        check(OUTLINE, drop(Await("h.1"))(FULL), "full_shard")
    assert str(caught.value).startswith(f"instruction {at}, Forward(stage='h.1', micro=0, keep=False): ")


def every_step() -> Iterator[tuple[Outline, Settings, Steps]]:
    """Every strategy on every kind of model; two of them with all that changes a schedule beside."""
    settings = [Settings(*one) for one in itertools.product(("full_shard", "no_shard"), (0, 2), RECOMPUTE, (1, 2))]
    for kind, blocks, one in itertools.product(KINDS.values(), (0, 1, 3), settings):
        yield kind(blocks), one, build_step(kind(blocks), one)
    settings = [Settings(strategy, 1, "block", 2) for strategy in STRATEGIES]
    settings += [replace(one, accumulate="no_sync") for one in settings]
    settings += [replace(one, reshard_after_forward=False) for one in settings if not one.resident]
    for kind, one in itertools.product(KINDS.values(), settings):
        yield kind(2), one, build_step(kind(2), one)


def test_no_instruction_is_superfluous() -> None:
    """Without any one of them, or with any one of them twice in a row, a step is refused."""
    for outline, settings, steps in every_step():
        for i in range(len(steps)):
            for damaged in (steps[:i] + steps[i + 1 :], steps[: i + 1] + steps[i:]):
                with pytest.raises(ScheduleError):
                    check(outline, damaged, settings.strategy, settings.micros)


def test_what_is_accepted_computes_the_same() -> None:
    """Instructions moved, exchanged and replaced at random: what check lets pass gives the same sums."""
    draw = random.Random(7)
    accepted = refused = 0
    for outline, settings, steps in every_step():
        once = settings.accumulate == "no_sync"
        result = wanted(outline, settings.micros, settings.strategy, once)
        for _ in range(60):
            damaged = list(steps)
            for _ in range(draw.choice((1, 1, 2))):
                i, j = draw.randrange(len(damaged)), draw.randrange(len(damaged))
                if draw.random() < 0.3:
                    j = min(i + 1, len(damaged) - 1)
                kind = draw.random()
                if kind < 0.5:
                    damaged.insert(j, damaged.pop(i))
                elif kind < 0.9:
                    damaged[i], damaged[j] = damaged[j], damaged[i]
                else:
                    damaged[i] = damaged[j]
            try:
                check(outline, damaged, settings.strategy, settings.micros)
            except ScheduleError:
                refused += 1
                continue
            simulation = Simulation(outline, settings.strategy)
            simulation.run(damaged)
            assert simulation.shards == result
            simulation.finish()
            accepted += damaged != list(steps)
    assert accepted > 200
    assert refused > 1000
