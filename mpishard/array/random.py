"""Random numbers as functions of their place: counter-based Philox4x64-10 (Salmon et al. 2011, section 4).

[Note: counter layout]
The key is (seed, stream). Block b of a step is the cipher of the counter (b + 1, 0, step, 0): four 64-bit
words, read low word first; 32-bit numbers take the low half of a word before its high half. So any
slice of a stream can be drawn alone, on any rank, and on a GPU.
"""

from __future__ import annotations

import hashlib

import numpy as np

from mpishard.array.dtypes import Array
from mpishard.array.ops import Draw

__all__ = ["normal", "stream", "uniform32", "uniform64"]

_WORDS = 4  # 64-bit words of one Philox block


def stream(name: str) -> int:
    """Return the 64-bit stream number of a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _generator(draw: Draw, block: int) -> np.random.Generator:
    key = np.array([draw.seed & (2**64 - 1), draw.stream], dtype=np.uint64)
    counter = np.array([block, 0, draw.step, 0], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def uniform32(draw: Draw, out: Array) -> None:
    """Fill out (count,) float32 with numbers in [0, 1): 24 bits of each 32-bit half word."""
    block, skip = divmod(draw.first, 2 * _WORDS)
    generator = _generator(draw, block)
    if skip:
        generator.random(out=np.empty(skip, np.float32), dtype=np.float32)
    generator.random(out=out, dtype=np.float32)


def uniform64(draw: Draw, out: Array) -> None:
    """Fill out (count,) float64 with numbers in [0, 1): 53 bits of each word."""
    block, skip = divmod(draw.first, _WORDS)
    generator = _generator(draw, block)
    if skip:
        generator.random(out=np.empty(skip, np.float64))
    generator.random(out=out)


def normal(draw: Draw, u: Array, radius: Array) -> None:
    """Fill u (count,) float64 with standard normal numbers; radius (count,) float64 is scratch.

    ``draw.first`` and count are even: elements 2k and 2k+1 are the cosine and the sine of one pair of
    uniforms (Box & Muller 1958).
    """
    uniform64(draw, u)
    pairs = u.reshape(-1, 2)
    r, angle = radius.reshape(2, -1)
    np.subtract(1.0, pairs[:, 0], out=r)
    np.log(r, out=r)
    np.multiply(r, -2.0, out=r)
    np.sqrt(r, out=r)
    np.multiply(pairs[:, 1], 2.0 * np.pi, out=angle)
    # Computed on contiguous arrays: a strided loop may take another code path with other last bits.
    np.cos(angle, out=pairs[:, 0])
    np.sin(angle, out=angle)
    np.multiply(angle, r, out=pairs[:, 1])
    np.multiply(pairs[:, 0], r, out=pairs[:, 0])
