"""Flat layouts: parameters and holes cover each buffer once, and the shards' pieces cover each parameter once."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from mpishard.nn.layer import ParamSpec
from mpishard.shard.layout import Layout, layout

ALIGN, SHARD = 16, 512


def random_specs(seed: int) -> tuple[ParamSpec, ...]:
    draw = random.Random(seed)
    shapes = [tuple(draw.choice((1, 2, 3, 15, 16, 17, 40)) for _ in range(draw.randint(1, 3))) for _ in range(9)]
    return tuple(
        ParamSpec(f"p{i}", shape, decay=draw.random() < 0.5, trainable=draw.random() < 0.7)
        for i, shape in enumerate(shapes)
    )


def cases() -> list[tuple[tuple[ParamSpec, ...], int]]:
    return list(itertools.product((random_specs(seed) for seed in range(8)), (1, 2, 3, 5, 8, 100, 1024)))


def covered(flat: Layout, ranges: tuple[tuple[int, int], ...]) -> list[int]:
    """How often each element is covered."""
    count = [0] * flat.total
    for start, stop in ranges:
        assert 0 <= start < stop <= flat.total
        for i in range(start, stop):
            count[i] += 1
    return count


def test_parameters_and_holes_cover_the_buffer_once() -> None:
    for specs, ranks in cases()[: 8 * 5]:
        flat = layout(specs, ranks)
        slots = tuple((slot.offset, slot.offset + slot.size) for slot in flat.slots)
        assert covered(flat, slots + flat.holes) == [1] * flat.total
        trained = tuple((s.offset, s.offset + s.size) for s in flat.slots if s.trainable)
        assert covered(flat, trained + flat.silent) == [1] * flat.total


def test_sizes() -> None:
    for specs, ranks in cases():
        flat = layout(specs, ranks)
        assert flat.total == flat.shard * ranks
        assert flat.shard % SHARD == 0
        end = 0
        for spec, slot in zip(specs, flat.slots, strict=True):
            assert (slot.name, slot.shape, slot.size) == (spec.name, spec.shape, math.prod(spec.shape))
            assert (slot.decay, slot.trainable) == (spec.decay, spec.trainable)
            assert slot.offset % ALIGN == 0
            assert 0 <= slot.offset - end < ALIGN
            end = slot.offset + slot.size
        assert 0 <= flat.total - end < SHARD * ranks


def test_shards_hold_each_element_once() -> None:
    for specs, ranks in cases():
        flat = layout(specs, ranks)
        found: dict[str, list[tuple[int, int]]] = {spec.name: [] for spec in specs}
        for rank in range(ranks):
            first = rank * flat.shard
            for piece in flat.pieces(first, first + flat.shard):
                assert 0 <= piece.offset < piece.end <= flat.shard
                assert first + piece.offset == piece.slot.offset + piece.start
                found[piece.slot.name].append((piece.start, piece.stop))
        for spec in specs:
            borders = found[spec.name]
            assert borders[0][0] == 0
            assert borders[-1][1] == math.prod(spec.shape)
            assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(borders))


def test_silent_ranges_of_a_shard() -> None:
    for specs, ranks in cases()[: 8 * 4]:
        flat = layout(specs, ranks)
        whole = covered(flat, flat.silent)
        for rank in range(ranks):
            first = rank * flat.shard
            inside = [0] * flat.shard
            for start, stop in flat.silent_within(first, first + flat.shard):
                assert 0 <= start < stop <= flat.shard
                inside[start:stop] = [1] * (stop - start)
            assert inside == whole[first : first + flat.shard]


@pytest.mark.parametrize("ranks", [1, 3])
def test_nothing_to_lay_out(ranks: int) -> None:
    assert layout((), ranks) == Layout((), 0, 0, ranks)
    frozen = layout([replace(spec, trainable=False) for spec in random_specs(0)], ranks)
    assert frozen.silent == ((0, frozen.total),)
