"""The way between host and device, and sums without rounding."""

import numpy as np
import pytest

from mpishard.array.constants import EXACT_WORDS
from mpishard.array.dtypes import DTYPES
from mpishard.array.exact import FRACTION, from_words
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.shape_ops import ShapeOps


@pytest.mark.parametrize("kind", DTYPES)
def test_host_memory_is_its_own_host_array(kind):
    ops, x = NumpyOps(), np.arange(5).astype(DTYPES[kind])
    assert ops.host_like(x) is x
    assert ops.fetch(x) is x
    ops.upload(x, x)
    assert x.astype(float).tolist() == [0, 1, 2, 3, 4]
    other = np.zeros_like(x)
    ops.upload(x, other)
    x[:] = 0
    assert other.astype(float).tolist() == [0, 1, 2, 3, 4]
    assert ops.device == "cpu"


def test_nothing_moves_between_shapes():
    ops = ShapeOps()
    x = ops.empty(5, np.dtype(np.float32))
    assert ops.host_like(x).shape == ops.fetch(x).shape == x.shape
    ops.upload(np.ones(5, np.float32), x)
    ops.prepare(DTYPES["bfloat16"])
    assert ops.own_bytes == 0


def whole(values):
    """The sum in units, of numbers that are whole multiples of one."""
    total = 0
    for value in values.tolist():
        top, bottom = value.as_integer_ratio()
        total += top * (1 << FRACTION) // bottom
    return total


def test_sums_are_exact_in_any_grouping():
    rng, ops = np.random.default_rng(0), NumpyOps()
    values = rng.standard_normal(9000) * 10.0 ** rng.uniform(-60, 80, 9000)
    found = set()
    for step in (1000, 4097, 9000):
        out = np.zeros(EXACT_WORDS, np.int64)
        for start in range(0, values.size, step):
            ops.exact_sum(values[start : start + step], out)
        found.add((from_words(out), out.tobytes()))
    ((result, _),) = found
    assert result == (whole(values), True)


def test_words_that_were_not_carried_are_added_to():
    out = np.zeros(EXACT_WORDS, np.int64)
    out[:20] = [-(3 << 40), 1 << 62, -5, *[7] * 17]
    before, _ = from_words(out)
    NumpyOps().exact_sum(np.array([-1.0, 2.0**-298]), out)
    assert from_words(out) == (before - (1 << FRACTION) + 1, True)
    assert (abs(out[:19]) < 1 << 32).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**300])
def test_values_that_are_not_finite_are_counted(bad):
    out = np.zeros(EXACT_WORDS, np.int64)
    NumpyOps().exact_sum(np.array([1.0, bad]), out)
    assert out[EXACT_WORDS - 1] > 0
    assert not from_words(out)[1]
