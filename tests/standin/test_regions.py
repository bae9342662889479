from __future__ import annotations

import numpy as np
import pytest

from tests.standin.regions import covers, first_common, matrix, moved, one, overlap, pieces, rows_of


def touched(shape, strides, itemsize, at=0):
    found = {at}
    for count, stride in zip(shape, strides):
        found = {start + i * stride for start in found for i in range(count)}
    return {start + byte for start in found for byte in range(itemsize)} if 0 not in shape else set()


def some_view(random):
    itemsize = int(random.choice([2, 4, 8]))
    axes = int(random.integers(1, 4))
    shape = tuple(int(n) for n in random.integers(0 if random.random() < 0.05 else 1, 5, axes))
    strides = tuple(int(s) * itemsize for s in random.integers(-9, 10, axes))
    return shape, strides, itemsize, int(random.integers(0, 60)) * 2


def test_pieces_are_the_bytes_of_a_view():
    random = np.random.default_rng(0)
    for _ in range(2000):
        shape, strides, itemsize, at = some_view(random)
        parts = moved(pieces(shape, strides, itemsize), at)
        assert {b for low, high in rows_of(parts) for b in range(low, high)} == touched(shape, strides, itemsize, at)


def test_overlap_and_covering_are_those_of_the_bytes():
    random = np.random.default_rng(1)
    meetings = 0
    for _ in range(4000):
        first, second = some_view(random), some_view(random)
        p, q = (moved(pieces(*view[:3]), view[3]) for view in (first, second))
        a, b = touched(*first), touched(*second)
        assert overlap(p, q) == overlap(q, p) == bool(a & b)
        if covers(p, q):
            assert a >= b
        if a & b:
            meetings += 1
            assert first_common(p, q) <= min(a & b)
    assert 1000 < meetings < 3500


def test_columns_of_one_matrix_side_by_side_do_not_meet():
    heads = [matrix(4096 + 64 * head, 128, 64, 768) for head in range(12)]
    assert not any(overlap(one_head, other) for i, one_head in enumerate(heads) for other in heads[:i])
    assert all(overlap(head, one(4096, 128 * 768)) for head in heads)
    assert all(covers(one(4096, 128 * 768), head) for head in heads)
    assert not overlap(heads[0], one(4096 + 64, 704))
    assert overlap(heads[0], one(4096 + 64, 705))


@pytest.mark.parametrize("count", [65, 5])
def test_views_with_gaps_on_many_axes_become_a_range(count):
    # Rows of 4 bytes, 100 bytes apart, in `count` planes whose distance is no multiple of that.
    parts = pieces((count, 3, 2), (1001, 100, 2), 2)
    assert len(parts) == (1 if count > 64 else 5)
