import math

import numpy as np
import pytest

from mpishard.array import random
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.numpy_tiles import TILE
from mpishard.array.ops import Draw
from mpishard.array.random import stream
from tests.array import philox

DRAWS = [Draw(0, 0, 0, 0), Draw(1, 2, 3, 0), Draw(2**64 - 1, 2**64 - 1, 2**40, 0), Draw(-1, 2**63, 0, 0)]
FIRSTS = (0, 1, 2, 3, 4, 7, 8, 9, 4095, 2**40 + 5)


def test_the_cipher_of_the_tests_gives_the_paper_s_known_answers():
    """Test vectors of Random123, the paper's library."""
    assert philox.philox((0, 0, 0, 0), (0, 0)) == (
        0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B,
    )  # fmt: skip
    ones = philox.MASK
    assert philox.philox((ones,) * 4, (ones,) * 2) == (
        0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0,
    )  # fmt: skip


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("first", FIRSTS)
@pytest.mark.parametrize("count", [1, 2, 13])
def test_uniform_numbers_are_those_of_the_cipher(draw, first, count):
    draw = draw._replace(first=first)
    single, double = np.empty(count, np.float32), np.empty(count)
    random.uniform32(draw, single)
    random.uniform64(draw, double)
    assert single.tolist() == philox.uniform32(draw, count).tolist()
    assert double.tolist() == philox.uniform64(draw, count).tolist()


@pytest.mark.parametrize(("fill", "kind"), [(random.uniform32, np.float32), (random.uniform64, np.float64)])
def test_slices_of_a_stream_are_the_stream(fill, kind):
    draw = Draw(5, 6, 7, 0)
    whole = np.empty(300, kind)
    fill(draw, whole)
    assert (whole >= 0).all() and (whole < 1).all()
    assert len(set(whole.tolist())) > 295
    for start in range(20):
        for count in (1, 2, 3, 8, 9, 280):
            part = np.empty(count, kind)
            fill(draw._replace(first=start), part)
            assert part.tobytes() == whole[start : start + count].tobytes()


@pytest.mark.parametrize("change", [{"seed": 6}, {"stream": 7}, {"step": 8}, {"first": 300}])
def test_other_draws_are_other_numbers(change):
    draw = Draw(5, 6, 7, 0)
    one, other = np.empty(300), np.empty(300)
    random.uniform64(draw, one)
    random.uniform64(draw._replace(**change), other)
    assert not set(one.tolist()) & set(other.tolist())


def test_streams_are_named():
    assert stream("h.0.attn.drop") == stream("h.0.attn.drop")
    assert len({stream(name) for name in ("", "h.0", "h.1", "wte.weight", "wpe.weight")}) == 5
    # blake2b of 8 bytes, least significant byte first: a checkpoint's seed must mean the same tomorrow
    assert stream("wte.weight") == int.from_bytes(bytes.fromhex("1919b720025d77cd"), "little")


def test_normal_numbers_have_normal_moments():
    out, n = np.empty(200_001), 200_001
    NumpyOps().normal(out, Draw(3, 4, 0, 0), 2.0)
    z = out / 2
    # four standard errors of each moment
    for power, mean, spread in ((1, 0, 1), (2, 1, math.sqrt(2)), (3, 0, math.sqrt(15)), (4, 3, math.sqrt(96))):
        assert abs((z**power).mean() - mean) < 4 * spread / math.sqrt(n)
    assert abs((z[:-1] * z[1:]).mean()) < 4 / math.sqrt(n)
    assert abs((z[:-2] * z[2:]).mean()) < 4 / math.sqrt(n)
    for limit, share in ((1.0, 0.682689), (2.0, 0.954500), (3.0, 0.997300)):
        assert abs((abs(z) < limit).mean() - share) < 4 * math.sqrt(share * (1 - share) / n)


@pytest.mark.parametrize("kind", ["float32", "float64", "float16"])
def test_any_slice_of_normal_numbers_has_the_bits_of_the_whole(kind):
    """Parameters are drawn by shards: no number may depend on where a shard begins, nor on SIMD's remainders."""
    ops, draw, whole = NumpyOps(), Draw(3, 4, 0, 0), np.empty(2 * TILE + 77, kind)
    ops.normal(whole, draw, 0.02)
    starts = [*range(18), 511, TILE - 1, TILE, TILE + 1, 2 * TILE - 3]
    for start in starts:
        for count in (1, 2, 3, 5, 16, 33, TILE, TILE + 1):
            part = np.empty(min(count, whole.size - start), kind)
            ops.normal(part, draw._replace(first=start), 0.02)
            assert part.tobytes() == whole[start : start + part.size].tobytes(), (start, count)


def test_normal_numbers_scale_with_std():
    ops, one, two = NumpyOps(), np.empty(33), np.empty(33)
    ops.normal(one, Draw(3, 4, 0, 1), 1.0)
    ops.normal(two, Draw(3, 4, 0, 1), 0.5)
    assert (two == 0.5 * one).all()


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_dropout_drops_at_its_rate_and_keeps_the_mean(rate):
    n = 100_000
    x, y = np.ones(n, np.float32), np.empty(n, np.float32)
    NumpyOps().dropout(x, y, rate, Draw(1, 2, 3, 0))
    dropped = (y == 0).mean()
    assert abs(dropped - rate) <= 4 * math.sqrt(rate * (1 - rate) / n)
    assert set(y.tolist()) <= {0.0, float(np.float32(1 / (1 - rate)))}
    assert abs(y.mean() - 1) <= 4 * math.sqrt(rate / (1 - rate) / n) + 1e-6


def test_dropout_of_a_slice_is_the_slice_of_dropout():
    """A rank draws the mask of its own rows only."""
    ops, draw = NumpyOps(), Draw(1, 2, 3, 0)
    x = np.random.default_rng(0).standard_normal(2 * TILE + 7).astype(np.float32)
    whole = np.empty_like(x)
    ops.dropout(x, whole, 0.3, draw)
    for start, stop in ((1, 4), (7, TILE + 9), (TILE // 2 - 1, 2 * TILE + 7)):
        part = np.empty(stop - start, np.float32)
        ops.dropout(x[start:stop], part, 0.3, draw._replace(first=start))
        assert part.tobytes() == whole[start:stop].tobytes()


def test_forward_and_backward_have_one_mask():
    ops, draw = NumpyOps(), Draw(1, 2, 3, 5)
    x, y, dy, dx = (np.ones((3, 5, 7)) for _ in range(4))
    ops.dropout(x, y, 0.5, draw)
    ops.dropout(dy, dx, 0.5, draw)
    assert y.tobytes() == dx.tobytes()
    ops.dropout(dy, dx, 0.5, draw._replace(step=4))
    assert y.tobytes() != dx.tobytes()
