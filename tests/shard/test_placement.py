"""Placed buffers: no two that live at once overlap, for 1 to 1024 ranks, and regions are as small as a formula says."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest

from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.nn.model import Model
from mpishard.shard.engine import outline_of
from mpishard.shard.instructions import (
    Absorb,
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


@dataclass
class Living:
    """Buffers that are alive, as (offset, end), while a schedule is walked; each region by itself."""

    sizes: Mapping[str, int]
    placement: Placement
    scratch: Callable[[int], int]

    def __post_init__(self) -> None:
        self.alive: dict[str, dict[str, tuple[int, int]]] = {"gathered": {}, "unreduced": {}, "scratch": {}}
        self.limits = {
            "gathered": self.placement.gathered_size,
            "unreduced": self.placement.unreduced_size,
            "scratch": self.placement.staging_size,
        }
        self.reached = dict.fromkeys(self.alive, 0)
        self.begun = 0

    def begin(self, region: str, unit: str, offset: int, size: int) -> None:
        span = (offset, offset + size)
        assert offset >= 0
        assert span[1] <= self.limits[region]
        for other, (start, end) in self.alive[region].items():
            assert span[1] <= start or end <= span[0], f"{unit} overlaps {other} in {region}"
        assert unit not in self.alive[region]
        self.alive[region][unit] = span
        self.reached[region] = max(self.reached[region], span[1])
        self.begun += 1

    def walk(self, outline: Outline, schedule: Sequence[Instruction]) -> None:
        for i, step in enumerate(schedule):
            if isinstance(step, Gather):
                self.begin("gathered", step.unit, self.placement.gathered[i], self.sizes[step.unit])
            elif isinstance(step, Release):
                del self.alive["gathered"][step.unit]
            elif isinstance(step, Loss | Backward):
                for unit in {unit for unit, _ in outline.stage(step.stage).params} - set(self.alive["unreduced"]):
                    self.begin("unreduced", unit, self.placement.unreduced[i][unit], self.sizes[unit])
            elif isinstance(step, Reduce):
                size = self.scratch(self.sizes[step.unit])
                self.begin("scratch", step.unit, self.placement.staging[i], size)
            elif isinstance(step, Absorb):
                del self.alive["unreduced"][step.unit]
                del self.alive["scratch"][step.unit]
        assert not any(self.alive.values())
        assert self.reached == self.limits
        opened = sum(map(len, self.placement.unreduced.values()))
        assert self.begun == len(self.placement.gathered) + opened + len(self.placement.staging)


def totals(model: Model, ranks: int) -> dict[str, int]:
    return {unit.name: layout(unit.specs, ranks).total for unit in model.units}


def placed_as(
    outline: Outline, schedule: Sequence[Instruction], sizes: Mapping[str, int], scratch: Callable[[int], int]
) -> Placement:
    """Place with one byte an element."""
    return place(outline, schedule, {unit: Sizes(size, size, scratch(size)) for unit, size in sizes.items()})


def same(count: int) -> int:
    return count


def none(count: int) -> int:
    return 0


@pytest.mark.parametrize("name", MODELS)
def test_no_two_live_buffers_overlap_and_regions_are_small(name: str) -> None:
    model = MODELS[name]
    outline = outline_of(model)
    blocks = len(model.units) - 1
    for strategy, prefetch, micros in itertools.product(STRATEGIES, (0, 1, 2, 3), (1, 2)):
        schedule = build_step(outline, Settings(strategy, prefetch, "none", micros))
        for ranks in RANKS:
            sizes = totals(model, ranks)
            root, block = sizes["root"], sizes.get("h.0", 0)
            scratch = same if ranks > 1 else none
            placed = placed_as(outline, schedule, sizes, scratch)
            Living(sizes, placed, scratch).walk(outline, schedule)
            window = min(blocks, prefetch + 1) * block + root if strategy == "full_shard" else 0
            assert placed.gathered_size == window
            assert placed.unreduced_size == min(blocks, 2, prefetch + 1) * block + root
            assert placed.staging_size == (max(root, block) if ranks > 1 else 0)


def test_every_number_of_ranks_up_to_1024() -> None:
    model = MODELS["124M"]
    outline = outline_of(model)
    schedule = build_step(outline, Settings("full_shard", 1, "none", 1))
    for ranks in range(1, 1025):
        sizes = totals(model, ranks)
        placed = placed_as(outline, schedule, sizes, same)
        Living(sizes, placed, same).walk(outline, schedule)
        assert placed.gathered_size == placed.unreduced_size == sizes["root"] + 2 * sizes["h.0"]


def test_evaluation_needs_no_more_than_training() -> None:
    for model, prefetch in itertools.product(MODELS.values(), (0, 1, 2, 3)):
        outline, sizes = outline_of(model), totals(model, 6)
        settings = Settings("full_shard", prefetch, "none", 2)
        forward = build_forward(outline, settings, Evaluate)
        placed = placed_as(outline, forward, sizes, same)
        Living(sizes, placed, same).walk(outline, forward)
        assert placed.gathered_size == placed_as(outline, build_step(outline, settings), sizes, same).gathered_size
        assert placed.unreduced_size == placed.staging_size == 0


@pytest.mark.parametrize("kind", KINDS)
def test_units_of_any_size(kind: str) -> None:
    """Sizes of all proportions, so that freed places fit badly."""
    draw = random.Random(3)
    for blocks, prefetch, micros in itertools.product(range(6), (0, 1, 2, 3), (1, 3)):
        outline = KINDS[kind](blocks)
        schedule = build_step(outline, Settings("full_shard", prefetch, "block", micros))
        for _ in range(5):
            any_size = 512 * draw.randint(1, 99)
            sizes = {unit.name: draw.choice((512, 1024, 1536, 4096, any_size)) for unit in outline.units}
            placed = placed_as(outline, schedule, sizes, same)
            Living(sizes, placed, same).walk(outline, schedule)


def test_the_walk_sees_an_overlap() -> None:
    outline, sizes = tied(3), {"root": 512, "h.0": 1024, "h.1": 1024, "h.2": 1024}
    schedule = build_step(outline, Settings())
    placed = placed_as(outline, schedule, sizes, same)
    Living(sizes, placed, same).walk(outline, schedule)
    first, second = (schedule.index(Gather(unit)) for unit in ("h.0", "h.1"))
    wrong = Placement(
        {**placed.gathered, second: placed.gathered[first]},
        placed.unreduced,
        placed.staging,
        placed.gathered_size,
        placed.unreduced_size,
        placed.staging_size,
    )
    with pytest.raises(AssertionError, match="overlaps"):
        Living(sizes, wrong, same).walk(outline, schedule)
