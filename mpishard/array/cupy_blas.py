"""Matrix products: views of any legal strides as calls of cuBLAS.

[Note: row-major and column-major]
cuBLAS reads memory column by column. A row-major matrix (R, C) with row stride s is, to it, the transpose: a
column-major (C, R) with leading dimension s. So ``out = a @ b`` is asked for as ``out.T = b.T @ a.T``, and a view with
swapped axes is one that cuBLAS is told to transpose. Of axes of size 1 the strides mean nothing and are not looked at.

[Note: the same bits again]
cuBLAS gives the same bits for the same shapes, strides and alignment on the same kind of GPU as long as a handle serves
one stream (NVIDIA, cuBLAS library, section 2.1.4, results reproducibility). Each object of operations has a handle of
its own, used on its stream alone. The workspace is cuBLAS's: CuPy sets the stream of a handle at every call, which
takes back a workspace given by the caller.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from mpishard.array.cupy_gpu import KINDS, KINDS_IN_WORDS, Counters, Gpu
from mpishard.array.cupy_strides import elements, joined
from mpishard.array.dtypes import DTYPES, Array, accumulator
from mpishard.errors import ShapeError

__all__ = ["Blas", "Plan", "layout", "plan", "workspace_bytes"]

_KEPT = 4096  # shapes whose calls are kept
_LIMIT = 2**31  # cuBLAS takes sizes as 32-bit integers
#: CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: a long product that is split up rounds once all the same
_SUMS_IN_COMPUTE_TYPE = 16


def workspace_bytes(capability: int) -> int:
    """Return the bytes that cuBLAS takes for a handle unless CUBLAS_WORKSPACE_CONFIG says otherwise."""
    return 32 << 20 if capability >= 90 else (8 << 20) + (128 << 10)


def layout(rows: int, columns: int, row_stride: int, column_stride: int) -> tuple[bool, int] | None:
    """Return how a matrix lies, as (columns are contiguous, leading dimension); None where cuBLAS cannot read it.

    Sizes are not 0; strides in elements.
    """
    if (column_stride == 1 or columns == 1) and (rows == 1 or row_stride >= columns):
        return False, row_stride if rows > 1 else columns
    if (row_stride == 1 or rows == 1) and (columns == 1 or column_stride >= rows):
        return True, column_stride if columns > 1 else rows
    return None


class Plan(NamedTuple):
    """One or several calls of cuBLAS, which sees ``C (m, n) = first (m, k) @ second (k, n)``, column-major.

    ``first_is_b``: the first factor is b, for out is row-major; else it is a. ``strides`` lead from one matrix of
    a batch to the next, of a, b and out. ``offsets`` of a, b and out: one call each.
    """

    first_is_b: bool
    transposed: tuple[bool, bool]  # first, second
    sizes: tuple[int, int, int]
    leading: tuple[int, int, int]  # first, second, C
    batch: int
    strides: tuple[int, int, int]
    offsets: tuple[tuple[int, int, int], ...]


def plan(
    shape: tuple[int, ...], inner: int, a: tuple[int, ...], b: tuple[int, ...], out: tuple[int, ...]
) -> Plan | str:
    """Return the calls for out of ``shape`` (..., N, M) and ``inner`` = K, none of them 0, from strides in elements.

    Returns:
        The name of the array that cuBLAS cannot read, where there is one.
    """
    n, m = shape[-2:]
    lies = {"a": layout(n, inner, *a[-2:]), "b": layout(inner, m, *b[-2:]), "out": layout(n, m, *out[-2:])}
    for name, found in lies.items():
        if found is None or found[1] >= _LIMIT:
            return name
    (a_turned, a_ld), (b_turned, b_ld), (out_turned, out_ld) = (found for found in lies.values() if found)
    axes, *steps = joined(shape[:-2], a[:-2], b[:-2], out[:-2])
    batch, strides = 1, (0, 0, 0)
    outer = list(zip(axes, *steps))
    # The largest axis along which all views go forward becomes the batch, the others one call each.
    forward = [axis for axis in outer if min(axis[1:]) >= 0 and axis[0] < _LIMIT]
    if forward:
        largest = max(forward)
        outer.remove(largest)
        batch, strides = largest[0], (largest[1], largest[2], largest[3])
    offsets = tuple(
        (
            sum(i * axis[1] for i, axis in zip(place, outer)),
            sum(i * axis[2] for i, axis in zip(place, outer)),
            sum(i * axis[3] for i, axis in zip(place, outer)),
        )
        for place in product(*(range(axis[0]) for axis in outer))
    )
    if out_turned:
        return Plan(False, (not a_turned, not b_turned), (n, m, inner), (a_ld, b_ld, out_ld), batch, strides, offsets)
    return Plan(True, (b_turned, a_turned), (m, n, inner), (b_ld, a_ld, out_ld), batch, strides, offsets)


class _Call(NamedTuple):
    """A plan with all arguments but the addresses, in the order in which cuBLAS takes them."""

    function: Callable[..., None]
    first_is_b: bool
    offsets: tuple[tuple[int, int, int], ...]  # bytes, of a, b and out
    head: tuple[int, ...]
    first: tuple[int, ...]
    second: tuple[int, ...]
    beta: tuple[int, int]  # where 0 and 1 are
    tail: tuple[int, ...]


class Blas:
    """A cuBLAS handle for the stream of one object of operations."""

    def __init__(self, gpu: Gpu) -> None:
        self._cublas: Any = gpu.cupy.cuda.cublas
        cublas, runtime = self._cublas, gpu.runtime
        gpu.use()
        self._handle = cublas.create()
        # Not while the process ends: cuBLAS waits for the device, which may wait for a rank that is gone.
        weakref.finalize(self, _destroy, cublas, self._handle).atexit = False
        cublas.setMathMode(self._handle, cublas.CUBLAS_DEFAULT_MATH | _SUMS_IN_COMPUTE_TYPE)
        types = (runtime.CUDA_R_32F, runtime.CUDA_R_64F, runtime.CUDA_R_16BF, runtime.CUDA_R_16F)
        self._types = dict(zip(KINDS, types, strict=True))
        plain = cublas.CUBLAS_COMPUTE_32F
        single = cublas.CUBLAS_COMPUTE_32F_FAST_TF32 if gpu.tf32 else plain
        self._compute = dict(zip(KINDS, (single, cublas.CUBLAS_COMPUTE_64F, plain, plain), strict=True))
        # cuBLAS reads alpha and beta from host memory, of the type that it computes in, before the call returns.
        self._scalars = {kind: np.array([0, 1], kind) for kind in (DTYPES["float32"], DTYPES["float64"])}
        self._calls: dict[Hashable, _Call] = {}

    def matmul(self, a: Array, b: Array, out: Array, add: bool, counters: Counters) -> None:
        """Ask for ``out (+)= a @ b`` on the thread's current stream; no size is 0.

        Raises:
            ShapeError: element types or strides that cuBLAS does not take.
        """
        key = (a.shape, a.strides, b.shape, b.strides, out.strides, a.dtype, b.dtype, out.dtype)
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= _KEPT:
                self._calls.clear()
            call = self._calls[key] = self._prepare(a, b, out)
        function, first_is_b, offsets, head, first, second, beta, tail = call
        for from_a, from_b, from_out in offsets:
            p = a.data.ptr + from_a  # type: ignore[attr-defined]
            q = b.data.ptr + from_b  # type: ignore[attr-defined]
            if first_is_b:
                p, q = q, p
            function(*head, p, *first, q, *second, beta[add], out.data.ptr + from_out, *tail)  # type: ignore[attr-defined]
        counters.launches += len(offsets)

    def _prepare(self, a: Array, b: Array, out: Array) -> _Call:
        kind = a.dtype
        if kind not in self._types or b.dtype != kind or (out.dtype != kind and out.dtype != accumulator(kind)):
            raise ShapeError(
                f"matmul was given a {a.dtype}, b {b.dtype}, out {out.dtype}; on a GPU it takes "
                f"{KINDS_IN_WORDS} for a and b alike, and for out the same or float32 for 16 bits"
            )
        how = plan(out.shape, a.shape[-1], elements(a), elements(b), elements(out))
        if isinstance(how, str):
            wrong = {"a": a, "b": b, "out": out}[how]
            raise ShapeError(
                f"matmul was given {how} {wrong.shape} with strides {wrong.strides}; on a GPU one of the last two "
                "axes must be contiguous and the other step over it: copy it first"
            )
        if max(how.sizes) >= _LIMIT:
            raise ShapeError(f"matmul was given a {a.shape}, b {b.shape}; on a GPU it takes sizes below 2**31")
        cublas, scalars = self._cublas, self._scalars[accumulator(kind)]
        zero, one = scalars.ctypes.data, scalars.ctypes.data + scalars.itemsize
        turned = (cublas.CUBLAS_OP_T if t else cublas.CUBLAS_OP_N for t in how.transposed)
        (first_ld, second_ld, out_ld), (a_step, b_step, out_step) = how.leading, how.strides
        kinds, out_kind = self._types[kind], self._types[out.dtype]
        first: tuple[int, ...] = (kinds, first_ld)
        second: tuple[int, ...] = (kinds, second_ld)
        last: tuple[int, ...] = (out_kind, out_ld)
        function = cublas.gemmEx
        if how.batch > 1:
            function = cublas.gemmStridedBatchedEx
            first_step, second_step = (b_step, a_step) if how.first_is_b else (a_step, b_step)
            first, second, last = (*first, first_step), (*second, second_step), (*last, out_step, how.batch)
        return _Call(
            function,
            how.first_is_b,
            tuple((i * a.itemsize, j * b.itemsize, k * out.itemsize) for i, j, k in how.offsets),
            (self._handle, *turned, *how.sizes, one),
            first,
            second,
            (zero, one),
            (*last, self._compute[kind], cublas.CUBLAS_GEMM_DEFAULT),
        )


def _destroy(cublas: Any, handle: int) -> None:
    # After a fault of the device there is nothing left to destroy.
    with contextlib.suppress(Exception):
        cublas.destroy(handle)
