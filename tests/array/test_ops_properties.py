"""What operations promise beside their values: aliases, extremes, order, types."""

import numpy as np
import pytest

from mpishard.array.constants import CHUNK, IGNORE
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.numpy_tiles import TILE
from mpishard.array.ops import AdamWStep, Draw

F32 = np.float32


def numbers(*shape, kind=F32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(kind)


# --- aliases


def test_add_into_its_first_argument():
    x, y, out = numbers(5, 7), numbers(7, seed=1), numbers(5, 7)
    ops = NumpyOps()
    ops.add(x, y, out)
    ops.add(x, y, x)
    assert x.tobytes() == out.tobytes()


@pytest.mark.parametrize("tanh", [True, False])
def test_gelu_backward_into_dy(tanh):
    ops, x, dy, dx = NumpyOps(), numbers(TILE + 3), numbers(TILE + 3, seed=1), numbers(TILE + 3)
    ops.gelu_backward(x, dy, dx, tanh)
    ops.gelu_backward(x, dy, dy, tanh)
    assert dy.tobytes() == dx.tobytes()


def test_dropout_into_its_argument():
    ops, x, y = NumpyOps(), numbers(TILE + 3), numbers(TILE + 3)
    ops.dropout(x, y, 0.4, Draw(1, 2, 3, 4))
    ops.dropout(x, x, 0.4, Draw(1, 2, 3, 4))
    assert y.tobytes() == x.tobytes()


def test_layernorm_backward_into_dy():
    ops, x, dy, weight = NumpyOps(), numbers(TILE // 3 + 5, 3), numbers(TILE // 3 + 5, 3, seed=1), numbers(3)
    mean, rstd, dx = x.mean(axis=1), 1 / x.std(axis=1), np.empty_like(x)
    first, second = (np.empty(3, F32), np.empty(3, F32)), (np.empty(3, F32), np.empty(3, F32))
    ops.layernorm_backward(x, weight, mean, rstd, dy, dx, *first)
    ops.layernorm_backward(x, weight, mean, rstd, dy, dy, *second)
    assert dy.tobytes() == dx.tobytes()
    assert [a.tobytes() for a in first] == [a.tobytes() for a in second]


# --- products


@pytest.mark.parametrize("shape", [(), (3,)])
def test_adding_a_product_in_blocks_of_rows_is_adding_the_product(shape):
    """Sizes at which the sum goes through scratch in several blocks, or one batch entry at a time."""
    ops, n, k, m = NumpyOps(), 3001, 3, 211
    a, b, out = numbers(*shape, n, k, kind=float), numbers(*shape, k, m, kind=float), numbers(*shape, n, m, kind=float)
    expected = out + a @ b
    ops.matmul(a, b, out, add=True)
    assert abs(out - expected).max() < 1e-13


def test_adding_a_product_of_a_batch_too_wide_for_scratch():
    ops, a, b = NumpyOps(), numbers(5, 2, 3, kind=float), numbers(5, 3, 60000, kind=float)
    out = numbers(5, 2, 60000, kind=float)
    expected = out + a @ b
    ops.matmul(a, b, out, add=True)
    assert abs(out - expected).max() < 1e-13


def test_products_of_nothing():
    ops, out = NumpyOps(), numbers(2, 3)
    ops.matmul(np.empty((2, 0), F32), np.empty((0, 3), F32), out, add=True)
    assert (out == numbers(2, 3)).all()
    ops.matmul(np.empty((2, 0), F32), np.empty((0, 3), F32), out)
    assert (out == 0).all()
    ops.matmul(np.empty((0, 2), F32), np.empty((2, 3), F32), np.empty((0, 3), F32), add=True)


# --- softmax and loss


def test_causal_softmax_hides_the_future_from_every_row():
    ops, heads, rows, first = NumpyOps(), 2, 5, 3
    scores, lse = numbers(heads, rows, first + rows), np.empty((heads, rows), F32)
    other = scores.copy()
    for r in range(rows):
        other[:, r, first + r + 1 :] = np.nan  # what is hidden may be anything
    ops.causal_softmax(scores, lse, first, 0.5)
    for r in range(rows):
        assert (scores[:, r, first + r + 1 :] == 0).all()
        assert abs(scores[:, r].sum(axis=-1) - 1).max() < 1e-6
    with np.errstate(invalid="ignore"):
        ops.causal_softmax(other, np.empty_like(lse), first, 0.5)
    assert other.tobytes() == scores.tobytes()


@pytest.mark.parametrize("size", [1e4, -1e4, 1e30])
def test_causal_softmax_of_large_scores(size):
    ops, lse = NumpyOps(), np.empty((1, 3), F32)
    scores = np.full((1, 3, 3), size, F32)
    scores[0, 2, 1] = 0.5 * size
    again = scores.copy()
    ops.causal_softmax(scores, lse, 0, 1.0)
    assert np.isfinite(scores).all() and np.isfinite(lse).all()
    assert abs(scores.sum(axis=-1) - 1).max() < 1e-6
    assert abs(scores[0, 1, :2] - 0.5).max() < 1e-6
    if abs(size) > 1e4:
        return
    ops.causal_softmax(again, lse, 0, 1.0, replay=True)
    # lse is as large as the scores, and so is the unit of its last place: 2**-10
    assert abs(again - scores).max() < 2**-10


def test_replayed_probabilities_are_those_of_the_first_time():
    ops, scores, lse = NumpyOps(), numbers(3, 7, 9), np.empty((3, 7), F32)
    again = scores.copy()
    ops.causal_softmax(scores, lse, 2, 0.3)
    ops.causal_softmax(again, lse, 2, 0.3, replay=True)
    assert abs(again - scores).max() < 1e-6


def test_cross_entropy_of_logits_of_ten_thousand():
    ops, losses = NumpyOps(), np.empty(4, F32)
    logits = np.array([[1e4, -1e4, 0], [1e4, -1e4, 0], [-1e4, -1e4, -1e4], [1e4, 1e4, -1e4]], F32)
    ops.cross_entropy(logits, np.array([0, 1, 2, 0]), losses, 0.5, True)
    assert losses[:2].tolist() == [0.0, 2e4]
    assert abs(losses[2:] - np.log([3.0, 2.0])).max() < 1e-6
    expected = 0.5 * np.array([[0, 0, 0], [1, -1, 0], [1 / 3, 1 / 3, -2 / 3], [-0.5, 0.5, 0]])
    assert abs(logits - expected).max() < 1e-6


@pytest.mark.parametrize("gradient", [True, False])
def test_ignored_targets_have_no_loss_and_no_gradient(gradient):
    ops, logits, losses = NumpyOps(), numbers(5, 3), np.full(5, np.nan, F32)
    targets = np.array([IGNORE, 1, IGNORE, 0, IGNORE])
    ops.cross_entropy(logits, targets, losses, 1.0, gradient)
    ignored = targets == IGNORE
    assert (losses[ignored] == 0).all()
    assert (losses[~ignored] > 0).all()
    if gradient:
        assert (logits[ignored] == 0).all()
        assert (logits[~ignored] != 0).all()


# --- embedding


def test_embedding_backward_adds_duplicates_in_order():
    """In fp32 the order shows: (1 + 1e8) - 1e8 is not 1 + (1e8 - 1e8)."""
    ops, table = NumpyOps(), np.full((3, 1), 7, F32)
    dy = np.array([[1], [1e8], [5], [-1e8]], F32)
    ops.embedding_backward(np.array([1, 1, 0, 1]), dy, table)
    assert table[:, 0].tolist() == [5.0, 0.0, 0.0]
    ops.embedding_backward(np.array([2, 2, 2, 2]), dy[[1, 3, 0, 2]], table, add=True)
    assert table[:, 0].tolist() == [5.0, 0.0, 6.0]


# --- shards


def test_ordered_sums_run_in_order_and_continue_the_shard():
    ops, out = NumpyOps(), np.array([7], F32)
    blocks = [np.array([x], F32) for x in (1, 1e8, -1e8)]
    ops.ordered_sum(blocks, out, add=False)
    assert out[0] == 0
    ops.ordered_sum(blocks[::-1], out, add=False)
    assert out[0] == 1
    out[0] = -1e8
    ops.ordered_sum(blocks[:2], out, add=True)
    assert out[0] == 0


def test_rounds_of_ordered_sums_are_one_ordered_sum():
    """What ranks 0..3 add in two rounds of two is what they add in one of four."""
    ops, blocks = NumpyOps(), [numbers(CHUNK + 1, seed=s) for s in range(4)]
    once, twice = np.empty(CHUNK + 1, F32), np.empty(CHUNK + 1, F32)
    ops.ordered_sum(blocks, once, add=False)
    ops.ordered_sum(blocks[:2], twice, add=False)
    ops.ordered_sum(blocks[2:], twice, add=True)
    assert once.tobytes() == twice.tobytes()


def test_square_sums_do_not_depend_on_where_a_shard_begins():
    ops, x = NumpyOps(), numbers(2 * TILE + 3 * CHUNK)
    whole = np.empty(x.size // CHUNK)
    ops.square_sums(x, (), whole)
    for chunks in (1, 3, TILE // CHUNK):
        parts = []
        for start in range(0, x.size, chunks * CHUNK):
            part = x[start : start + chunks * CHUNK]
            out = np.empty(part.size // CHUNK)
            ops.square_sums(part, (), out)
            parts.append(out)
        assert np.concatenate(parts).tobytes() == whole.tobytes()


def test_square_sums_leave_holes_out_whatever_they_hold():
    ops, x, out = NumpyOps(), np.ones(2 * CHUNK, F32), np.empty(2)
    x[3:5] = np.nan
    x[CHUNK - 1 : CHUNK + 1] = np.inf
    ops.square_sums(x, ((3, 5), (CHUNK - 1, CHUNK + 1)), out)
    assert out.tolist() == [CHUNK - 3, CHUNK - 1]


def test_square_sums_of_large_and_small_numbers_are_made_in_fp64():
    ops, out = NumpyOps(), np.empty(1)
    ops.square_sums(np.full(CHUNK, 1e30, F32), (), out)
    assert np.isfinite(out[0])
    ops.square_sums(np.full(CHUNK, 1e-30, F32), (), out)
    assert abs(out[0] / (CHUNK * 1e-60) - 1) < 1e-6


def test_adamw_leaves_what_is_outside_the_segments():
    ops, n = NumpyOps(), 40
    arrays = [np.full(n, np.nan, F32) for _ in range(4)]
    for array in arrays:
        array[4:9] = 1
    ops.adamw(*arrays, AdamWStep(1.0, 0.1, 0.9, 0.9, 1e-8, 0.1, 0.1, ((4, 9, 0.0),)))
    for array in arrays:
        assert np.isnan(array[:4]).all() and np.isnan(array[9:]).all()
        assert np.isfinite(array[4:9]).all()


def test_a_shard_updates_as_its_part_of_the_whole_does():
    ops, n = NumpyOps(), TILE + 777
    whole = [abs(numbers(n, seed=s)) for s in range(4)]
    parts = [array.copy() for array in whole]
    step = AdamWStep(0.5, 0.1, 0.9, 0.95, 1e-8, 0.1, 0.05, ((0, n, 0.1),))
    ops.adamw(*whole, step)
    for start, stop in ((0, 500), (500, TILE), (TILE, n)):
        ops.adamw(*(array[start:stop] for array in parts), step._replace(segments=((0, stop - start, 0.1),)))
    assert [a.tobytes() for a in whole] == [a.tobytes() for a in parts]


def test_sums_in_fp64_of_fp32_numbers():
    ops, out = NumpyOps(), np.empty(1)
    ops.sum64(np.array([1, 1e8, -1e8], F32), out)
    assert out[0] == 1


# --- types


def test_copy_refuses_to_turn_floats_into_integers():
    with pytest.raises(TypeError, match="Cannot cast"):
        NumpyOps().copy(numbers(3), np.zeros(3, np.int64))
