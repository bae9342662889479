"""Matrix products as calls of cuBLAS: what attention, heads and gradients multiply, and sizes at the edge."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpishard.array.cupy_blas import layout, plan, workspace_bytes
from mpishard.array.cupy_ops import CupyOps
from mpishard.array.dtypes import DTYPES, accumulator
from mpishard.errors import ShapeError
from tests.array.cupy_case import from_device, on_device, standing_in
from tests.standin import installed

KINDS = ("float32", "float64", "bfloat16", "float16")
B, T, H, D = 2, 7, 3, 4
C, V = H * D, 11


@pytest.fixture(scope="module")
def ops():
    with standing_in() as found:
        yield found


def check(ops, a, b, out, add, launches=1):
    """``out (+)= a @ b`` on views of device arrays, against float64, and how many calls it took."""
    wide_a, wide_b, before = (from_device(ops, x).astype(float) for x in (a, b, out))
    ops.counters.reset()
    ops.matmul(a, b, out, add)
    assert ops.counters.launches == launches
    found, want = from_device(ops, out).astype(float), wide_a @ wide_b + (before if add else 0.0)
    unit = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-22, "float64": 2**-50}[out.dtype.name]
    assert abs(found - want).max() <= 4 * unit * max(1.0, abs(want).max())


def numbers(ops, kind, *shape, seed=[0]):  # noqa: B006 - each array has other numbers
    seed[0] += 1
    return on_device(ops, np.random.default_rng(seed[0]).standard_normal(shape).astype(kind))


def heads(x, parts):
    """(B, T, parts * C) as [sequence][part] of (H, T, D), as nn/attention.py views it."""
    split = x.reshape(B, T, parts, H, -1)
    return [[split[b, :, p].swapaxes(0, 1) for p in range(parts)] for b in range(B)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("first", "last"), [(0, 3), (3, 6), (6, 7), (0, 7)])
def test_attention(ops, kind, first, last):
    kind = DTYPES[kind]
    (q, k, v), (dq, dk, dv) = (heads(numbers(ops, kind, B, T, 3 * C), 3)[1] for _ in range(2))
    (o,), (do,) = (heads(numbers(ops, kind, B, T, C), 1)[0] for _ in range(2))
    room = ops.empty(H * T * T, kind)
    p = room[: H * (last - first) * last].reshape(H, last - first, last)
    check(ops, q[:, first:last], k[:, :last].swapaxes(1, 2), p, False)
    check(ops, p, v[:, :last], o[:, first:last], False)
    check(ops, do[:, first:last], v[:, :last].swapaxes(1, 2), p, False)
    check(ops, p, k[:, :last], dq[:, first:last], False)
    for add in (False, True):
        check(ops, p.swapaxes(1, 2), do[:, first:last], dv[:, :last], add)
        check(ops, p.swapaxes(1, 2), q[:, first:last], dk[:, :last], add)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_linear_layers_and_heads(ops, kind, add, wide):
    kind = DTYPES[kind]
    gradient = accumulator(kind) if wide else kind
    x, dy, weight = numbers(ops, kind, B * T, C), numbers(ops, kind, B * T, V), numbers(ops, kind, C, V)
    check(ops, x, weight, numbers(ops, kind, B * T, V), add)
    check(ops, dy, weight.T, numbers(ops, kind, B * T, C), add)
    check(ops, x.T, dy, numbers(ops, gradient, C, V), add)
    table = numbers(ops, kind, V, C)
    logits = numbers(ops, kind, 5, V)
    check(ops, x[2:5], table.T, logits[:3], add)
    check(ops, logits.T, x[:5], numbers(ops, gradient, V, C), add)
    check(ops, x[2:5], table.T, numbers(ops, gradient, V, 3).T, add)


@pytest.mark.parametrize("kind", KINDS)
def test_batches(ops, kind):
    kind = DTYPES[kind]
    x = numbers(ops, kind, B, T, 3, H, D)
    q, k = x[:, :, 0].swapaxes(1, 2), x[:, :, 1].swapaxes(1, 2)
    # All heads of all sequences are no even series of matrices: a call a sequence.
    check(ops, q, k.swapaxes(2, 3), numbers(ops, kind, B, H, T, T), True, launches=min(B, H))
    a, b = numbers(ops, kind, 2, 5, 3, 4, 6), numbers(ops, kind, 2, 5, 3, 6, 2)
    check(ops, a, b, numbers(ops, kind, 2, 5, 3, 4, 2), False)
    check(ops, a[:, ::2], b[:, ::2], numbers(ops, kind, 2, 3, 3, 4, 2), False, launches=2 * 3)
    check(ops, a[:, 4:5, 1:2], b[:, 4:5, 1:2], numbers(ops, kind, 2, 1, 1, 4, 2), False)
    check(ops, a[:1, ::-1], b[:1, ::-1], numbers(ops, kind, 1, 5, 3, 4, 2), True, launches=5)
    check(ops, a[0, 0, 0], b[0, 0, 0], numbers(ops, kind, 4, 2), True)


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_axes_of_size_one_with_any_stride(ops, kind):
    kind = DTYPES[kind]
    for n, k, m in itertools.product((1, 3), repeat=3):
        big_a, big_b, big_out = (numbers(ops, kind, 9, 10) for _ in range(3))
        for a in (
            big_a[:n, :k],
            big_a[: 2 * n : 2, :k],
            big_a[:k, :n].T,
            big_a[:1, :n].T[:, :1] if k == 1 else big_a[:n, :k],
        ):
            for b in (big_b[:k, :m], big_b[:m, :k].T, big_b[: 3 * k : 3, 1 : m + 1]):
                for out in (big_out[:n, :m], big_out[:m, :n].T, big_out[: 2 * n : 2, :m]):
                    check(ops, a, b, out, True)


def test_no_elements(ops):
    out = on_device(ops, np.full((3, 2), 7.0, np.float32))
    empty = ops.empty(0, DTYPES["float32"])
    ops.matmul(empty.reshape(3, 0), empty.reshape(0, 2), out, True)
    assert (ops.fetch(out) == 7).all()
    ops.matmul(empty.reshape(3, 0), empty.reshape(0, 2), out)
    assert (ops.fetch(out) == 0).all()
    ops.counters.reset()
    ops.matmul(empty.reshape(0, 4), numbers(ops, "float32", 4, 2), empty.reshape(0, 2))
    ops.matmul(empty.reshape(0, 3, 4), empty.reshape(0, 4, 2), empty.reshape(0, 3, 2), True)
    assert ops.counters.launches == 0


def test_views_that_cublas_cannot_read(ops):
    x, out = numbers(ops, "float32", 8, 8), numbers(ops, "float32", 4, 4)
    for a, b, target, name in (
        (x[:4, ::2], x[:4, :4], out, "a"),
        (x[:4, :4], x[::2, ::2], out, "b"),
        (x[3::-1, :4], x[:4, :4], out, "a"),
        (x[:4, :4], x[:4, :4], numbers(ops, "float32", 8, 8)[::2, ::2], "out"),
    ):
        with pytest.raises(ShapeError, match=rf"^matmul was given {name} \(4, 4\) with strides .*copy it first$"):
            ops.matmul(a, b, target)


def test_how_matrices_lie():
    assert layout(3, 4, 4, 1) == (False, 4)
    assert layout(3, 4, 9, 1) == (False, 9)
    assert layout(3, 4, 1, 3) == (True, 3)
    assert layout(1, 4, 999, 1) == (False, 4)
    assert layout(1, 4, 0, 5) == (True, 5)
    assert layout(4, 1, 5, 999) == (False, 5)
    assert layout(4, 1, 1, -7) == (False, 1)
    assert layout(1, 1, -3, 0) == (False, 1)
    for strides in ((4, 2), (3, 1), (0, 1), (-4, 1), (1, 2), (1, 0), (1, -3)):
        assert layout(3, 4, *strides) is None


def test_sizes_beyond_32_bits_are_refused(ops):
    assert plan((3, 4), 5, (2**31, 1), (4, 1), (4, 1)) == "a"
    assert plan((3, 4), 5, (5, 1), (4, 1), (2**31, 1)) == "out"


@pytest.mark.parametrize("tf32", [False, True])
def test_what_cublas_is_told(monkeypatch, tf32):
    with installed():
        from cupy.cuda import cublas

        modes, calls = [], []
        plain = cublas.gemmEx
        monkeypatch.setattr(cublas, "setMathMode", lambda handle, mode: modes.append(mode))
        monkeypatch.setattr(cublas, "gemmEx", lambda *args: (calls.append(args), plain(*args)))
        ops = CupyOps(tf32=tf32)
        assert modes == [16]  # sums in the compute type
        for kind in KINDS:
            x = numbers(ops, kind, 4, 4)
            ops.matmul(x, x, ops.empty(16, x.dtype).reshape(4, 4))
        single = cublas.CUBLAS_COMPUTE_32F_FAST_TF32 if tf32 else cublas.CUBLAS_COMPUTE_32F
        plain = cublas.CUBLAS_COMPUTE_32F
        assert [call[-2] for call in calls] == [single, cublas.CUBLAS_COMPUTE_64F, plain, plain]
        assert {call[-1] for call in calls} == {cublas.CUBLAS_GEMM_DEFAULT}


def test_each_stream_has_a_handle_of_its_own(ops):
    import cupy

    other = ops.on(cupy.cuda.Stream(non_blocking=True))
    x = numbers(other, "float32", 4, 4)
    check(other, x, x.T, numbers(other, "float32", 4, 4), False)
    assert other._blas._handle != ops._blas._handle
    assert workspace_bytes(80) < workspace_bytes(90) == 32 << 20
