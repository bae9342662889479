"""Memory of operations on 16-bit arrays: one more scratch, and nothing large beside it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.numpy_tiles import BLOCK, SCRATCH, TILE, WIDE, pieces
from mpishard.array.ops import Draw
from tests.array.test_ops_narrow import BF16, F32, numbers
from tests.shard.tracing import OPERATION_BOUND


def test_scratch_is_taken_once_and_for_sixteen_bits_alone():
    ops = NumpyOps()
    for name in ("float32", "float64", "int64", "uint16"):
        ops.prepare(DTYPES[name])
    assert (ops.own_bytes, ops._wide.size) == (SCRATCH, 0)
    ops.prepare(BF16)
    assert ops.own_bytes == SCRATCH + WIDE == SCRATCH + ops._wide.nbytes
    taken = ops._wide
    ops.prepare(BF16)
    ops.prepare(DTYPES["float16"])
    ops.add(numbers(3), numbers(3), numbers(3))
    assert ops._wide is taken
    late = NumpyOps()
    late.add(numbers(3), numbers(3), numbers(3))
    assert late.own_bytes == ops.own_bytes


def test_casts_and_sums_from_sixteen_bits_need_no_second_scratch():
    """Communication in float16 beside parameters in float32 has the memory plan of float32."""
    ops, x, out = NumpyOps(), numbers(TILE + 1), np.empty(TILE + 1, F32)
    ops.copy(x, out)
    ops.copy(out, x)
    ops.ordered_sum([x, x], out, False)
    ops.sum64(x, np.empty(1))
    ops.fill(x, 1.0)
    assert ops.own_bytes == SCRATCH


ROWS, WIDTH, HEADS = 1024, 768, 12
BIG = {
    "matmul": lambda o, x, w: o.matmul(x, x.T, np.empty((ROWS, ROWS), x.dtype)),
    "matmul-add": lambda o, x, w: o.matmul(x.T, x, np.zeros((WIDTH, WIDTH), F32), True),
    "column_sum": lambda o, x, w: o.column_sum(x, w),
    "row_dot": lambda o, x, w: o.row_dot(x.reshape(ROWS, 12, 64), x.reshape(ROWS, 12, 64), np.empty((ROWS, 12), F32)),
    "add": lambda o, x, w: o.add(x, w, x),
    "add-strided": lambda o, x, w: o.add(x.T, x.T, x.T),
    "multiply": lambda o, x, w: o.multiply(x, x, np.zeros(x.shape, F32), True),
    "gelu": lambda o, x, w: o.gelu(x, x),
    "gelu_backward": lambda o, x, w: o.gelu_backward(x, x, x),
    "dropout": lambda o, x, w: o.dropout(x, x, 0.1, Draw(1, 2, 3, 4)),
    "layernorm": lambda o, x, w: o.layernorm(x, w, w, x, np.empty(ROWS, F32), np.empty(ROWS, F32), 1e-5),
    "layernorm_backward": lambda o, x, w: o.layernorm_backward(
        x, w, np.zeros(ROWS, F32), np.ones(ROWS, F32), x, x, np.empty(WIDTH, F32), np.empty_like(w)
    ),
    "embedding": lambda o, x, w: o.embedding(x, np.arange(ROWS), np.empty_like(x)),
    "embedding_backward": lambda o, x, w: o.embedding_backward(np.arange(ROWS) // 2, x, np.empty_like(x)),
    "embedding_backward-wide": lambda o, x, w: o.embedding_backward(np.arange(ROWS) // 2, x, np.empty(x.shape, F32)),
    "causal_softmax": lambda o, x, w: o.causal_softmax(
        x.reshape(HEADS, 64, ROWS), np.empty((HEADS, 64), F32), ROWS - 64, 0.1
    ),
    "softmax_backward": lambda o, x, w: o.softmax_backward(
        x.reshape(HEADS, 64, ROWS), x.reshape(HEADS, 64, ROWS), np.empty((HEADS, 64), F32), 0.1
    ),
    "cross_entropy": lambda o, x, w: o.cross_entropy(x, np.arange(ROWS) % WIDTH, np.empty(ROWS, F32), 1.0, True),
    "ordered_sum": lambda o, x, w: o.ordered_sum([x.reshape(-1)] * 2, np.empty(x.size, F32), True),
    "sum64": lambda o, x, w: o.sum64(x.reshape(-1), np.empty(1)),
    "copy": lambda o, x, w: o.copy(x, np.empty(x.shape, F32)),
    "copy-back": lambda o, x, w: o.copy(np.zeros(x.shape, F32), x),
}


class Counting(NumpyOps):
    """Counts what is allocated inside an operation, not what its caller makes."""

    peak = 0

    def _note(self, operation, flops, nbytes):
        self.before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()


@pytest.mark.parametrize("kind", [BF16, DTYPES["float16"]])
@pytest.mark.parametrize("name", BIG)
def test_nothing_large_is_allocated(name, kind):
    ops, x, w = Counting(), np.zeros((ROWS, WIDTH), kind), np.ones(WIDTH, kind)
    BIG[name](ops, x, w)
    tracemalloc.start()
    try:
        BIG[name](ops, x, w)
        growth = tracemalloc.get_traced_memory()[1] - ops.before
    finally:
        tracemalloc.stop()
    assert growth < OPERATION_BOUND


def test_pieces_cover_an_array_once():
    for shape in ((), (0,), (5,), (3, 0), (TILE + 1,), (3, 700, 17), (2, 5, TILE + 3), (BLOCK,)):
        seen = np.zeros(shape, int)
        for here in pieces(shape):
            part = seen[(*here, ...)]
            part += 1
            assert part.size <= TILE
        assert (seen == 1).all()
