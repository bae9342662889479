"""Copies, fills and elementwise operations on views of any strides, against NumPy on the same views."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpishard.array import cupy_launch
from mpishard.array.cupy_strides import elements, joined, padded
from mpishard.array.dtypes import DTYPES, accumulator
from mpishard.errors import ShapeError
from tests.array.cupy_case import from_device, on_device, standing_in, transposed
from tests.standin import runtime

FLOATS = ("float32", "float64", "bfloat16", "float16")


@pytest.fixture(scope="module")
def ops():
    with standing_in() as found:
        yield found


def test_axes_are_joined_where_every_view_allows_it():
    assert joined((2, 3, 4), (12, 4, 1)) == ((24,), (1,))
    assert joined((2, 3, 4), (12, 4, 1), (24, 8, 2)) == ((24,), (1,), (2,))
    assert joined((2, 3, 4), (12, 4, 1), (0, 4, 1)) == ((2, 12), (12, 1), (0, 1))
    assert joined((2, 3, 4), (1, 2, 6)) == ((2, 3, 4), (1, 2, 6))
    assert joined((1, 3, 1), (99, 4, -7)) == ((3,), (4,))
    assert joined((1, 1), (5, 5)) == ((), ())
    assert joined((2, 3), (0, 0)) == ((6,), (0,))
    assert joined((2, 3), (-3, -1)) == ((6,), (-1,))
    assert padded((5, 2), 1) == (1, 1, 5, 2)
    assert elements(np.zeros((2, 3), np.float64)) == (3, 1)


def views(kind, shape, seed):
    """Views of this shape with all sorts of strides, as (base, how to see it)."""
    rng = np.random.default_rng(seed)
    size = len(shape)
    wide = tuple(2 * n + 1 for n in shape)
    cuts = (tuple(slice(0, n) for n in shape), tuple(slice(1, 2 * n, 2) for n in shape),
            tuple(slice(n - 1, None, -1) for n in shape))  # fmt: skip
    orders = list(itertools.permutations(range(size)))
    for cut in cuts:
        order = list(orders[rng.integers(len(orders))])
        base = rng.integers(-9, 9, tuple(wide[axis] for axis in order)).astype(kind)
        back = [order.index(axis) for axis in range(size)]
        yield base, lambda x, back=back, cut=cut: transposed(x, back)[cut]
    yield rng.integers(-9, 9, shape).astype(kind), lambda x: x


SHAPES = [(7,), (3, 4), (2, 3, 4), (2, 3, 2, 3), (2, 1, 3, 2, 2), (2, 2, 2, 2, 3)]


@pytest.mark.parametrize("kind", [*FLOATS, "int64", "uint8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copy(ops, shape, kind):
    kind = DTYPES[kind]
    for (x, see_x), (out, see_out) in itertools.product(views(kind, shape, 1), views(kind, shape, 2)):
        there, target = on_device(ops, x), on_device(ops, out)
        refused = kind.kind in "iu" and any(step < 0 for step in (*see_x(x).strides, *see_out(out).strides))
        if refused and any(n > 1 for n in shape):
            with pytest.raises(ShapeError, match=r"^copy was given x .*; on a GPU they go forward$"):
                ops.copy(see_x(there), see_out(target))
            continue
        want = out.copy()
        see_out(want)[...] = see_x(x)
        ops.copy(see_x(there), see_out(target))
        assert from_device(ops, target).tobytes() == want.tobytes()


def test_rows_that_lie_further_apart_than_cuda_copies_at_once(monkeypatch, ops):
    monkeypatch.setattr(cupy_launch, "_PITCH", 19)
    monkeypatch.setattr(runtime, "MAX_PITCH", 19)
    x, out = np.arange(60, dtype=np.uint8).reshape(3, 20), np.zeros((3, 20), np.uint8)
    there, target = on_device(ops, x), on_device(ops, out)
    ops.copy(there[:, 2:9], target[:, 4:11])
    out[:, 4:11] = x[:, 2:9]
    assert from_device(ops, target).tobytes() == out.tobytes()


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_and_multiply(ops, shape, kind):
    kind = DTYPES[kind]
    for wide, lacking in ((False, 0), (True, 1)):
        to = accumulator(kind) if wide else kind
        triples = zip(views(kind, shape, 3), views(kind, shape[lacking:], 4), reversed(list(views(to, shape, 5))))
        for (x, see_x), (y, see_y), (out, see_out) in triples:
            for name in ("add", "multiply", "multiply more"):
                if name == "add" and wide:
                    continue
                there, second, target = (on_device(ops, array) for array in (x, y, out))
                want, one, other = out.copy(), see_x(x).astype(float), see_y(y).astype(float)
                result = one + other if name == "add" else one * other
                see_out(want)[...] = result + see_out(out).astype(float) if name == "multiply more" else result
                more = {"add": True} if name == "multiply more" else {}
                getattr(ops, name.split()[0])(see_x(there), see_y(second), see_out(target), **more)
                assert from_device(ops, target).tobytes() == want.tobytes()


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, np.nan, -np.inf])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fill(ops, shape, value, kind):
    for out, see in views(DTYPES[kind], shape, 6):
        target, want = on_device(ops, out), out.copy()
        see(want)[...] = value
        ops.fill(see(target), value)
        found = from_device(ops, target)
        if np.isnan(value):  # which NaN is the processor's choice
            assert (np.isnan(found) == np.isnan(want)).all()
            found[np.isnan(found)] = want[np.isnan(want)] = 0
        assert found.tobytes() == want.tobytes()


@pytest.mark.parametrize("kind", ["int64", "uint64", "uint16", "uint8"])
def test_fill_of_types_without_kernels(ops, kind):
    kind = DTYPES[kind]
    values = {"uint8": (0, 255, 7), "int64": (0, -1, 0x0505050505050505)}.get(kind.name, (0,))
    for value in values:
        x = on_device(ops, np.full((4, 6), 3, kind))
        ops.fill(x[1:3, 2:4], value)
        want = np.full((4, 6), 3, kind)
        want[1:3, 2:4] = value
        assert ops.fetch(x).tobytes() == want.tobytes()
        ops.fill(x, value)
        assert (ops.fetch(x) == value).all()
    x = ops.empty(8, kind)
    for out, value in ((x, 300.5), (x[::2], 0)):
        if kind == np.uint8 and value:
            continue
        with pytest.raises(
            ShapeError, match=rf"^fill was given {value} for out .*; on a GPU contiguous arrays of this"
        ):
            ops.fill(out, value)


def test_one_call_where_one_is_enough(ops):
    x, y = (on_device(ops, np.zeros((6, 8, 10), np.float32)) for _ in range(2))
    for call, counted in (
        (lambda: ops.copy(x, y), (0, 1)),
        (lambda: ops.copy(x, x), (0, 0)),
        (lambda: ops.fill(x, 0.0), (0, 1)),
        (lambda: ops.fill(x, 1.0), (1, 0)),
        (lambda: ops.copy(x[:, 2:4], y[:, 2:4]), (1, 0)),
        (lambda: ops.add(x[:, 2:4], y[0, 2:4], x[:, 2:4]), (1, 0)),
        (lambda: ops.copy(x.view(np.uint8)[:, 2:4], y.view(np.uint8)[:, 2:4]), (0, 1)),
        (lambda: ops.add(x[:0], y[:0], x[:0]), (0, 0)),
    ):
        ops.counters.reset()
        call()
        assert (ops.counters.launches, ops.counters.copies) == counted
