"""``cupy.cuda.cublas``: matrix products in column order, on the current stream of the calling thread.

A call made for ``out = a @ b`` in row order is computed by ``np.matmul`` on views with the strides of ``a``, ``b`` and
``out``, so float32 products without ``beta`` have the bits that NumPy gives for the same arrays.

[Note: the workspace of a handle]
Two products of one handle on two streams that are not ordered share the handle's workspace: NVIDIA promises no
bit-equal results then. In the record each call writes to a region of its own that stands for it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tests.standin.arguments import address, count, whole
from tests.standin.errors import CUBLASError
from tests.standin.machine import Access, here
from tests.standin.memory import Block, DeviceFault
from tests.standin.regions import moved, overlap, pieces

__all__ = [
    "CUBLAS_COMPUTE_32F",
    "CUBLAS_COMPUTE_32F_FAST_TF32",
    "CUBLAS_COMPUTE_32F_PEDANTIC",
    "CUBLAS_COMPUTE_64F",
    "CUBLAS_COMPUTE_64F_PEDANTIC",
    "CUBLAS_DEFAULT_MATH",
    "CUBLAS_GEMM_DEFAULT",
    "CUBLAS_GEMM_DEFAULT_TENSOR_OP",
    "CUBLAS_OP_C",
    "CUBLAS_OP_N",
    "CUBLAS_OP_T",
    "CUBLAS_POINTER_MODE_DEVICE",
    "CUBLAS_POINTER_MODE_HOST",
    "CUBLAS_TENSOR_OP_MATH",
    "CUBLASError",
    "create",
    "destroy",
    "gemmEx",
    "gemmStridedBatchedEx",
    "getVersion",
    "setMathMode",
    "setStream",
]

CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_OP_C = 0, 1, 2
CUBLAS_DEFAULT_MATH, CUBLAS_TENSOR_OP_MATH = 0, 1
CUBLAS_POINTER_MODE_HOST, CUBLAS_POINTER_MODE_DEVICE = 0, 1
CUBLAS_GEMM_DEFAULT, CUBLAS_GEMM_DEFAULT_TENSOR_OP = -1, 99
CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_PEDANTIC, CUBLAS_COMPUTE_32F_FAST_TF32 = 68, 69, 77
CUBLAS_COMPUTE_64F, CUBLAS_COMPUTE_64F_PEDANTIC = 70, 71

_F32, _F64, _F16, _BF16 = 0, 1, 2, 14
_ITEM = {_F32: 4, _F64: 8, _F16: 2, _BF16: 2}
#: (compute type, type of A and B, type of C)
_OFFERED = (
    {(compute, _F32, _F32) for compute in (68, 69, 77)}
    | {(compute, half, c) for compute in (68, 69) for half in (_BF16, _F16) for c in (half, _F32)}
    | {(compute, _F64, _F64) for compute in (70, 71)}
)


class _Handle:
    def __init__(self, device: int) -> None:
        self.device, self.alive = device, True
        self.workspace = Block(0, "device", device, 0, 1, np.zeros(1, np.uint8), "cuBLAS workspace of a handle")


def _handles() -> dict[int, _Handle]:
    handles: dict[int, _Handle] = here().__dict__.setdefault("cublas", {})
    return handles


def _handle(value: int) -> _Handle:
    found = _handles().get(address(value))
    if found is None or not found.alive:
        raise CUBLASError(1)
    return found


def create() -> int:
    machine = here()
    number = machine.handle()
    _handles()[number] = _Handle(machine.device)
    return number


def destroy(handle: int) -> None:
    _handle(handle).alive = False


def setStream(handle: int, stream: int) -> None:  # noqa: N802 - CuPy's names, here and below
    """Without effect on what follows: CuPy sets the current stream of the thread at each call."""
    _handle(handle)
    here().work(count(stream), "setStream")


def setMathMode(handle: int, mode: int) -> None:  # noqa: N802
    _handle(handle)
    if whole(mode) not in (0, 1, 2, 3, 16):
        raise CUBLASError(7)


def getVersion(handle: int) -> int:  # noqa: N802
    _handle(handle)
    return 120903


def gemmEx(  # noqa: N802
    handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, A: int, Atype: int, lda: int,
    B: int, Btype: int, ldb: int, beta: int, C: int, Ctype: int, ldc: int, computeType: int, algo: int,
) -> None:  # fmt: skip
    a, b, c = (A, Atype, lda, 0), (B, Btype, ldb, 0), (C, Ctype, ldc, 0)
    _product("gemmEx", handle, transa, transb, m, n, k, alpha, a, b, beta, c, 1, computeType, algo)


def gemmStridedBatchedEx(  # noqa: N802
    handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, A: int, Atype: int, lda: int,
    strideA: int, B: int, Btype: int, ldb: int, strideB: int, beta: int, C: int, Ctype: int, ldc: int, strideC: int,
    batchCount: int, computeType: int, algo: int,
) -> None:  # fmt: skip
    a, b, c = (A, Atype, lda, strideA), (B, Btype, ldb, strideB), (C, Ctype, ldc, strideC)
    _product(
        "gemmStridedBatchedEx", handle, transa, transb, m, n, k, alpha, a, b, beta, c, batchCount, computeType, algo
    )


def _product(
    name: str, handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, a: Any, b: Any, beta: int,
    c: Any, batch: int, compute: int, algo: int,
) -> None:  # fmt: skip
    machine, found = here(), _handle(handle)
    m, n, k, batch, compute = whole(m), whole(n), whole(k), whole(batch), whole(compute)
    (A, ta, lda, sa), (B, tb, ldb, sb), (C, tc, ldc, sc) = (
        (count(p), whole(t), whole(ld), whole(s, 64)) for p, t, ld, s in (a, b, c)
    )
    if whole(transa) not in (0, 1, 2) or whole(transb) not in (0, 1, 2) or min(m, n, k, batch) < 0:
        raise CUBLASError(7)
    if lda < max(1, k if transa else m) or ldb < max(1, n if transb else k) or ldc < max(1, m):
        raise CUBLASError(7)
    if ta != tb or (compute, ta, tc) not in _OFFERED:
        raise CUBLASError(15)
    if whole(algo) not in (-1, 99):
        raise DeviceFault(f"{name}: the stand-in knows algorithms -1 and 99, {algo} was asked for")
    work = machine.current_work(name)
    if found.device != work.device:
        raise DeviceFault(f"{name}: the handle is device {found.device}'s, the stream device {work.device}'s")
    if min(m, n, batch) == 0:
        return
    scale = ctypes.c_double if compute in (70, 71) else ctypes.c_float
    factor, keep = scale.from_address(count(alpha)).value, scale.from_address(count(beta)).value
    # Column order is row order of the transposed matrices: C' = op(B)' op(A)'.
    left_shape = (k, n) if transb else (n, k)
    right_shape = (m, k) if transa else (k, m)
    views = [
        (A, right_shape, (lda, 1), sa, ta, False),
        (B, left_shape, (ldb, 1), sb, tb, False),
        (C, (n, m), (ldc, 1), sc, tc, True),
    ]
    accesses: list[Access] = []
    arrays = []
    for label, (start, shape, steps, far, kind, written) in zip("ABC", views):
        item = _ITEM[kind]
        wide_shape = (batch, *shape) if name != "gemmEx" else shape
        wide_steps = tuple(s * item for s in ((far, *steps) if name != "gemmEx" else steps))
        parts = moved(pieces(wide_shape, wide_steps, item), start)
        if not parts:
            arrays.append(np.empty(wide_shape, _host_type(kind)))
            continue
        low, high = min(p[0] for p in parts), max(p[1] for p in parts)
        block = machine.memory.find(low, high - low, f"{name}, {label}", "device", work.device)
        accesses.append((block, parts, written))
        arrays.append(
            np.ndarray(wide_shape, _host_type(kind), block.bytes, start - block.address, wide_steps)
        )
    target = accesses[-1]
    if any(access[0] is target[0] and overlap(access[1], target[1]) for access in accesses[:-1]):
        raise DeviceFault(f"{name}: C overlaps A or B")
    if keep:
        accesses.append((target[0], target[1], False))
    accesses.append((found.workspace, ((0, 1, 0, 0),), True))
    right, left, out = arrays
    if transb:
        left = left.swapaxes(-1, -2)
    if transa:
        right = right.swapaxes(-1, -2)
    machine.submit(work, name, accesses, lambda: _compute(left, right, out, factor, keep))


def _compute(left: Any, right: Any, out: Any, factor: float, keep: float) -> None:
    wide = np.dtype(np.float64 if out.dtype == np.float64 else np.float32)
    with np.errstate(all="ignore"):
        if left.dtype == wide and out.dtype == wide and factor == 1 and not keep:
            np.matmul(left, right, out=out)
            return
        product = np.matmul(left.astype(wide, order="K"), right.astype(wide, order="K"))
        if factor != 1:
            np.multiply(product, wide.type(factor), out=product)
        if keep:
            before = out.astype(wide)
            np.add(before if keep == 1 else before * wide.type(keep), product, out=product)
        out[...] = product


def _host_type(kind: int) -> Any:
    if kind == _BF16:
        from ml_dtypes import bfloat16

        return bfloat16
    return {_F32: np.float32, _F64: np.float64, _F16: np.float16}[kind]
