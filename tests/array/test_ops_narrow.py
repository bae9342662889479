"""Operations on bfloat16 and float16: what float32 gives, rounded once."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.numpy_tiles import TILE, WIDE
from mpishard.array.ops import AdamWStep, Draw
from mpishard.errors import DataError, ShapeError
from tests.array.op_case import Case
from tests.array.op_cases import CASES
from tests.array.test_ops import arguments_of, arrays_of, run_name

F32, BF16 = np.dtype(np.float32), DTYPES["bfloat16"]
#: here the order of sums, or how probabilities are made, is not float32's
OTHERWISE = {"matmul", "linear", "causal_softmax", "layernorm_backward"}
NARROW = [
    (case, kind)
    for case in CASES
    for kind in ("bfloat16", "float16")
    if kind in case.kinds and case.op not in {*OTHERWISE, "fingerprint"}
]


def numbers(*shape, kind=BF16, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(kind)


def bits(x):
    return x.view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)


def nearest_even(x):
    """The rounding of IEEE 754-2008, section 4.3.1, on bits; a NaN keeps its sign and loses the rest."""
    u = x.view(np.uint32).astype(np.uint64)
    rounded = ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), (u >> 31 << 15).astype(np.uint16) | 0x7FC0, rounded)


def unlike_zero():
    """float32 numbers of every sign, exponent and of mantissas about all ties; no signalling NaN."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    found = (high[:, None] | low).reshape(-1).view(np.float32)
    return found[~np.isnan(found) | (found.view(np.uint32) & 0x400000 != 0)]


# --- conversions


def test_every_bfloat16_is_the_upper_half_of_a_float32():
    x, out = np.arange(1 << 16, dtype=np.uint16).view(BF16), np.empty(1 << 16, np.float32)
    NumpyOps().copy(x, out)
    assert (bits(out) == np.arange(1 << 16, dtype=np.uint32) << 16).all()


def test_rounding_to_nearest_even_with_ties_infinities_subnormals_and_nan():
    x = unlike_zero()
    out = np.empty(x.size, BF16)
    NumpyOps().copy(x, out)
    assert (bits(out) == nearest_even(x)).all()
    assert out.tobytes() == x.astype(ml_dtypes.bfloat16).tobytes()


def test_an_operation_rounds_as_a_copy_does():
    x = unlike_zero()[::7][: 5 * TILE]
    x = x[np.isfinite(x)]
    a, b = x.astype(BF16), np.roll(x, 1).astype(BF16)
    out, ops = np.empty_like(a), NumpyOps()
    with np.errstate(over="ignore", invalid="ignore"):
        ops.add(a, b, out)
        assert (bits(out) == nearest_even(a.astype(F32) + b.astype(F32))).all()
        ops.multiply(a, b, out)
        assert (bits(out) == nearest_even(a.astype(F32) * b.astype(F32))).all()


@pytest.mark.parametrize(("case", "kind"), NARROW, ids=run_name)
def test_what_float32_gives_rounded_once(case: Case, kind):
    narrow = arguments_of(case, kind, False)

    def wide(value):
        if isinstance(value, np.ndarray) and value.dtype == DTYPES[kind]:
            return value.astype(F32)
        if isinstance(value, list):
            return [wide(item) for item in value]
        return value.copy() if isinstance(value, np.ndarray) else value

    expected = {name: wide(value) for name, value in narrow.items()}
    getattr(NumpyOps(), case.op)(**expected)
    getattr(NumpyOps(), case.op)(**narrow)
    found = arrays_of(narrow)
    for name, array in arrays_of(expected).items():
        if case.op == "cross_entropy" and name == "logits_" and not narrow["gradient"]:
            continue
        assert array.astype(found[name].dtype).tobytes() == found[name].tobytes(), name


def test_adamw_writes_the_rounded_parameters_along():
    n, rng = 2 * TILE + 9, np.random.default_rng(0)
    arrays = [abs(rng.standard_normal(n)).astype(F32) for _ in range(4)]
    alone = [array.copy() for array in arrays]
    step = AdamWStep(0.5, 0.1, 0.9, 0.95, 1e-8, 0.1, 0.05, ((0, 5, 0.1), (16, n, 0.0)))
    for name in ("bfloat16", "float16"):
        cast = np.full(n, 7, DTYPES[name])
        NumpyOps().adamw(*arrays, step, cast)
        assert (cast[5:16] == 7).all()
        cast[5:16] = arrays[0][5:16]
        assert cast.tobytes() == arrays[0].astype(DTYPES[name]).tobytes()
        NumpyOps().adamw(*alone, step)
        assert [a.tobytes() for a in arrays] == [a.tobytes() for a in alone]


# --- products


SHAPES = [(700, 1300, 900), (3, 2049, 5), (1, 5000, 1), (513, 1, 2), (1500, 600, 3), (2, 700, 3000)]


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("turned", ["", "a", "b", "out"])
def test_products_in_several_blocks(shape, add, wide, kind, turned):
    n, k, m = shape
    kind = DTYPES[kind]

    def make(rows, columns, name, kind, seed):
        return numbers(columns, rows, kind=kind, seed=seed).T if name == turned else numbers(rows, columns, kind=kind)

    a, b, out = make(n, k, "a", kind, 1), make(k, m, "b", kind, 2), make(n, m, "out", F32 if wide else kind, 3)
    expected = a.astype(float) @ b.astype(float) + (out.astype(float) if add else 0.0)
    NumpyOps().matmul(a, b, out, add)
    # Sums of k terms in float32 err by their size; the output's type adds half a unit of its last place.
    limit = 2**-24 * (2 + np.sqrt(k)) * np.sqrt(k) * 4
    unit = 0.0 if wide else 2.0 ** (-8 if kind == BF16 else -11)
    assert (abs(out.astype(float) - expected) <= limit + unit * abs(expected)).all()


@pytest.mark.parametrize("lead", [(5,), (2, 3)])
@pytest.mark.parametrize(("n", "k", "m"), [(7, 5, 3), (300, 200, 900), (600, 700, 1)])
def test_batches_of_products_are_their_products(lead, n, k, m):
    ops, a, b = NumpyOps(), numbers(*lead, n, k, seed=1), numbers(*lead, k, m, seed=2)
    out, single = numbers(*lead, n, m, kind=F32), np.empty((n, m), F32)
    ops.matmul(a, b, out)
    for i in np.ndindex(*lead):
        ops.matmul(a[i], b[i], single)
        assert abs(out[i] - single).max() <= 1e-6 * k


def test_products_of_nothing():
    ops, out = NumpyOps(), numbers(2, 3)
    ops.matmul(numbers(2, 0), numbers(0, 3), out, add=True)
    assert out.tobytes() == numbers(2, 3).tobytes()
    ops.matmul(numbers(2, 0), numbers(0, 3), out)
    assert not bits(out).any()
    ops.matmul(numbers(0, 2), numbers(2, 3), numbers(0, 3), add=True)


def test_a_product_is_added_before_it_is_rounded():
    """1 + 2**-8 is a tie that goes to 1; 1 + 2**-8 + 2**-20 is not."""
    out = np.array([[1.0]], BF16)
    NumpyOps().matmul(np.array([[2.0**-8, 2.0**-20]], BF16), np.array([[1.0], [1.0]], BF16), out, add=True)
    assert float(out[0, 0]) == 1 + 2.0**-7


# --- sums


def test_column_sums_of_many_rows_are_made_in_float32():
    ops, x, out = NumpyOps(), np.ones((100001, 7), BF16), np.zeros(7, F32)
    ops.column_sum(x, out, add=True)
    assert (out == 100001).all()
    ops.column_sum(np.ones((0, 7), BF16), out, add=True)
    assert (out == 100001).all()


def test_embedding_backward_rounds_a_row_once():
    """257 is no bfloat16: adding ones one by one to 256 would leave it there."""
    ops, tokens, dy = NumpyOps(), np.array([1, 0, 1, 1, 1]), np.ones((5, 2), BF16)
    table = np.full((3, 2), 256, BF16)
    ops.embedding_backward(tokens, dy, table, add=True)
    assert table.astype(float).tolist() == [[256, 256], [260, 260], [256, 256]]
    ops.embedding_backward(tokens, dy, table)
    assert table.astype(float).tolist() == [[1, 1], [4, 4], [0, 0]]


def test_embedding_backward_adds_duplicates_in_order():
    for kind in (F32, BF16):
        table = np.full((3, 1), 7, kind)
        NumpyOps().embedding_backward(np.array([1, 1, 0, 1]), np.array([[1], [2**30], [5], [-(2**30)]], BF16), table)
        assert table[:, 0].astype(float).tolist() == [5.0, 0.0, 0.0]


def test_embedding_backward_of_very_many_tokens():
    tokens = np.random.default_rng(0).integers(0, 3, (1 << 18) + 5)
    table = np.zeros((3, 1), BF16)
    NumpyOps().embedding_backward(tokens, np.ones((tokens.size, 1), BF16), table)
    assert abs(table[:, 0].astype(float) / np.bincount(tokens) - 1).max() <= 2.0**-8


# --- softmax and loss


@pytest.mark.parametrize(("heads", "rows", "first"), [(3, 7, 2), (1, 400, 200), (70, 40, 0), (2, 3, 30000)])
def test_replayed_probabilities_are_those_of_the_first_time(heads, rows, first):
    ops, scores, lse = NumpyOps(), numbers(heads, rows, first + rows), np.empty((heads, rows), F32)
    again, before = scores.copy(), scores.astype(float)
    ops.causal_softmax(scores, lse, first, 0.7)
    ops.causal_softmax(again, lse, first, 0.7, replay=True)
    assert again.tobytes() == scores.tobytes()
    seen = np.arange(first + rows) <= np.arange(first, first + rows)[:, None]
    powers = np.exp(0.7 * before) * seen
    expected = powers / powers.sum(axis=-1, keepdims=True)
    assert abs(lse - np.log(powers.sum(axis=-1))).max() < 1e-5
    assert (abs(scores.astype(float) - expected) <= 2.0**-8 * expected + 1e-6 * expected).all()
    assert not scores[:, ~seen].astype(float).any()


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("hidden", [np.nan, np.inf, -np.inf])
def test_causal_softmax_reads_nothing_of_the_future(hidden, kind):
    ops, rows, first = NumpyOps(), 400, 200
    scores, lse = numbers(1, rows, first + rows, kind=DTYPES[kind]), np.empty((1, rows), F32)
    other = scores.copy()
    other[:, np.arange(first + rows) > np.arange(first, first + rows)[:, None]] = hidden
    ops.causal_softmax(scores, lse, first, 0.5)
    with np.errstate(invalid="ignore"):
        ops.causal_softmax(other, np.empty_like(lse), first, 0.5)
    assert other.tobytes() == scores.tobytes()


# --- aliases


def test_outputs_that_are_inputs():
    ops, n = NumpyOps(), 3 * TILE + 7
    x, y, out = numbers(n), numbers(n, seed=1), np.empty(n, BF16)
    draw = Draw(1, 2, 3, 4)
    mine = x.copy()
    for call in (
        lambda a, o: ops.add(a, y, o),
        lambda a, o: ops.multiply(a, y, o),
        lambda a, o: ops.gelu(a, o),
        lambda a, o: ops.gelu_backward(y, a, o),
        lambda a, o: ops.dropout(a, o, 0.4, draw),
    ):
        mine[:] = x
        call(x, out)
        call(mine, mine)
        assert mine.tobytes() == out.tobytes()


def test_layernorm_backward_into_dy():
    ops, x, dy, weight = NumpyOps(), numbers(9000, 5), numbers(9000, 5, seed=1), numbers(5)
    mean, rstd, dx = np.zeros(9000, F32), np.ones(9000, F32), np.empty_like(x)
    ops.layernorm_backward(x, weight, mean, rstd, dy, dx, None, None)
    ops.layernorm_backward(x, weight, mean, rstd, dy, dy, None, None)
    assert dy.tobytes() == dx.tobytes()


def test_dropout_masks_are_those_of_float32():
    ops, n, draw = NumpyOps(), 2 * TILE + 9, Draw(1, 2, 3, 5)
    x, y, wide = np.ones(n, BF16), np.empty(n, BF16), np.empty(n, F32)
    ops.dropout(x, y, 0.3, draw)
    ops.dropout(x.astype(F32), wide, 0.3, draw)
    assert ((y.astype(F32) == 0) == (wide == 0)).all()


# --- what is refused


def test_numbers_that_there_are_not():
    ops, tokens = NumpyOps(), np.array([0, 6])
    for call in (
        lambda: ops.embedding(numbers(6, 3), tokens, numbers(2, 3)),
        lambda: ops.embedding_backward(tokens, numbers(2, 3), numbers(6, 3)),
        lambda: ops.embedding_backward(tokens, numbers(2, 3), numbers(6, 3, kind=F32)),
        lambda: ops.cross_entropy(numbers(2, 6), tokens, np.empty(2, F32), 1.0, True),
    ):
        with pytest.raises(DataError, match=r"^the data hold the (token|target) 6; the model takes 0 to 5[,;].* mend"):
            call()


def test_a_row_longer_than_the_scratch_is_refused():
    width = WIDE // 4 + 1
    with pytest.raises(ShapeError, match=rf"a row of {width} elements is longer than the CPU backend's tiles allow"):
        NumpyOps().cross_entropy(numbers(1, width), np.zeros(1, np.int64), np.empty(1, F32), 1.0, True)
