from __future__ import annotations

import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES
from tests.standin import DeviceFault, installed
from tests.standin.small import device_array, fetched, put

BF16, F16 = DTYPES["bfloat16"], DTYPES["float16"]
#: NumPy's type -> (of CUDA, that it is computed in)
KINDS = {np.dtype(np.float32): (0, 68), np.dtype(np.float64): (1, 70), BF16: (14, 68), F16: (2, 68)}


@pytest.fixture
def stream():
    with installed():
        import cupy

        yield cupy.cuda.Stream(non_blocking=True)


def product(stream, a, b, out, *, factor=1.0, keep=0.0, turned=(False, False)):
    """``out = factor * a @ b + keep * out`` of row-major matrices, as cuBLAS is asked: the transposes."""
    from cupy.cuda import cublas

    scalars = np.array([factor, keep], np.float64 if out.dtype == np.float64 else np.float32)
    n, m = out.shape[-2:]
    k = a.shape[-2] if turned[0] else a.shape[-1]
    kind, compute = KINDS[a.dtype]
    where = scalars.ctypes.data
    lead = [x.strides[-2] // x.itemsize for x in (b, a, out)]
    far = [x.strides[0] // x.itemsize for x in (b, a, out)]
    handle = cublas.create()
    with stream:
        if out.ndim == 2:
            cublas.gemmEx(
                handle, int(turned[1]), int(turned[0]), m, n, k, where, b.data.ptr, kind, lead[0], a.data.ptr, kind,
                lead[1], where + scalars.itemsize, out.data.ptr, KINDS[out.dtype][0], lead[2], compute, -1,
            )  # fmt: skip
        else:
            cublas.gemmStridedBatchedEx(
                handle, int(turned[1]), int(turned[0]), m, n, k, where, b.data.ptr, kind, lead[0], far[0], a.data.ptr,
                kind, lead[1], far[1], where + scalars.itemsize, out.data.ptr, KINDS[out.dtype][0], lead[2], far[2],
                out.shape[0], compute, -1,
            )  # fmt: skip
    return fetched(out, stream)


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_products_have_numpys_bits(stream, kind, turned):
    random = np.random.default_rng(0)
    a, b = random.standard_normal((17, 33)).astype(kind), random.standard_normal((33, 9)).astype(kind)
    stored_a, stored_b = (np.ascontiguousarray(x.T) if t else x for x, t in zip((a, b), turned))
    out = device_array(17 * 9, kind).reshape(17, 9)  # NaN, which beta 0 must not read
    found = product(stream, put(stored_a, stream), put(stored_b, stream), out, turned=turned)
    expected = np.empty((17, 9), kind)
    np.matmul(*(x.T if t else x for x, t in zip((stored_a, stored_b), turned)), out=expected)
    assert np.array_equal(found, expected)


def test_batches_of_views_and_sums(stream):
    random = np.random.default_rng(1)
    heads = random.standard_normal((6, 4 * 8)).astype(np.float32)  # 4 heads of 8 features side by side
    other, start = random.standard_normal((4, 8, 5)).astype(np.float32), np.ones((4, 6, 5), np.float32)
    view = put(heads, stream).reshape(6, 4, 8).swapaxes(0, 1)
    found = product(stream, view, put(other, stream), put(start, stream), factor=2.0, keep=3.0)
    assert np.allclose(found, 2 * heads.reshape(6, 4, 8).swapaxes(0, 1) @ other + 3, rtol=1e-5)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind", [BF16, F16])
def test_sixteen_bits_are_added_in_float32_and_rounded_once(stream, kind, wide):
    random, out = np.random.default_rng(2), np.dtype(np.float32) if wide else kind
    a, b = random.standard_normal((5, 300)).astype(kind), random.standard_normal((300, 7)).astype(kind)
    found = product(stream, put(a, stream), put(b, stream), device_array(35, out).reshape(5, 7))
    assert found.dtype == out
    assert np.array_equal(found, (a.astype(np.float32) @ b.astype(np.float32)).astype(out))


def test_what_cublas_refuses(stream):
    from cupy.cuda import cublas

    x = put(np.ones((4, 4), np.float32), stream)
    out, one = device_array(16).reshape(4, 4), np.ones(2, np.float32).ctypes.data

    def call(handle, kind=0, compute=68, lead=4, n=4, c=None):
        p, q = x.data.ptr, out.data.ptr if c is None else c
        with stream:
            cublas.gemmEx(handle, 0, 0, 4, n, 4, one, p, kind, lead, p, kind, 4, one, q, kind, 4, compute, -1)

    handle = cublas.create()
    call(handle)
    for wrong, problem in (
        ({"lead": 3}, "INVALID_VALUE"), ({"n": -1}, "INVALID_VALUE"), ({"compute": 70}, "NOT_SUPPORTED"),
        ({"kind": 3}, "NOT_SUPPORTED"), ({"kind": 2, "compute": 64}, "NOT_SUPPORTED"),
    ):  # fmt: skip
        with pytest.raises(cublas.CUBLASError, match=problem):
            call(handle, **wrong)
    with pytest.raises(DeviceFault, match="overlaps"):
        call(handle, c=x.data.ptr)
    with pytest.raises(DeviceFault, match="behind"):
        call(handle, n=5)
    cublas.destroy(handle)
    with pytest.raises(cublas.CUBLASError, match="NOT_INITIALIZED"):
        call(handle)
