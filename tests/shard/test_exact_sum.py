"""Exact sums against fractions: any order, any grouping, any exponents; rounded once."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest

from mpishard.shard.exact import EXACT_BYTES, ExactSum

FLOAT32 = np.finfo(np.float32)


def squares(seed: int, count: int) -> np.ndarray:
    """Squares of fp32 numbers of all exponents, subnormal ones too, in fp64: exact."""
    draw = np.random.default_rng(seed)
    values = np.ldexp(draw.uniform(0.5, 1.0, count), draw.integers(-148, 129, count)).astype(np.float32)
    return values.astype(np.float64) ** 2


def losses(seed: int, count: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return np.ldexp(draw.uniform(-1.0, 1.0, count), draw.integers(-60, 20, count)).astype(np.float32).astype(np.float64)


def exact(values: np.ndarray) -> Fraction:
    return sum(map(Fraction, values.tolist()), Fraction(0))


def total(values: np.ndarray) -> ExactSum:
    one = ExactSum()
    one.add(values)
    return one


@pytest.mark.parametrize("make", [squares, losses])
@pytest.mark.parametrize("count", [0, 1, 2, 17, 5000])
def test_sums_are_exact_and_rounded_once(make: object, count: int) -> None:
    for seed in range(5):
        values = make(seed, count)
        one = total(values)
        assert Fraction(one.units, 2**298) == exact(values)
        assert one.value == float(exact(values))
        assert one.finite


def test_partial_sums_in_float64_are_exact_units() -> None:
    """What the engine adds: sums of 512 squares, rounded to float64."""
    partial = squares(3, 512 * 40).reshape(40, 512).sum(axis=1)
    assert Fraction(total(partial).units, 2**298) == exact(partial)


@pytest.mark.parametrize("make", [squares, losses])
def test_order_and_grouping_do_not_matter(make: object) -> None:
    values = make(11, 700)
    reference = total(values).units
    draw = random.Random(5)
    for _ in range(20):
        shuffled = values.copy()
        draw.shuffle(shuffled)
        cuts = sorted(draw.randrange(701) for _ in range(draw.randrange(8)))
        merged = ExactSum()
        for group in np.split(shuffled, cuts):
            merged.merge(total(group))
        assert merged.units == reference
    floats = {float(np.sum(values)), float(np.sum(values[::-1])), math.fsum(values)}
    assert math.fsum(values) == total(values).value
    assert len(floats) > 1 or make is squares  # plain sums depend on their order


@pytest.mark.parametrize(
    "values",
    [
        [1e30, 1.0, -1e30],
        [2.0**-149 * 2.0**-149] * 3,
        [float(FLOAT32.max) ** 2] * 9,
        [float(FLOAT32.max) ** 2, float(FLOAT32.smallest_subnormal) ** 2],
        [1.0, 2.0**-53, 2.0**-53],
        [1.0, 2.0**-53],
        [-3.5, -1e-30, 2.0**60],
        [0.0, -0.0],
        [-1.0] * 5000,
    ],
)
def test_adversaries(values: list[float]) -> None:
    array = np.array(values)
    forward, backward = total(array), total(array[::-1])
    assert forward.units == backward.units
    assert Fraction(forward.units, 2**298) == exact(array)
    assert forward.value == float(exact(array))


@pytest.mark.parametrize("values", [[1.0], [-1.0], [float(FLOAT32.max) ** 2] * 9, [-(2.0**200)], [], [2.0**-298]])
def test_pack_and_unpack(values: list[float]) -> None:
    one = total(np.array(values))
    record = one.pack()
    assert len(record) == EXACT_BYTES
    again = ExactSum.unpack(record, one.finite)
    assert (again.units, again.finite) == (one.units, one.finite)
    assert not ExactSum.unpack(record, False).finite


def test_room_for_the_largest_job() -> None:
    """2**80 squares of the largest fp32 number fit the record."""
    one = total(np.array([float(FLOAT32.max) ** 2]))
    many = ExactSum(one.units << 80)
    assert ExactSum.unpack(many.pack(), True).units == many.units


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 4095, 4096, 9999])
def test_what_is_not_finite_is_told(bad: float, place: int) -> None:
    values = np.ones(10000)
    values[place] = bad
    one = total(values)
    assert not one.finite
    assert math.isnan(one.value)
    other = total(np.ones(3))
    other.merge(one)
    assert not other.finite
    one.pack()


def test_float64_beyond_fp32_does_not_depend_on_grouping() -> None:
    """In a float64 run squares may be finer than a unit; what is dropped is dropped for each number by itself."""
    draw = np.random.default_rng(8)
    values = np.ldexp(draw.uniform(0.5, 1.0, 300), draw.integers(-330, -240, 300))
    reference = total(values).units
    merged = ExactSum()
    for value in values:
        merged.merge(total(np.array([value])))
    assert merged.units == reference
    assert abs(Fraction(reference, 2**298) - exact(values)) < Fraction(300, 2**298)


def test_float64_above_the_record_is_not_finite() -> None:
    """A square that no fp32 number has, and the record has no room for, skips the step; it does not end the run."""
    one = total(np.array([1.0, 1e300]))
    assert not one.finite
    one.pack()
