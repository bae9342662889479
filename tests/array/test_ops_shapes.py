"""Arrays that do not fit: each operation says what it was given and what it takes."""

import numpy as np
import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.numpy_tiles import SCRATCH
from mpishard.array.ops import AdamWStep, Draw
from mpishard.array.shape_ops import ShapeOps
from mpishard.errors import EngineError, ShapeError

DRAW = Draw(0, 0, 0, 0)
STEP = AdamWStep(1.0, 1.0, 0.9, 0.9, 1e-8, 0.1, 0.1, ())


def a(*shape):
    return np.zeros(shape, np.float32)


def i(*shape):
    return np.zeros(shape, np.int64)


LN = r"layernorm was given .* it takes "
LNB = r"layernorm_backward was given .* it takes "
BAD = [
    ("copy", (a(2), a(3)), r"copy was given x \(2,\), out \(3,\); it takes equal shapes"),
    (
        "matmul",
        (a(2, 3), a(4, 5), a(2, 5)),
        r"matmul was given a \(2, 3\), b \(4, 5\), out \(2, 5\); it takes a \(\.\.\., N, K\)",
    ),
    ("matmul", (a(2, 3), a(3, 5), a(2, 4)), r"matmul was given"),
    ("matmul", (a(2, 3), a(3, 5), a(1, 5)), r"matmul was given"),
    ("matmul", (a(3), a(3), a(1)), r"matmul was given"),
    ("matmul", (a(1, 2, 3), a(3, 5), a(1, 2, 5)), r"matmul was given"),
    ("matmul", (a(2, 2, 3), a(1, 3, 5), a(2, 2, 5)), r"matmul was given"),
    ("matmul", (a(2, 2, 3), a(2, 3, 5), a(1, 2, 5)), r"matmul was given"),
    ("linear", (a(2, 3), a(4, 5), None, a(2, 5)), r"matmul was given"),
    ("linear", (a(2, 3), a(3, 5), a(4), a(2, 5)), r"add was given"),
    ("column_sum", (a(2, 3), a(2)), r"column_sum was given x \(2, 3\), out \(2,\); it takes x \(N, C\), out \(C,\)"),
    ("column_sum", (a(2, 3, 4), a(3, 4)), r"column_sum was given"),
    ("row_dot", (a(2, 3, 4), a(2, 3, 5), a(2, 3)), r"row_dot was given"),
    ("row_dot", (a(2, 3), a(2, 3), a(2)), r"row_dot was given"),
    ("row_dot", (a(2, 3, 4), a(2, 3, 4), a(3, 2)), r"row_dot was given"),
    ("add", (a(2, 3), a(2), a(2, 3)), r"add was given x \(2, 3\), y \(2,\), out \(2, 3\)"),
    ("add", (a(3), a(2, 3), a(2, 3)), r"add was given"),
    ("multiply", (a(2, 3), a(2), a(2, 3)), r"multiply was given x \(2, 3\), y \(2,\), out \(2, 3\); it"),
    ("multiply", (a(3), a(2, 3), a(2, 3)), r"multiply was given"),
    ("gelu", (a(2), a(3)), r"gelu was given .* it takes equal shapes"),
    ("gelu_backward", (a(2), a(2), a(3)), r"gelu_backward was given"),
    ("gelu_backward", (a(2), a(3), a(2)), r"gelu_backward was given"),
    ("dropout", (a(2), a(3), 0.5, DRAW), r"dropout was given .* it takes equal shapes, contiguous, and 0 <= rate < 1"),
    ("gelu", (a(2, 3), a(3, 2).T), r"gelu was given .* it takes equal shapes, contiguous"),
    ("gelu_backward", (a(2, 3), a(2, 3), a(3, 2).T), r"gelu_backward was given .* contiguous"),
    ("dropout", (a(2, 3), a(3, 2).T, 0.5, DRAW), r"dropout was given .* contiguous"),
    ("dropout", (a(2), a(2), 1.0, DRAW), r"dropout was given"),
    ("dropout", (a(2), a(2), -0.1, DRAW), r"dropout was given"),
    ("layernorm", (a(2, 3), a(2), a(3), a(2, 3), a(2), a(2), 1e-5), LN + r"x, y \(N, C\), weight, bias \(C,\)"),
    ("layernorm", (a(2, 3), a(3), a(2), a(2, 3), a(2), a(2), 1e-5), LN),
    ("layernorm", (a(2, 3), a(3), a(3), a(3, 2), a(2), a(2), 1e-5), LN),
    ("layernorm", (a(2, 3), a(3), a(3), a(2, 3), a(3), a(2), 1e-5), LN + r"mean, rstd \(N,\)"),
    (
        "layernorm_backward",
        (a(2, 3), a(2), a(2), a(2), a(2, 3), a(2, 3), None, None),
        LNB + r"x, dy, dx \(N, C\), weight \(C,\)",
    ),
    ("layernorm_backward", (a(2, 3), a(3), a(2), a(2), a(2, 3), a(3, 2), None, None), LNB),
    ("layernorm_backward", (a(2, 3), a(3), a(2), a(2), a(2, 3), a(2, 3), a(2), None), LNB + r"dweight, dbias \(C,\)"),
    ("layernorm_backward", (a(2, 3), a(3), a(2), a(2), a(2, 3), a(2, 3), None, a(2)), LNB),
    (
        "embedding",
        (a(5, 3), i(2), a(2, 4)),
        r"embedding was given table \(5, 3\), tokens \(2,\), out \(2, 4\); it takes table \(V, C\)",
    ),
    ("embedding", (a(5, 3), i(2, 1), a(2, 3)), r"embedding was given"),
    ("embedding_backward", (i(2), a(2, 4), a(5, 3)), r"embedding_backward was given"),
    (
        "causal_softmax",
        (a(2, 3, 4), a(2, 3), 2, 1.0),
        r"causal_softmax was given .* it takes scores \(H, R, first_row \+ R\), lse \(H, R\)",
    ),
    ("causal_softmax", (a(2, 3, 4), a(3, 2), 1, 1.0), r"causal_softmax was given"),
    ("softmax_backward", (a(2, 3, 4), a(2, 3, 5), a(2, 3), 1.0), r"softmax_backward was given"),
    ("softmax_backward", (a(2, 3, 4), a(2, 3, 4), a(3, 2), 1.0), r"softmax_backward was given"),
    (
        "cross_entropy",
        (a(2, 3), i(3), a(2), 1.0, True),
        r"cross_entropy was given .* it takes logits \(N, V\), targets, losses \(N,\)",
    ),
    ("cross_entropy", (a(2, 3), i(2), a(3), 1.0, True), r"cross_entropy was given"),
    ("sum64", (a(2, 3), a(1)), r"sum64 was given"),
    ("sum64", (a(2), a(2)), r"sum64 was given x \(2,\), out \(2,\); it takes x \(N,\), out \(1,\)"),
    (
        "ordered_sum",
        ([a(2), a(3)], a(2), True),
        r"ordered_sum was given block \(3,\), out \(2,\); it takes equal 1-D shapes",
    ),
    ("ordered_sum", ([a(2, 1)], a(2, 1), True), r"ordered_sum was given"),
    ("square_sums", (a(512), (), a(2)), r"square_sums was given .* it takes x \(n \* 512,\), out \(n,\)"),
    ("square_sums", (a(500), (), a(1)), r"square_sums was given"),
    ("adamw", (a(2), a(2), a(2), a(3), STEP), r"adamw was given .* it takes 1-D arrays of one size"),
    ("adamw", (a(2, 1), a(2, 1), a(2, 1), a(2, 1), STEP), r"adamw was given"),
    ("adamw", (a(2), a(2), a(2), a(2), STEP, a(3)), r"adamw was given param \(2,\), cast \(3,\); it takes 1-D arrays"),
    ("exact_sum", (a(2, 1), i(21)), r"exact_sum was given values \(2, 1\), out \(21,\); it takes values \(n,\)"),
    ("exact_sum", (a(2), i(20)), r"exact_sum was given .* out \(21,\)"),
    ("normal", (a(2, 1), DRAW, 1.0), r"normal was given out \(2, 1\); it takes out \(count,\)"),
    ("fingerprint", (a(2, 1), DRAW), r"fingerprint was given x \(2, 1\); it takes x \(count,\)"),
]


@pytest.mark.parametrize("backend", [NumpyOps, ShapeOps])
@pytest.mark.parametrize(("name", "arguments", "message"), BAD, ids=[f"{row[0]}-{n}" for n, row in enumerate(BAD)])
def test_shapes_that_do_not_fit(backend, name, arguments, message):
    with pytest.raises(ShapeError, match=message):
        getattr(backend(), name)(*arguments)


def test_a_shape_error_is_an_engine_error():
    assert issubclass(ShapeError, EngineError)


def test_rows_longer_than_scratch_are_refused():
    ops, width = NumpyOps(), SCRATCH // 4 + 1
    message = rf"a row of {width} elements is longer than the CPU backend's tiles allow"
    with pytest.raises(ShapeError, match=message):
        ops.matmul(a(1, 1), a(1, width), a(1, width), add=True)
    with pytest.raises(ShapeError, match=message):
        ops.layernorm(a(1, width), a(width), a(width), a(1, width), a(1), a(1), 1e-5)


def test_a_product_that_is_written_needs_no_scratch():
    ops, width = NumpyOps(), SCRATCH // 4 + 1
    b, out = np.arange(width, dtype=np.float32).reshape(1, -1), a(2, width)
    ops.matmul(np.array([[1.0], [2.0]], np.float32), b, out)
    assert (out == np.array([[1.0], [2.0]], np.float32) * b).all()
