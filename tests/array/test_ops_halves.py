"""Operations on float16, whose range is small: what overflows is infinite, small numbers are kept, nothing warns.

What float16 has in common with bfloat16 is in test_ops_narrow.py.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpishard.array.numpy_halves import HALF_BYTES, narrow_halves, widen_halves
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.numpy_tiles import TILE
from mpishard.array.ops import AdamWStep, Draw
from tests.array.op_case import Case
from tests.array.test_ops import arguments_of, arrays_of, run_name
from tests.array.test_ops_narrow import NARROW

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
LARGEST = 65504.0


def every_half() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16).view(F16)


def value_of(word: int) -> float:
    """The number that 16 bits are (IEEE 754-2008, section 3.4)."""
    sign, exponent, digits = -1.0 if word >> 15 else 1.0, word >> 10 & 31, word & 1023
    if exponent == 31:
        return float("nan") if digits else sign * float("inf")
    return sign * (digits * 2.0**-24 if exponent == 0 else (1024 + digits) * 2.0 ** (exponent - 25))


def nearest_even(x: np.ndarray) -> np.ndarray:
    """float16's nearest to finite numbers, in float64: whole multiples of the last place, ties to even."""
    wide = x.astype(np.float64)
    unit = 2.0 ** np.maximum(np.floor(np.log2(np.maximum(abs(wide), 1e-300))) - 10, -24)
    rounded = np.rint(wide / unit) * unit
    return np.where(abs(rounded) > LARGEST, np.copysign(np.inf, wide), np.copysign(rounded, wide))


def ties_and_beside() -> np.ndarray:
    """float32 numbers: all halves, what lies in the middle of two, and the next ones to either side of those."""
    halves = np.sort(every_half()[np.isfinite(every_half())].astype(np.float64))
    middles = np.concatenate([halves, (halves[1:] + halves[:-1]) / 2, [65520.0, -65520.0]]).astype(F32)
    sides = [np.nextafter(middles, F32.type(side * np.inf)) for side in (1, -1)]
    return np.concatenate([middles, *sides, np.geomspace(1e-30, 1e30, 5001, dtype=F32)])


# --- conversions


def test_every_float16_is_read_as_its_value():
    out = np.empty(1 << 16, F32)
    NumpyOps().copy(every_half(), out)
    np.testing.assert_array_equal(out, [value_of(word) for word in range(1 << 16)])
    assert (np.signbit(out) == (np.arange(1 << 16) >> 15 == 1)).all()


def test_rounding_to_nearest_even_with_small_numbers_and_infinity():
    x = ties_and_beside()
    out = np.empty(x.size, F16)
    NumpyOps().copy(x, out)
    expected = nearest_even(x)
    assert out.astype(np.float64).tobytes() == expected.tobytes()
    assert np.isinf(expected).sum() > 100


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
def test_copies_of_what_does_not_fit(kind):
    from mpishard.array.dtypes import DTYPES

    x, out = np.array([7e4, -1e30, np.inf, np.nan, 1e-9, 3.0]).astype(DTYPES[kind]), np.empty(6, F16)
    NumpyOps().copy(x, out)
    np.testing.assert_array_equal(out.astype(float), [np.inf, -np.inf, np.inf, np.nan, 0.0, 3.0])
    NumpyOps().fill(out, 1e6)
    assert np.isinf(out).all()


@pytest.mark.parametrize("special", [1.0, np.inf, np.nan, 1e6])
def test_views_of_any_strides_have_numpys_bits(special):
    rng, scratch = np.random.default_rng(1), np.empty(HALF_BYTES * 300, np.uint8)
    for shape, order in itertools.product([(20, 15), (4, 5, 15)], [1, -1]):
        wide = (rng.standard_normal(shape) * 10.0 ** rng.integers(-8, 5, shape)).astype(F32)[::order]
        wide[0, 1] = special
        with np.errstate(over="ignore"):
            expected = wide.astype(F16)
        for out in (np.empty(shape, F16), np.empty(shape[::-1], F16).T, np.empty((2, *shape), F16)[1]):
            narrow_halves(wide, out, scratch)
            assert out.tobytes() == expected.tobytes()
            back = np.empty(shape, F32)
            widen_halves(out, back, scratch)
            assert back.tobytes() == expected.astype(F32).tobytes()
    narrow_halves(np.empty((0, 3), F32), np.empty((0, 3), F16), scratch)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_arrays_larger_than_a_tile(ndim):
    shape = {1: (3 * TILE + 5,), 2: (7, TILE + 1), 3: (3, 700, 17)}[ndim]
    wide = np.random.default_rng(2).standard_normal(shape).astype(F32) * F32.type(1e-4)
    ops, turned = NumpyOps(), np.empty(shape[::-1], F16).T
    for out in (np.empty(shape, F16), turned):
        ops.copy(wide, out)
        assert (out == wide.astype(F16)).all()
        back, other = np.empty(shape, F32), np.empty(shape[::-1], F32).T
        ops.copy(out, back)
        ops.copy(out, other)
        assert (back == wide.astype(F16)).all()
        assert (other == back).all()


# --- operations


@pytest.mark.parametrize("scale", [2.0**-16, 2.0**10])
@pytest.mark.parametrize("case", [case for case, kind in NARROW if kind == "float16"], ids=run_name)
def test_small_and_large_numbers_are_what_float32_gives_rounded_once(case: Case, scale):
    """Of the small ones most are no normal numbers; many products of the large ones are infinite, and nothing warns."""
    narrow = arguments_of(case, "float16", False)
    for array in itertools.chain(*(v if isinstance(v, list) else [v] for v in narrow.values() if not np.isscalar(v))):
        if isinstance(array, np.ndarray) and array.dtype == F16:
            array *= F16.type(scale)

    def wide(value):
        if isinstance(value, list):
            return [wide(item) for item in value]
        if not isinstance(value, np.ndarray):
            return value
        return value.astype(F32) if value.dtype == F16 else value.copy()

    expected = {name: wide(value) for name, value in narrow.items()}
    getattr(NumpyOps(), case.op)(**expected)
    getattr(NumpyOps(), case.op)(**narrow)
    found = arrays_of(narrow)
    for name, array in arrays_of(expected).items():
        if case.op == "cross_entropy" and name == "logits_" and not narrow["gradient"]:
            continue
        with np.errstate(over="ignore"):
            assert array.astype(found[name].dtype).tobytes() == found[name].tobytes(), name


def full(value: float, *shape: int) -> np.ndarray:
    return np.full(shape, value, F16)


ROW, NONE = np.ones(4, F32), np.zeros(4, F32)
#: operation -> (its arguments, the places among them of arrays that become infinite)
TOO_LARGE = {
    "copy": lambda: ((np.full(4, 65520.0, F32), full(0, 4)), (1,)),
    "matmul": lambda: ((full(200, 4, 3), full(200, 3, 4), full(0, 4, 4)), (2,)),
    "matmul-add": lambda: ((full(1, 4, 1), full(40000, 1, 4), full(40000, 4, 4), True), (2,)),
    "linear": lambda: ((full(200, 4, 3), full(200, 3, 4), full(1, 4), full(0, 4, 4)), (3,)),
    "column_sum": lambda: ((full(40000, 2, 4), full(0, 4)), (1,)),
    "add": lambda: ((full(40000, 4, 4), full(40000, 4), full(0, 4, 4)), (2,)),
    "multiply": lambda: ((full(300, 4), full(300, 4), full(0, 4)), (2,)),
    "gelu_backward": lambda: ((full(1.4, 4), full(60000, 4), full(0, 4)), (2,)),
    "dropout": lambda: ((full(40000, 64), full(0, 64), 0.5, Draw(1, 2, 3, 4)), ()),
    "layernorm": lambda: (
        (np.arange(4, dtype=F16).repeat(4).reshape(4, 4).T, full(60000, 4), full(60000, 4), full(0, 4, 4), NONE.copy(),
         NONE.copy(), 1e-5), ()),
    "layernorm_backward": lambda: (
        (full(1, 4, 4), full(1, 4), NONE, ROW, full(40000, 4, 4), full(0, 4, 4), full(0, 4), full(0, 4)), (6, 7)),
    "embedding_backward": lambda: ((np.zeros(4, np.int64), full(40000, 4, 4), full(0, 1, 4)), (2,)),
    "softmax_backward": lambda: ((full(1, 1, 2, 2), full(40000, 1, 2, 2), -np.full((1, 2), 4e4, F32), 1.0), (1,)),
    "cross_entropy": lambda: ((full(0, 2, 2), np.zeros(2, np.int64), np.empty(2, F32), 2e5, True), (0,)),
    "adamw": lambda: (
        (np.full(4, 1e5, F32), ROW.copy(), NONE.copy(), NONE.copy(),
         AdamWStep(1.0, 0.1, 0.9, 0.9, 1e-8, 0.1, 0.1, ((0, 4, 0.0),)), full(0, 4)), (5,)),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_overflows_is_infinite_and_nothing_warns(name):
    arguments, places = TOO_LARGE[name]()
    getattr(NumpyOps(), name.partition("-")[0])(*arguments)
    for place in places:
        assert np.isinf(arguments[place]).all()
    if not places:
        assert np.isinf(np.concatenate([a.reshape(-1) for a in arguments if isinstance(a, np.ndarray)])).any()


def test_ordered_sums_are_made_in_float32():
    out = np.zeros(TILE + 3, F32)
    NumpyOps().ordered_sum([full(60000, out.size)] * 3 + [full(2.0**-24, out.size)], out, False)
    assert (out == 180000).all()
    NumpyOps().ordered_sum([full(2.0**-24, out.size), full(np.inf, out.size)], out, False)
    assert np.isinf(out).all()


def test_scores_as_small_as_float16_has_them_hide_no_key_and_show_none():
    """A mask of finite numbers would. (Next to 65504 float32 knows log-sums to 2**-8, hence the tolerance.)"""
    scores, lse = full(-LARGEST, 2, 300, 300), np.empty((2, 300), F32)
    scores[1] = LARGEST
    NumpyOps().causal_softmax(scores, lse, 0, 1.0)
    seen = np.tril(np.ones((300, 300)))
    np.testing.assert_allclose(scores.astype(float), np.stack([seen / seen.sum(1)[:, None]] * 2), rtol=0.005)
    np.testing.assert_allclose(lse[1] - LARGEST, np.log(np.arange(1, 301)), atol=0.01)
    assert not scores[:, seen == 0].view(np.uint16).any()


def test_probabilities_below_the_least_are_zero_and_above_it_are_kept():
    scores, lse = full(0, 1, 1, 3), np.empty((1, 1), F32)
    scores[0, 0] = [0.0, -15.0, -18.0]
    NumpyOps().causal_softmax(scores, lse, 2, 1.0)
    assert scores[0, 0].tolist() == [1.0, 5 * 2.0**-24, 0.0]
