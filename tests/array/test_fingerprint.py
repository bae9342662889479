from itertools import pairwise

import numpy as np
import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.numpy_tiles import TILE
from mpishard.array.ops import Draw

DRAW = Draw(0, 12345, 0, 0)
MASK = 2**64 - 1
KINDS = ["float16", "float32", "float64"]


def numbers(n, kind="float32"):
    return np.random.default_rng(4).standard_normal(n).astype(kind)


def plain(x, draw):
    """Sum of (bits, high half mixed into the low one, + 1) times an odd weight: SplitMix64's finaliser of the place."""
    words = x.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[x.itemsize]).tolist()
    total = 0
    for i, bits in enumerate(words):
        mixed = bits ^ bits >> 32
        z = ((draw.first + i) * 0x9E3779B97F4A7C15 + draw.stream) & MASK
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        z = (z ^ z >> 31) | 1
        total += (mixed + 1) * z
    return total & MASK


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 7, TILE // 2, TILE // 2 + 1])
def test_against_plain_integers(kind, n):
    x = numbers(n, kind)
    for first in (0, 5, 2**40):
        assert NumpyOps().fingerprint(x, DRAW._replace(first=first)) == plain(x, DRAW._replace(first=first))


@pytest.mark.parametrize("kind", KINDS)
def test_parts_add_up(kind):
    ops, x = NumpyOps(), numbers(TILE + 1001, kind)
    whole = ops.fingerprint(x, DRAW)
    assert 0 <= whole < 2**64
    for cuts in ((1,), (7, 500), (TILE // 2, TILE), (0, TILE - 1, TILE, TILE + 1)):
        borders = [0, *cuts, x.size]
        parts = [ops.fingerprint(x[a:b], DRAW._replace(first=a)) for a, b in pairwise(borders)]
        assert sum(parts) % 2**64 == whole


@pytest.mark.parametrize("kind", KINDS)
def test_one_bit_one_swap_one_place_and_one_name_show(kind):
    ops, x = NumpyOps(), numbers(100, kind)
    seen = {
        ops.fingerprint(x, DRAW),
        ops.fingerprint(x, DRAW._replace(first=1)),
        ops.fingerprint(x, DRAW._replace(stream=1)),
    }
    bits = x.itemsize * 8
    for place in (0, 57, 99):
        for bit in range(bits):
            other = x.copy()
            other.view(f"u{x.itemsize}")[place] ^= np.array(1 << bit, f"u{x.itemsize}")
            seen.add(ops.fingerprint(other, DRAW))
    for a, b in ((0, 1), (3, 99), (50, 51)):
        other = x.copy()
        other[[a, b]] = other[[b, a]]
        seen.add(ops.fingerprint(other, DRAW))
    assert len(seen) == 3 + 3 * bits + 3


@pytest.mark.parametrize("kind", KINDS)
def test_two_signs_and_all_signs_show(kind):
    ops, x = NumpyOps(), numbers(100, kind)
    two = x.copy()
    two[[4, 77]] *= -1
    assert len({ops.fingerprint(y, DRAW) for y in (x, -x, two, -two)}) == 4


def test_zeros_and_their_number_show():
    ops, zeros = NumpyOps(), np.zeros(9, np.float32)
    assert len({ops.fingerprint(zeros[:n], DRAW) for n in range(10)}) == 10
    assert ops.fingerprint(-zeros, DRAW) != ops.fingerprint(zeros, DRAW)


def test_seed_and_step_do_not_matter():
    ops, x = NumpyOps(), numbers(9)
    assert ops.fingerprint(x, DRAW._replace(seed=5, step=6)) == ops.fingerprint(x, DRAW)
