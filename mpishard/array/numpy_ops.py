"""Operations on host arrays with NumPy: the CPU backend, and the reference of the others.

Arrays of float32 and float64 are worked on where they lie; those of 16 bits in blocks of float32
(:mod:`mpishard.array.numpy_tiles`, note "sixteen bits"), by the same operations.

[Note: rounding]
An operation rounds once, when it writes: to nearest, ties to even. An output may have the type of the inputs or their
accumulator's. What is added to an output is added in float32, before that rounding.
"""

from __future__ import annotations

import numpy as np

from mpishard.array.backend import Draw
from mpishard.array.dtypes import Array
from mpishard.array.numpy_floats import NumpyFloatOps, check_numbers
from mpishard.array.numpy_matmul import product_of_narrow
from mpishard.array.numpy_tiles import BLOCK, TILE, pieces

__all__ = ["NumpyOps"]

_MANY = 1 << 18  # tokens whose places are sorted at once, in half of the second scratch


def _narrow(x: Array) -> bool:
    """Whether x is computed with in float32."""
    return bool(x.dtype.itemsize == 2)


def _part(x: Array, here: tuple[int | slice, ...]) -> Array:
    """Index the leading axes; an array in any case, where a single element of bfloat16 would be none."""
    part: Array = x[here + (...,)]
    return part


class NumpyOps(NumpyFloatOps):
    """NumPy's version of each operation. One object serves one thread: its calls share its scratch."""

    # --- matrices

    def _matmul(self, a: Array, b: Array, out: Array, add: bool) -> None:
        if not _narrow(a):
            super()._matmul(a, b, out, add)
            return
        with np.errstate(all="ignore"):
            product_of_narrow(a, b, out, add, self._wides(*[BLOCK] * 4), self._widen, self._round)

    def _column_sum(self, x: Array, out: Array, add: bool) -> None:
        if not _narrow(x):
            super()._column_sum(x, out, add)
            return
        for columns in self._tiles(out.size):
            width = columns.stop - columns.start
            rows = max(1, min(x.shape[0], BLOCK // width))
            total, flat = self._wides(width, rows * width)
            total.fill(0.0)
            for part in self._tiles(x.shape[0], rows):
                block = x[part, columns]
                wide = flat[: block.size].reshape(block.shape)
                self._widen(block, wide)
                # The sum so far comes first, as if the block's rows followed it.
                np.add(wide[0], total, out=wide[0])
                np.add.reduce(wide, axis=0, out=total)
            if add:
                self._widen(out[columns], flat[:width])
                np.add(flat[:width], total, out=total)
            self._round(total, out[columns])

    def _row_dot(self, x: Array, y: Array, out: Array) -> None:
        if not _narrow(x):
            super()._row_dot(x, y, out)
            return
        rows, heads, size = x.shape
        for tile in self._tiles(rows, max(1, TILE // max(1, heads * size))):
            wide_x, wide_y = self._widened(x[tile], y[tile])
            super()._row_dot(wide_x, wide_y, out[tile])

    def _widened(self, *arrays: Array) -> list[Array]:
        """Return the arrays in float32, in the second scratch."""
        found = self._wides(*(array.size for array in arrays))
        for i, array in enumerate(arrays):
            found[i] = found[i].reshape(array.shape)
            self._widen(array, found[i])
        return found

    # --- elementwise

    def _add(self, x: Array, y: Array, out: Array) -> None:
        if not _narrow(x):
            super()._add(x, y, out)
            return
        for here in pieces(x.shape, 4 * TILE):
            wide, more = self._widened(_part(x, here), _part(y, here[x.ndim - y.ndim :]))
            np.add(wide, more, out=wide)
            self._round(wide, _part(out, here))

    def _multiply(self, x: Array, y: Array, out: Array, add: bool) -> None:
        if not _narrow(x):
            super()._multiply(x, y, out, add)
            return
        for here in pieces(x.shape, 4 * TILE):
            target = _part(out, here)
            part, factor = _part(x, here), _part(y, here[x.ndim - y.ndim :])
            wide, more, *before = self._widened(part, factor, *[target] * add)
            np.multiply(wide, more, out=wide)
            if add:
                np.add(before[0], wide, out=wide)
            self._round(wide, target)

    def _gelu(self, x: Array, y: Array, tanh: bool) -> None:
        if not _narrow(x):
            super()._gelu(x, y, tanh)
            return
        x, y = x.reshape(-1), y.reshape(-1)
        for tile in self._tiles(x.size):
            (wide,) = self._widened(x[tile])
            super()._gelu(wide, wide, tanh)
            self._round(wide, y[tile])

    def _gelu_backward(self, x: Array, dy: Array, dx: Array, tanh: bool) -> None:
        if not _narrow(x):
            super()._gelu_backward(x, dy, dx, tanh)
            return
        x, dy, dx = x.reshape(-1), dy.reshape(-1), dx.reshape(-1)
        for tile in self._tiles(x.size):
            wide, slope = self._widened(x[tile], dy[tile])
            super()._gelu_backward(wide, slope, slope, tanh)
            self._round(slope, dx[tile])

    def _dropout(self, x: Array, y: Array, rate: float, draw: Draw) -> None:
        if not _narrow(x):
            super()._dropout(x, y, rate, draw)
            return
        x, y = x.reshape(-1), y.reshape(-1)
        for tile in self._tiles(x.size):
            (wide,) = self._widened(x[tile])
            super()._dropout(wide, wide, rate, draw._replace(first=draw.first + tile.start))
            self._round(wide, y[tile])

    # --- layer norm

    def _layernorm(
        self, x: Array, weight: Array, bias: Array, y: Array, mean: Array, rstd: Array, eps: float
    ) -> None:
        if not _narrow(x):
            super()._layernorm(x, weight, bias, y, mean, rstd, eps)
            return
        rows, width = x.shape
        for tile in self._tiles(rows, max(1, TILE // width)):
            wide, scale, shift = self._widened(x[tile], weight, bias)
            super()._layernorm(wide, scale, shift, wide, mean[tile], rstd[tile], eps)
            self._round(wide, y[tile])

    def _layernorm_backward(
        self,
        x: Array,
        weight: Array,
        mean: Array,
        rstd: Array,
        dy: Array,
        dx: Array,
        dweight: Array | None,
        dbias: Array | None,
        add_weight: bool,
        add_bias: bool,
    ) -> None:
        if not _narrow(x):
            super()._layernorm_backward(x, weight, mean, rstd, dy, dx, dweight, dbias, add_weight, add_bias)
            return
        rows, width = x.shape
        step = max(1, TILE // width)
        block = min(rows, step) * width
        scale, weights, biases, *flats = self._wides(width, width, width, block, block)
        self._widen(weight, scale)
        sums = ((weights, dweight, add_weight), (biases, dbias, add_bias))
        for total, gradient, add in sums:
            if gradient is not None and add:
                self._widen(gradient, total)
            else:
                total.fill(0.0)
        dw, db = (None if gradient is None else total for total, gradient, _ in sums)
        for tile in self._tiles(rows, step):
            part = x[tile]
            wide, slope = (flat[: part.size].reshape(part.shape) for flat in flats)
            self._widen(part, wide)
            self._widen(dy[tile], slope)
            super()._layernorm_backward(wide, scale, mean[tile], rstd[tile], slope, slope, dw, db, True, True)
            self._round(slope, dx[tile])
        for total, gradient, _ in sums:
            if gradient is not None:
                self._round(total, gradient)

    # --- embedding

    def _embedding(self, table: Array, tokens: Array, out: Array) -> None:
        if _narrow(table):
            table, out = table.view(np.uint16), out.view(np.uint16)
        super()._embedding(table, tokens, out)

    def _embedding_backward(self, tokens: Array, dy: Array, dtable: Array, add: bool) -> None:
        if not _narrow(dy):
            super()._embedding_backward(tokens, dy, dtable, add)
            return
        check_numbers("token", tokens, dtable.shape[0])
        if not add:
            dtable.fill(0.0)
        if _narrow(dtable):
            for part in self._tiles(tokens.size, _MANY):
                self._add_rows(tokens[part], dy[part], dtable)
            return
        for rows in self._tiles(tokens.size, max(1, TILE // max(1, dy.shape[1]))):
            (wide,) = self._widened(dy[rows])
            super()._embedding_backward(tokens[rows], wide, dtable, True)

    def _add_rows(self, tokens: Array, dy: Array, dtable: Array) -> None:
        """Add in order of position to one row of dtable after another, so that each is rounded once."""
        width, count = dy.shape[1], tokens.size
        places, total, row = self._wides(2 * count, width, width)
        keys = places.view(np.int64)  # token and position in one number: sorted by token, then by position
        np.left_shift(tokens, 32, out=keys)
        for part in self._tiles(count):
            np.add(keys[part], np.arange(part.start, part.stop), out=keys[part])
        keys.sort()
        last = -1
        for part in self._tiles(count, 1024):
            for key in keys[part].tolist():
                token, position = key >> 32, key & 0xFFFFFFFF
                if token != last:
                    if last >= 0:
                        self._round(total, dtable[last])
                    self._widen(dtable[token], total)
                    last = token
                self._widen(dy[position], row)
                np.add(total, row, out=total)
        if last >= 0:
            self._round(total, dtable[last])

    # --- attention

    def _causal_softmax(self, scores_: Array, lse: Array, first_row: int, scale: float, replay: bool) -> None:
        if not _narrow(scores_):
            super()._causal_softmax(scores_, lse, first_row, scale, replay)
            return
        heads, rows, keys = scores_.shape
        limit = BLOCK // 2
        several = max(1, min(rows, limit // max(1, keys)))
        for part in self._tiles(rows, several):
            seen = first_row + part.stop
            for some in self._tiles(heads, max(1, limit // max(1, several * keys))):
                block, log = scores_[some, part, :seen], lse[some, part]
                if not replay:
                    # For lse alone: the probabilities are made from it, here as in a replay, so they are the same.
                    (wide,) = self._widened(block)
                    super()._causal_softmax(wide, log, first_row + part.start, scale, False)
                (wide,) = self._widened(block)
                super()._causal_softmax(wide, log, first_row + part.start, scale, True)
                self._round(wide, block)
            scores_[:, part, seen:].fill(0.0)

    def _softmax_backward(self, p: Array, dp_: Array, delta: Array, scale: float) -> None:
        if not _narrow(p):
            super()._softmax_backward(p, dp_, delta, scale)
            return
        for here in pieces(p.shape, 4 * TILE):
            target = _part(dp_, here)
            wide, slope = self._widened(_part(p, here), target)
            np.subtract(slope, _part(delta, here[:2])[..., None], out=slope)
            np.multiply(slope, wide, out=slope)
            np.multiply(slope, scale, out=slope)
            self._round(slope, target)

    # --- loss

    def _cross_entropy(self, logits_: Array, targets: Array, losses: Array, scale: float, gradient: bool) -> None:
        if not _narrow(logits_):
            super()._cross_entropy(logits_, targets, losses, scale, gradient)
            return
        for rows in self._tiles(targets.size, min(2048, max(1, BLOCK // logits_.shape[1]))):
            (wide,) = self._widened(logits_[rows])
            super()._cross_entropy(wide, targets[rows], losses[rows], scale, gradient)
            if gradient:
                self._round(wide, logits_[rows])
