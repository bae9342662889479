"""NumPy's operations on float32 and float64: the reference of the other element types and backends."""

from __future__ import annotations

import math

import numpy as np

from mpishard.array import random
from mpishard.array.constants import IGNORE
from mpishard.array.dtypes import DTYPES, Array
from mpishard.array.erf import erf
from mpishard.array.numpy_shards import NumpyShardOps
from mpishard.array.numpy_tiles import SCRATCH, TILE
from mpishard.array.ops import Draw
from mpishard.errors import DataError, ShapeError

__all__ = ["NumpyFloatOps", "check_numbers"]

_BFLOAT16, _FLOAT16 = DTYPES["bfloat16"], DTYPES["float16"]
_GELU = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715
#: bytes of a flat array that are copied at a time
_PART = 1 << 19


class NumpyFloatOps(NumpyShardOps):
    """The operations that layers use, on arrays of one type, float32 or float64 (copy: of any two)."""

    # --- memory

    def _copy(self, x: Array, out: Array) -> None:
        if x.dtype == _FLOAT16 and out.flags.c_contiguous:
            self._widen(x, out)
        elif out.dtype == _FLOAT16:
            with np.errstate(all="ignore"):  # NumPy warns of what becomes infinite
                if x.dtype == _BFLOAT16:  # of no kind to NumPy, but cast by way of float32 all the same
                    np.copyto(out, x, casting="unsafe")
                else:
                    self._round(x, out)
        elif x.ndim == 1 and x.dtype == out.dtype:
            # Longer copies pass the caches by, and are slower for it where what is copied is read next.
            for part in self._tiles(x.size, _PART // x.itemsize):
                np.copyto(out[part], x[part])
        else:
            floating = out.dtype.kind == "f" and x.dtype == _BFLOAT16
            np.copyto(out, x, casting="unsafe" if floating else "same_kind")

    def _fill(self, out: Array, value: float) -> None:
        with np.errstate(all="ignore"):
            out.fill(value)

    # --- matrices

    def _matmul(self, a: Array, b: Array, out: Array, add: bool) -> None:
        # BLAS kernels may compute on what lies beside a matrix of odd size and set floating-point flags there.
        with np.errstate(all="ignore"):
            self._product(a, b, out, add)

    def _product(self, a: Array, b: Array, out: Array, add: bool) -> None:
        if not add:
            np.matmul(a, b, out=out)
            return
        room = SCRATCH // out.dtype.itemsize
        per_row = out.size // max(1, out.shape[-2])
        if per_row > room:
            if out.ndim == 2:
                raise ShapeError(f"a row of {per_row} elements is longer than the CPU backend's tiles allow")
            for i in range(out.shape[0]):
                self._product(a[i], b[i], out[i], add)
            return
        # NumPy has no beta: the product of a block of rows goes through scratch and is added.
        for rows in self._tiles(out.shape[-2], max(1, room // max(1, per_row))):
            target = out[..., rows, :]
            (flat,) = self._temps(target.size, out.dtype, 1)
            product = flat.reshape(target.shape)
            np.matmul(a[..., rows, :], b, out=product)
            np.add(target, product, out=target)

    def _column_sum(self, x: Array, out: Array, add: bool) -> None:
        if not add:
            np.add.reduce(x, axis=0, out=out)
            return
        for columns in self._tiles(out.size):
            (total,) = self._temps(columns.stop - columns.start, out.dtype, 1)
            np.add.reduce(x[:, columns], axis=0, out=total)
            np.add(out[columns], total, out=out[columns])

    def _row_dot(self, x: Array, y: Array, out: Array) -> None:
        rows, heads, size = x.shape
        for tile in self._tiles(rows, max(1, TILE // max(1, heads * size))):
            part = x[tile]
            (flat,) = self._temps(part.size, x.dtype, 1)
            product = flat.reshape(part.shape)
            np.multiply(part, y[tile], out=product)
            np.add.reduce(product, axis=-1, out=out[tile])

    # --- elementwise

    def _add(self, x: Array, y: Array, out: Array) -> None:
        np.add(x, y, out=out)

    def _multiply(self, x: Array, y: Array, out: Array, add: bool) -> None:
        if not add:
            np.multiply(x, y, out=out)
        elif x.size <= TILE:
            (flat,) = self._temps(x.size, out.dtype, 1)
            product = flat.reshape(x.shape)
            np.multiply(x, y, out=product)
            np.add(out, product, out=out)
        else:
            rows = max(1, TILE * x.shape[0] // x.size)
            for part in self._tiles(x.shape[0], rows):
                here: slice | int = part if rows > 1 or x.ndim == 1 else part.start
                self._multiply(x[here], y[here] if y.ndim == x.ndim else y, out[here], add)

    def _gelu(self, x: Array, y: Array, tanh: bool) -> None:
        x, y = x.reshape(-1), y.reshape(-1)
        for tile in self._tiles(x.size):
            u = x[tile]
            (t,) = self._temps(u.size, x.dtype, 1)
            if tanh:
                self._gelu_tanh(u, t)
            else:
                self._erf(u, t)
            np.add(t, 1.0, out=t)
            np.multiply(t, u, out=t)
            np.multiply(t, 0.5, out=y[tile])

    @staticmethod
    def _gelu_tanh(u: Array, t: Array) -> None:
        """``t = tanh(sqrt(2 / pi) * (u + 0.044715 u**3))``."""
        np.multiply(u, u, out=t)
        np.multiply(t, _CUBIC, out=t)
        np.add(t, 1.0, out=t)
        np.multiply(t, u, out=t)
        np.multiply(t, _GELU, out=t)
        np.tanh(t, out=t)

    def _erf(self, u: Array, t: Array) -> None:
        """``t = erf(u / sqrt(2))``, in pieces: erf works in temporaries of its own."""
        for piece in self._tiles(u.size, 512):
            t[piece] = erf(u[piece] * math.sqrt(0.5))

    def _gelu_backward(self, x: Array, dy: Array, dx: Array, tanh: bool) -> None:
        x, dy, dx = x.reshape(-1), dy.reshape(-1), dx.reshape(-1)
        for tile in self._tiles(x.size):
            u = x[tile]
            t, s, w = self._temps(u.size, x.dtype, 3)
            np.multiply(u, u, out=s)
            if tanh:
                # gelu' = (1 + t) / 2 * (1 + u (1 - t) c (1 + 3 * 0.044715 u**2)), t the tanh, c = sqrt(2 / pi)
                self._gelu_tanh(u, t)
                np.multiply(s, 3.0 * _CUBIC, out=s)
                np.add(s, 1.0, out=s)
                np.multiply(s, _GELU, out=s)
                np.multiply(s, u, out=s)
                np.subtract(1.0, t, out=w)
                np.multiply(s, w, out=s)
                np.add(s, 1.0, out=s)
                np.add(t, 1.0, out=t)
                np.multiply(s, t, out=s)
                np.multiply(s, 0.5, out=s)
            else:
                # gelu' = Phi(u) + u phi(u)
                np.multiply(s, -0.5, out=s)
                np.exp(s, out=s)
                np.multiply(s, u, out=s)
                np.multiply(s, 1.0 / math.sqrt(2.0 * math.pi), out=s)
                self._erf(u, t)
                np.add(t, 1.0, out=t)
                np.multiply(t, 0.5, out=t)
                np.add(s, t, out=s)
            np.multiply(s, dy[tile], out=dx[tile])

    def _dropout(self, x: Array, y: Array, rate: float, draw: Draw) -> None:
        x, y = x.reshape(-1), y.reshape(-1)
        size = TILE // 2
        for tile in self._tiles(x.size, size):
            (u,) = self._temps(tile.stop - tile.start, np.dtype(np.float32), 1)
            random.uniform32(draw._replace(first=draw.first + tile.start), u)
            keep = np.greater_equal(u, rate)
            np.multiply(x[tile], 1.0 / (1.0 - rate), out=y[tile])
            np.multiply(y[tile], keep, out=y[tile])

    # --- layer norm

    def _layernorm(
        self, x: Array, weight: Array, bias: Array, y: Array, mean: Array, rstd: Array, eps: float
    ) -> None:
        rows, width = x.shape
        for tile in self._tiles(rows, max(1, TILE // width)):
            part, m, r, out = x[tile], mean[tile], rstd[tile], y[tile]
            flat, flat2 = self._temps(part.size, x.dtype, 2)
            t, squares = flat.reshape(part.shape), flat2.reshape(part.shape)
            np.add.reduce(part, axis=1, out=m)
            np.divide(m, width, out=m)
            np.subtract(part, m[:, None], out=t)
            np.multiply(t, t, out=squares)
            np.add.reduce(squares, axis=1, out=r)
            np.divide(r, width, out=r)
            np.add(r, eps, out=r)
            np.sqrt(r, out=r)
            np.divide(1.0, r, out=r)
            np.multiply(t, r[:, None], out=t)
            np.multiply(t, weight, out=t)
            np.add(t, bias, out=out)

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
        rows, width = x.shape
        if dweight is not None and not add_weight:
            dweight.fill(0.0)
        if dbias is not None and not add_bias:
            dbias.fill(0.0)
        for tile in self._tiles(rows, max(1, TILE // width)):
            part, r, d = x[tile], rstd[tile][:, None], dy[tile]
            flats = self._temps(part.size, x.dtype, 3)
            xhat, g, t = (flat.reshape(part.shape) for flat in flats)
            np.subtract(part, mean[tile][:, None], out=xhat)
            np.multiply(xhat, r, out=xhat)
            if dbias is not None:
                np.add(dbias, np.add.reduce(d, axis=0), out=dbias)
            if dweight is not None:
                np.multiply(d, xhat, out=t)
                np.add(dweight, np.add.reduce(t, axis=0), out=dweight)
            # dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), g = dy * weight
            np.multiply(d, weight, out=g)
            np.multiply(g, xhat, out=t)
            along = np.add.reduce(t, axis=1, keepdims=True)
            along /= width
            np.multiply(xhat, along, out=xhat)
            center = np.add.reduce(g, axis=1, keepdims=True)
            center /= width
            np.subtract(g, center, out=g)
            np.subtract(g, xhat, out=g)
            np.multiply(g, r, out=dx[tile])

    # --- embedding

    def _embedding(self, table: Array, tokens: Array, out: Array) -> None:
        check_numbers("token", tokens, table.shape[0])
        # mode="clip": with the default mode NumPy copies `out` aside.
        np.take(table, tokens, axis=0, out=out, mode="clip")

    def _embedding_backward(self, tokens: Array, dy: Array, dtable: Array, add: bool) -> None:
        check_numbers("token", tokens, dtable.shape[0])
        if not add:
            dtable.fill(0.0)
        for rows in self._tiles(tokens.size, 1024):
            for row, token in zip(dy[rows], tokens[rows].tolist(), strict=True):
                target = dtable[token]
                np.add(target, row, out=target)

    # --- attention

    def _causal_softmax(self, scores_: Array, lse: Array, first_row: int, scale: float, replay: bool) -> None:
        rows = scores_.shape[1]
        # Whether row r sees key first_row + k depends on k - r alone: one line of 2 R answers serves all R x R.
        (line,) = self._temps(2 * rows, np.dtype(np.bool_), 1)
        line[: rows + 1], line[rows + 1 :] = False, True
        hidden: Array = np.ndarray((rows, rows), np.bool_, line, rows, (-1, 1))
        np.multiply(scores_, scale, out=scores_)
        np.copyto(scores_[:, :, first_row:], -np.inf, where=hidden)
        if not replay:
            np.maximum.reduce(scores_, axis=-1, out=lse)
        np.subtract(scores_, lse[:, :, None], out=scores_)
        np.exp(scores_, out=scores_)
        if not replay:
            total = np.add.reduce(scores_, axis=-1)
            np.divide(scores_, total[:, :, None], out=scores_)
            np.log(total, out=total)
            np.add(lse, total, out=lse)

    def _softmax_backward(self, p: Array, dp_: Array, delta: Array, scale: float) -> None:
        np.subtract(dp_, delta[:, :, None], out=dp_)
        np.multiply(dp_, p, out=dp_)
        np.multiply(dp_, scale, out=dp_)

    # --- loss

    def _cross_entropy(self, logits_: Array, targets: Array, losses: Array, scale: float, gradient: bool) -> None:
        for rows in self._tiles(targets.size, 2048):
            z, target = logits_[rows], targets[rows]
            ignored = target == IGNORE
            index = np.where(ignored, 0, target)
            check_numbers("target", index, z.shape[1], f", or {IGNORE} where there is none")
            row = np.arange(index.size)
            top = np.maximum.reduce(z, axis=1)
            np.subtract(z, top[:, None], out=z)
            chosen = z[row, index]
            np.exp(z, out=z)
            total = np.add.reduce(z, axis=1)
            losses[rows] = np.where(ignored, 0.0, np.log(total) - chosen)
            if gradient:
                factor = np.where(ignored, 0.0, scale).astype(z.dtype)
                np.multiply(z, (factor / total)[:, None], out=z)
                z[row, index] -= factor

    def _sum64(self, x: Array, out: Array) -> None:
        total = 0.0
        for tile in self._tiles(x.size):
            (wide,) = self._temps(tile.stop - tile.start, np.dtype(np.float64), 1)
            np.copyto(wide, x[tile])
            total += float(np.add.reduce(wide))
        out[0] = total


def check_numbers(name: str, numbers: Array, count: int, besides: str = "") -> None:
    """Refuse what is no index of ``count`` rows: NumPy would count negative ones from the end."""
    if numbers.size:
        for number in (int(numbers.min()), int(numbers.max())):
            if not 0 <= number < count:
                raise DataError(
                    f"the data hold the {name} {number}; the model takes 0 to {count - 1}{besides}; "
                    "mend the data, or make a model for them"
                )
