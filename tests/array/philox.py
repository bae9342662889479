"""Philox4x64-10 in plain Python, from the paper (Salmon et al. 2011, section 3.3 and table 2).

It shares nothing with mpishard.array.random, whose numbers NumPy draws.
"""

import math

import numpy as np

MASK = 2**64 - 1
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds; each multiplies two words, crosses the halves and mixes in the key."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        p, q = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c
        a, b, c, d = (q >> 64) ^ b ^ k, q & MASK, (p >> 64) ^ d ^ m, p & MASK
        k, m = (k + WEYL[0]) & MASK, (m + WEYL[1]) & MASK
    return a, b, c, d


def words(draw, first: int, count: int) -> list[int]:
    """64-bit words ``first`` to ``first + count`` of a stream: block b is the cipher of (b + 1, 0, step, 0)."""
    key = (draw.seed & MASK, draw.stream & MASK)
    start, stop = first // 4, -(-(first + count) // 4)
    found = [w for b in range(start, stop) for w in philox(((b + 1) & MASK, 0, draw.step, 0), key)]
    return found[first - 4 * start :][:count]


def uniform64(draw, count: int) -> np.ndarray:
    """53 bits of each word."""
    return np.array([(w >> 11) * 2.0**-53 for w in words(draw, draw.first, count)], np.float64)


def uniform32(draw, count: int) -> np.ndarray:
    """24 bits of each half word, low half first."""
    first = draw.first // 2
    halves = []
    for w in words(draw, first, count // 2 + 2):
        halves += [w & 0xFFFFFFFF, w >> 32]
    skip = draw.first - 2 * first
    return np.array([(h >> 8) * 2.0**-24 for h in halves[skip : skip + count]], np.float32)


def normal(draw, count: int) -> np.ndarray:
    """Box & Muller: elements 2k and 2k + 1 are cosine and sine of one pair of uniforms."""
    first = draw.first // 2 * 2
    u = uniform64(draw._replace(first=first), (count + 3) // 2 * 2)
    numbers = []
    for a, b in zip(u[::2].tolist(), u[1::2].tolist()):
        radius = math.sqrt(-2.0 * math.log(1.0 - a))
        numbers += [radius * math.cos(2.0 * math.pi * b), radius * math.sin(2.0 * math.pi * b)]
    skip = draw.first - first
    return np.array(numbers[skip : skip + count])
