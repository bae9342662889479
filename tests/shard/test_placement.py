"""Placed buffers: no two that live at once overlap, for 1 to 1024 ranks, and the region is as small as can be."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest

from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.nn.model import Model
from mpishard.shard.engine import outline_of
from mpishard.shard.instructions import (
    Absorb,
    AllReduce,
    Backward,
    Evaluate,
    Gather,
    Instruction,
    Loss,
    Outline,
    Reduce,
    Release,
)
from mpishard.shard.layout import layout
from mpishard.shard.place import KINDS as CATEGORIES
from mpishard.shard.place import Placement, Sizes, place
from mpishard.shard.schedule import STRATEGIES, Settings, build_forward, build_step
from tests.shard.outlines import KINDS, tied
from tests.shard.training import Job

RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 31, 64, 100, 256, 512, 1000, 1023, 1024)
MODELS = {
    "small": Job().model,
    "odd": gpt2(Gpt2(layers=3, width=21, heads=3, sequence=5, vocabulary=997)),
    "one block": gpt2(Gpt2(layers=1, width=8, heads=2, sequence=16, vocabulary=16)),
    "no blocks": gpt2(Gpt2(layers=0, width=8, heads=2, sequence=16, vocabulary=160)),
    "small root": gpt2(Gpt2(layers=7, width=64, heads=4, sequence=4, vocabulary=8)),
    "124M": gpt2(Gpt2(layers=12, width=768, heads=12, sequence=1024, vocabulary=50257)),
    "1.5B": gpt2(Gpt2(layers=48, width=1600, heads=25, sequence=1024, vocabulary=50257)),
}


#: what a step must hold beside a window of blocks
Room = Callable[[int], int]


@dataclass
class Living:
    """Buffers that are alive, as (offset, end), while a schedule is walked; all in one region."""

    sizes: Mapping[str, int]
    placement: Placement
    scratch: Room
    across: Room

    def __post_init__(self) -> None:
        self.alive: dict[tuple[str, str], tuple[int, int]] = {}
        self.reached = self.begun = 0
        self.fullest = dict.fromkeys(CATEGORIES, 0)
        self.most = dict.fromkeys(CATEGORIES, 0)

    def begin(self, kind: str, unit: str, offset: int, size: int) -> None:
        size = -(-size // 64) * 64
        span = (offset, offset + size)
        assert 0 <= offset <= span[1] <= self.placement.size
        assert offset % 64 == 0
        for other, (start, end) in self.alive.items():
            assert span[1] <= start or end <= span[0] or start == end, f"{kind} of {unit} overlaps {other}"
        assert (kind, unit) not in self.alive
        self.alive[kind, unit] = span
        self.reached = max(self.reached, span[1])
        self.begun += 1

    def look(self, i: int) -> None:
        """What lives at an instruction is what the placement says of it."""
        now = dict.fromkeys(CATEGORIES, 0)
        for (kind, _), (start, end) in self.alive.items():
            now[kind] += end - start
        assert now == {kind: self.placement.live[kind][i] for kind in CATEGORIES}
        if sum(now.values()) > sum(self.fullest.values()):
            self.fullest = now
        self.most = {kind: max(size, now[kind]) for kind, size in self.most.items()}

    def walk(self, outline: Outline, schedule: Sequence[Instruction], resident: bool = False) -> None:
        for i, step in enumerate(schedule):
            gone: list[tuple[str, str]] = []
            if isinstance(step, Gather) and not resident:
                self.begin("gathered", step.unit, self.placement.gathered[i], self.sizes[step.unit])
            elif isinstance(step, Release):
                gone = [("gathered", step.unit)]
            elif isinstance(step, Loss | Backward):
                opened = {unit for unit, _ in outline.stage(step.stage).params}
                for unit in [unit for unit in opened if ("unreduced", unit) not in self.alive]:
                    self.begin("unreduced", unit, self.placement.unreduced[i][unit], self.sizes[unit])
            elif isinstance(step, Reduce):
                self.begin("staging", step.unit, self.placement.staging[i], self.scratch(self.sizes[step.unit]))
            elif isinstance(step, Absorb):
                gone = [("unreduced", step.unit), ("staging", step.unit)]
            elif isinstance(step, AllReduce):
                self.begin("staging", step.unit, self.placement.staging[i], self.across(self.sizes[step.unit]))
                gone = [("staging", step.unit)]
            self.look(i)
            for buffer in gone:
                del self.alive[buffer]
        assert not self.alive
        assert self.reached == self.placement.size
        assert self.fullest == self.placement.fullest
        assert self.placement.size >= sum(self.fullest.values())
        opened = sum(map(len, self.placement.unreduced.values()))
        assert self.begun == len(self.placement.gathered) + opened + len(self.placement.staging)


def totals(model: Model, ranks: int) -> dict[str, int]:
    return {unit.name: layout(unit.specs, ranks).total for unit in model.units}


def walked(
    outline: Outline,
    schedule: Sequence[Instruction],
    sizes: Mapping[str, int],
    scratch: Room,
    across: Room = lambda count: 0,
    resident: bool = False,
) -> Living:
    """Place with one byte an element, and walk."""
    rooms = {unit: Sizes(size, size, scratch(size), across(size)) for unit, size in sizes.items()}
    living = Living(sizes, place(outline, schedule, rooms), scratch, across)
    living.walk(outline, schedule, resident)
    if living.placement.size == sum(living.fullest.values()):
        return living
    none = Sizes(0, 0, 0, 0)
    apart = (("gathered",), ("unreduced",), ("staging", "across"))
    each = [{u: none._replace(**{k: getattr(r, k) for k in kinds}) for u, r in rooms.items()} for kinds in apart]
    assert living.placement.size <= sum(place(outline, schedule, one).size for one in each)
    return living


def same(count: int) -> int:
    return count


def none(count: int) -> int:
    return 0


def half(count: int) -> int:
    return count // 2


@pytest.mark.parametrize("name", MODELS)
def test_no_two_live_buffers_overlap_and_the_region_is_no_larger_than_its_fullest_moment(name: str) -> None:
    model = MODELS[name]
    outline = outline_of(model)
    blocks = len(model.units) - 1
    for strategy, prefetch, micros in itertools.product(STRATEGIES, (0, 1, 2, 3), (1, 2)):
        settings = Settings(strategy, prefetch, "none", micros)
        schedule = build_step(outline, settings)
        for ranks in RANKS:
            sizes = totals(model, ranks)
            root, block = sizes["root"], sizes.get("h.0", 0)
            scratch = same if ranks > 1 else none
            across = half if settings.hybrid else none
            living = walked(outline, schedule, sizes, scratch, across, settings.resident)
            window = 0 if settings.resident else min(blocks, prefetch + 1) * block + root
            gradients = min(blocks, 2, prefetch + 1) * block + root
            if strategy == "shard_optimizer":
                gradients = blocks * block + root
            staging = max(root, block) if ranks > 1 else half(max(root, block)) if settings.hybrid else 0
            assert living.most == {"gathered": window, "unreduced": gradients, "staging": staging}
            assert living.placement.size == sum(living.fullest.values())


@pytest.mark.parametrize("changes", [{"reshard_after_forward": False}, {"accumulate": "no_sync"}], ids=str)
@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard"])
def test_what_stays_is_all_of_the_model(strategy: str, changes: dict[str, object]) -> None:
    """Parameters that stay till their backward, or gradients till the last micro-batch, are whole on each rank."""
    for name, prefetch, micros in itertools.product(("small", "no blocks", "124M"), (0, 1, 2), (1, 2)):
        model = MODELS[name]
        outline = outline_of(model)
        settings = replace(Settings(strategy, prefetch, "none", micros), **changes)
        schedule = build_step(outline, settings)
        for ranks in RANKS:
            sizes = totals(model, ranks)
            living = walked(outline, schedule, sizes, same, half if settings.hybrid else none)
            which = "gathered" if "reshard_after_forward" in changes else "unreduced"
            blocks = len(model.units) - 1
            most = blocks if which == "gathered" or micros > 1 else min(blocks, 2, prefetch + 1)
            assert living.most[which] == most * sizes.get("h.0", 0) + sizes["root"]
            assert living.placement.size == sum(living.fullest.values())


def test_every_number_of_ranks_up_to_1024() -> None:
    model = MODELS["124M"]
    outline = outline_of(model)
    schedule = build_step(outline, Settings("full_shard", 1, "none", 1))
    for ranks in range(1, 1025):
        sizes = totals(model, ranks)
        living = walked(outline, schedule, sizes, same)
        assert living.most["gathered"] == living.most["unreduced"] == sizes["root"] + 2 * sizes["h.0"]
        assert living.placement.size == sum(living.fullest.values())


def test_evaluation_needs_no_more_than_training() -> None:
    for model, prefetch in itertools.product(MODELS.values(), (0, 1, 2, 3)):
        outline, sizes = outline_of(model), totals(model, 6)
        settings = Settings("full_shard", prefetch, "none", 2)
        forward = walked(outline, build_forward(outline, settings, Evaluate), sizes, same)
        training = walked(outline, build_step(outline, settings), sizes, same)
        assert forward.placement.size == forward.most["gathered"] == training.most["gathered"]
        assert forward.most["unreduced"] == forward.most["staging"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_units_of_any_size(kind: str) -> None:
    """Sizes of all proportions, also such that do not fill a place, so that freed places fit badly."""
    draw = random.Random(3)
    for blocks, prefetch, micros in itertools.product(range(6), (0, 1, 2, 3), (1, 3)):
        outline = KINDS[kind](blocks)
        strategy = draw.choice(("full_shard", "hybrid_shard", "shard_optimizer"))
        settings = Settings(strategy, prefetch, "block", micros, reshard_after_forward=draw.random() < 0.7)
        schedule = build_step(outline, settings)
        for _ in range(5):
            any_size = draw.randint(1, 50000)
            sizes = {unit.name: draw.choice((512, 1024, 1536, 4096, any_size)) for unit in outline.units}
            walked(outline, schedule, sizes, same, half, settings.resident)


def test_long_lives_are_placed_as_short_ones() -> None:
    """Kept units of a deep model live for hundreds of instructions; others begin and end below them."""
    outline = tied(90)
    sizes = {unit.name: 4096 + 512 * (i % 7) for i, unit in enumerate(outline.units)}
    for settings in (Settings(micros=2), Settings(micros=2, reshard_after_forward=False), Settings("shard_optimizer")):
        walked(outline, build_step(outline, settings), sizes, same, resident=settings.resident)


def test_a_schedule_without_communication() -> None:
    outline = KINDS["tied"](2)
    schedule = build_forward(outline, Settings("no_shard"), Evaluate)
    found = walked(outline, schedule, {"root": 512, "h.0": 512, "h.1": 512}, same, resident=True).placement
    assert (found.size, found.fullest) == (0, dict.fromkeys(CATEGORIES, 0))
    assert place(outline, (), {}).fullest == dict.fromkeys(CATEGORIES, 0)


def test_the_walk_sees_an_overlap() -> None:
    outline, sizes = tied(3), {"root": 512, "h.0": 1024, "h.1": 1024, "h.2": 1024}
    schedule = build_step(outline, Settings())
    right = walked(outline, schedule, sizes, same).placement
    first, second = (schedule.index(Gather(unit)) for unit in ("h.0", "h.1"))
    wrong = replace(right, gathered={**right.gathered, second: right.gathered[first]})
    with pytest.raises(AssertionError, match="overlaps"):
        Living(sizes, wrong, same, none).walk(outline, schedule)
    reduced = schedule.index(Reduce("h.2", False))
    gradient = right.unreduced[schedule.index(Backward("h.2", 0))]["h.2"]
    wrong = replace(right, staging={**right.staging, reduced: gradient})
    with pytest.raises(AssertionError, match=r"staging of h\.2 overlaps"):
        Living(sizes, wrong, same, none).walk(outline, schedule)
