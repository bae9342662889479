"""NumPy's operations on flat shards: ordered sums, norms, AdamW, initial values, fingerprints."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mpishard.array import random
from mpishard.array.backend import AdamWStep, Draw
from mpishard.array.constants import CHUNK
from mpishard.array.dtypes import Array
from mpishard.array.exact import add_to_words
from mpishard.array.numpy_tiles import TILE, NumpyTiles

__all__ = ["NumpyShardOps"]

#: elements of a sum at a time where nothing but its blocks is read: half a megabyte of fp32 stays in a core's cache
_LONG = 8 * TILE


class NumpyShardOps(NumpyTiles):
    """The operations that optimiser, communication and checksums use."""

    def _ordered_sum(self, blocks: Sequence[Array], out: Array, add: bool, bracket: int) -> None:
        if not blocks:
            if not add:
                out.fill(0.0)
            return
        # What is neither widened nor summed apart needs no scratch, and fewer and longer calls.
        plain = bracket == 1 and all(block.dtype == out.dtype for block in blocks)
        # Where out is written by one call, tiles would be read once, and each end makes it start anew.
        once = plain and len(blocks) == 2 and not add
        for tile in self._tiles(out.size, max(1, out.size) if once else _LONG if plain else TILE):
            target = out[tile]
            if plain:
                self._add_up(blocks, tile, target, target, not add)
                continue
            wide, total = self._temps(target.size, out.dtype, 2)
            if bracket == 1:
                self._add_up(blocks, tile, target, wide, not add)
                continue
            for first in range(0, len(blocks), bracket):
                part = blocks[first : first + bracket]
                if first == 0 and not add:
                    self._add_up(part, tile, target, wide, True)
                else:
                    self._add_up(part, tile, total, wide, True)
                    np.add(target, total, out=target)

    def _add_up(self, blocks: Sequence[Array], tile: slice, target: Array, wide: Array, write: bool) -> None:
        """Add a tile of the blocks to ``target``, of which the first may be written; ``wide`` is overwritten."""
        if write and len(blocks) > 1 and blocks[0].dtype == blocks[1].dtype == target.dtype:
            np.add(blocks[0][tile], blocks[1][tile], out=target)  # and not written first
            write, blocks = False, blocks[2:]
        for i, block in enumerate(blocks):
            part = block[tile]
            if part.dtype != target.dtype:
                self._widen(part, wide)
                part = wide
            if i == 0 and write:
                np.copyto(target, part)
            else:
                np.add(target, part, out=target)

    def _square_sums(self, x: Array, holes: Sequence[tuple[int, int]], out: Array) -> None:
        wide_type = np.dtype(np.float64)
        pending = list(reversed(holes))
        for tile in self._tiles(x.size, TILE // CHUNK * CHUNK):
            (wide,) = self._temps(tile.stop - tile.start, wide_type, 1)
            np.copyto(wide, x[tile])
            while pending and pending[-1][0] < tile.stop:
                start, stop = pending[-1]
                wide[max(start, tile.start) - tile.start : stop - tile.start] = 0.0
                if stop > tile.stop:
                    break
                pending.pop()
            np.multiply(wide, wide, out=wide)
            np.add.reduce(wide.reshape(-1, CHUNK), axis=1, out=out[tile.start // CHUNK : tile.stop // CHUNK])

    def _exact_sum(self, values: Array, out: Array) -> None:
        add_to_words(values, out)

    def _adamw(
        self, param: Array, grad: Array, exp_avg: Array, exp_avg_sq: Array, cast: Array | None, step: AdamWStep
    ) -> None:
        rate = step.lr / step.correction1
        root = 1.0 / math.sqrt(step.correction2)
        for start, stop, decay in step.segments:
            for local in self._tiles(stop - start):
                tile = slice(start + local.start, start + local.stop)
                p, m, v = param[tile], exp_avg[tile], exp_avg_sq[tile]
                g, t = self._temps(p.size, p.dtype, 2)
                np.multiply(grad[tile], step.factor, out=g)
                np.multiply(m, step.beta1, out=m)
                np.multiply(g, 1.0 - step.beta1, out=t)
                np.add(m, t, out=m)
                np.multiply(v, step.beta2, out=v)
                np.multiply(g, g, out=t)
                np.multiply(t, 1.0 - step.beta2, out=t)
                np.add(v, t, out=v)
                np.sqrt(v, out=t)
                np.multiply(t, root, out=t)
                np.add(t, step.eps, out=t)
                np.divide(m, t, out=t)
                np.multiply(t, rate, out=t)
                if decay:
                    np.multiply(p, 1.0 - step.lr * decay, out=p)
                np.subtract(p, t, out=p)
                if cast is not None:
                    self._round(p, cast[tile])

    def _normal(self, out: Array, draw: Draw, std: float) -> None:
        first, last = draw.first, draw.first + out.size
        for start in range(first // 2 * 2, last, TILE):
            stop = min(start + TILE, -(-last // 2) * 2)
            u, radius = self._temps(stop - start, np.dtype(np.float64), 2)
            random.normal(draw._replace(first=start), u, radius)
            np.multiply(u, std, out=u)
            begin, end = max(start, first), min(stop, last)
            np.copyto(out[begin - first : end - first], u[begin - start : end - start], casting="same_kind")

    def _fingerprint(self, x: Array, draw: Draw) -> int:
        # Each element's bits, plus one, times an odd number mixed from its place (the finaliser of
        # SplitMix64, Steele et al. 2014), added up modulo 2**64. In 64-bit elements the high half is mixed
        # into the low one first: else the top bit, a sign, would weigh 2**63 at every place and cancel.
        words = {8: np.uint64, 4: np.uint32, 2: np.uint16}[x.dtype.itemsize]
        total = 0
        for tile in self._tiles(x.size, TILE // 2):
            size = tile.stop - tile.start
            weight, shifted, bits = self._temps(size, np.dtype(np.uint64), 3)
            weight[...] = np.arange(size, dtype=np.uint64)
            start = (draw.first + tile.start) * 0x9E3779B97F4A7C15 + draw.stream
            np.multiply(weight, np.uint64(0x9E3779B97F4A7C15), out=weight)
            np.add(weight, np.uint64(start % 2**64), out=weight)
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
                np.right_shift(weight, np.uint64(shift), out=shifted)
                np.bitwise_xor(weight, shifted, out=weight)
                np.multiply(weight, np.uint64(factor), out=weight)
            np.bitwise_or(weight, np.uint64(1), out=weight)
            np.copyto(bits, x[tile].view(words))
            if words is np.uint64:
                np.right_shift(bits, np.uint64(32), out=shifted)
                np.bitwise_xor(bits, shifted, out=bits)
            np.add(bits, np.uint64(1), out=bits)
            np.multiply(bits, weight, out=bits)
            total += int(np.add.reduce(bits))
        return total % 2**64
