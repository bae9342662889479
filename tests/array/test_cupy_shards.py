"""CuPy's operations on flat shards: equal to NumPy's bit for bit, in as few calls as there may be."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpishard.array.constants import CHUNK
from mpishard.array.cupy_host import SLOT
from mpishard.array.cupy_launch import TABLES
from mpishard.array.cupy_shards import evenly
from mpishard.array.dtypes import DTYPES, accumulator
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.ops import AdamWStep, Draw
from tests.array.cupy_case import on_device, standing_in

F32, BF16 = DTYPES["float32"], DTYPES["bfloat16"]


@pytest.fixture(scope="module")
def ops():
    with standing_in() as found:
        yield found


def numbers(kind, *shape, seed=7):
    return np.random.default_rng(seed).standard_normal(shape).astype(kind)


def test_blocks_of_one_step_with_one_exception():
    assert evenly([100], 10) == (100, -1)
    assert evenly([100, 110, 120], 10) == (100, -1)
    assert evenly([100, 777, 120], 10) == (100, 1)
    assert evenly([777, 110, 120], 10) == (100, 0)
    assert evenly([100, 110, 777], 10) == (100, 2)
    assert evenly([100, 777], 10) == (100, 1)
    assert evenly([100, 105, 777, 130], 10) is None
    assert evenly([777, 110, 99, 130], 10) is None


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_receive_buffer_is_summed_in_one_launch_whoever_this_rank_is(ops, ranks, kind, add):
    kind, n = DTYPES[kind], 300
    blocks, before = numbers(kind, ranks, n), numbers(accumulator(kind), n)
    want = before.copy()
    NumpyOps().ordered_sum(list(blocks), want, add)
    for rank in range(ranks):
        received = blocks.copy()
        received[rank] = np.nan  # not sent
        # The buffer is all there is: nothing lies before it or behind it.
        full, arrived = on_device(ops, blocks), on_device(ops, received)
        out = on_device(ops, before)
        ops.counters.reset()
        ops.ordered_sum([full[q] if q == rank else arrived[q] for q in range(ranks)], out, add)
        assert ops.counters.launches == 1
        assert ops.fetch(out).tobytes() == want.tobytes()


@pytest.mark.parametrize("add", [False, True])
def test_blocks_anywhere_are_summed_one_after_another(ops, add):
    blocks, before = numbers(F32, 4, 300), numbers(F32, 300)
    want = before.copy()
    NumpyOps().ordered_sum(list(blocks), want, add)
    out, there = on_device(ops, before), [on_device(ops, block) for block in blocks]
    ops.counters.reset()
    ops.ordered_sum(there, out, add)
    assert ops.counters.launches == 4
    assert ops.fetch(out).tobytes() == want.tobytes()
    half, single = on_device(ops, blocks[0].astype(BF16)), on_device(ops, blocks[1])
    ops.ordered_sum([half, single], out, False)
    assert (ops.fetch(out) == blocks[0].astype(BF16).astype(F32) + blocks[1]).all()


def test_a_buffer_that_begins_behind_this_ranks_block(ops):
    """Rank 0's own block would lie before the memory's beginning: then blocks are added one after another."""
    blocks = numbers(F32, 3, 512)
    out, own, arrived = ops.empty(512, F32), on_device(ops, blocks[0]), on_device(ops, blocks[1:])
    ops.ordered_sum([own, arrived[0], arrived[1]], out, False)
    assert (ops.fetch(out) == blocks[0] + blocks[1] + blocks[2]).all()
    last = on_device(ops, blocks[:2])
    ops.counters.reset()
    ops.ordered_sum([last[0], last[1], own], out, False)
    assert ops.counters.launches == 1
    assert (ops.fetch(out) == blocks[0] + blocks[1] + blocks[0]).all()


@pytest.mark.parametrize("cast", [None, "float32", "bfloat16", "float16"])
def test_adamw_has_numpys_bits(ops, cast):
    n = 3000
    step = AdamWStep(
        0.37, 3e-3, 0.9, 0.95, 1e-8, 1 - 0.9**7, 1 - 0.95**7, ((0, 999, 0.1), (1008, 1500, 0.0), (1500, n - 3, 0.013))
    )
    arrays = [numbers(F32, n, seed=seed) for seed in range(4)]
    arrays[3] = abs(arrays[3])
    arrays[3][:5] = 0.0
    narrow = None if cast is None else numbers(DTYPES[cast], n)
    there = [on_device(ops, array) for array in (*arrays, narrow)]
    for _ in range(2):
        NumpyOps().adamw(*arrays, step, narrow)
        ops.adamw(*there[:4], step, there[4])
    for found, want in zip(there, (*arrays, narrow)):
        assert want is None or ops.fetch(found).tobytes() == want.tobytes()


def test_tables_are_uploaded_once_and_do_not_mix(ops):
    x, out = numbers(F32, 4 * CHUNK), ops.empty(4, DTYPES["float64"])
    there, seen = on_device(ops, x), []
    param = [on_device(ops, np.ones(4 * CHUNK, np.float32)) for _ in range(4)]
    step = AdamWStep(1.0, 0.1, 0.9, 0.9, 1e-8, 0.1, 0.1, ((3, 7, 0.5), (16, 30, 0.0)))
    for holes in ((), ((3, 7),), ((16, 30),), ((3, 7), (16, 30)), ()):
        want = np.empty(4)
        NumpyOps().square_sums(x, holes, want)
        for several in (holes, list(holes)):
            ops.square_sums(there, several, out)
            assert abs(ops.fetch(out) - want).max() < 1e-12 * want.max()
        ops.adamw(*param, step)
        ops.counters.reset()
        ops.square_sums(there, holes, out)
        ops.adamw(*param, step._replace(lr=0.2))
        seen.append((ops.counters.launches, ops.counters.copies, ops.counters.allocations))
    assert set(seen) == {(2, 0, 0)}


def test_more_tables_than_there_is_room_for():
    with standing_in() as ops:
        before, x, out = ops.own_bytes, on_device(ops, np.ones(CHUNK, np.float32)), ops.empty(1, DTYPES["float64"])
        tables = [tuple((start, start + 2) for start in range(0, stop, 4)) for stop in range(4, CHUNK + 4, 4)]
        ops._tables = ops._tables[: TABLES // 16]
        for holes in (*tables, *tables):
            ops.square_sums(x, holes, out)
            assert ops.fetch(out)[0] == CHUNK - 2 * len(holes)
        assert 0 < ops.own_bytes - before < sum(256 + 16 * len(holes) for holes in tables)


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("first", [0, 1, 2**40 + 3])
def test_initial_values_have_numpys_bits(ops, kind, first):
    draw, n = Draw(2**63 + 5, 17, 0, first), 2 * SLOT // 8 + 11
    want = np.empty(n, DTYPES[kind])
    NumpyOps().normal(want, draw, 0.02)
    out = ops.empty(n, want.dtype)
    ops.normal(out, draw, 0.02)
    assert ops.fetch(out).tobytes() == want.tobytes()


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "uint16", "float32", "float64", "int64"])
@pytest.mark.parametrize("n", [0, 1, 7, 5000])
def test_fingerprints_are_numpys(ops, kind, n):
    x = numbers(np.float64, n + 3).view(DTYPES[kind])[:n].copy()
    for draw in (Draw(0, 0, 0, 0), Draw(1, 2**64 - 5, 2, 2**40 + 7)):
        want = NumpyOps().fingerprint(x, draw)
        there = on_device(ops, x)
        ops.counters.reset()
        assert ops.fingerprint(there, draw) == want
        assert ops.counters.launches == (1 if n else 0)


def test_sums_of_losses_and_squares_are_exact(ops):
    x = numbers(F32, 4000) * 1e20
    words = on_device(ops, np.zeros(21, np.int64))
    host = np.zeros(21, np.int64)
    wide = x.astype(np.float64)
    for part in (wide[:1000], wide[1000:]):
        ops.exact_sum(on_device(ops, part), words)
        NumpyOps().exact_sum(part, host)
    from mpishard.array.exact import from_words

    assert from_words(ops.fetch(words)) == from_words(host)
    total = ops.empty(1, DTYPES["float64"])
    ops.sum64(on_device(ops, x), total)
    assert math.isclose(ops.fetch(total)[0], math.fsum(wide), rel_tol=1e-12)
    ops.sum64(ops.empty(0, F32), total)
    assert ops.fetch(total)[0] == 0
