"""CuPy's version of each operation: kernels of our own, and cuBLAS for matrix products."""

from __future__ import annotations

from typing import Any

from mpishard.array.backend import Draw
from mpishard.array.cupy_blas import Blas
from mpishard.array.cupy_launch import blocks_of
from mpishard.array.cupy_shards import CupyShardOps
from mpishard.array.cupy_strides import AXES, elements, joined, padded
from mpishard.array.dtypes import Array
from mpishard.array.kernels import BLOCK
from mpishard.errors import ShapeError

__all__ = ["CupyOps", "parts_of"]

_WARPS = BLOCK // 32
_PART_BLOCKS = 1024  # blocks that sums over rows are split into, on any GPU: the order of a sum must not depend on it
_PART_ROWS = 32  # rows of a part, at least
_MASK = 2**64 - 1


def parts_of(rows: int, width: int) -> tuple[int, int]:
    """Return (parts, rows of a part) for sums over the rows of (rows, width): the shape alone decides."""
    most = min(max(1, _PART_BLOCKS // blocks_of(width)), -(-rows // _PART_ROWS))
    rows_per_part = -(-rows // most)
    return -(-rows // rows_per_part), rows_per_part


class CupyOps(CupyShardOps):
    """The operations on arrays of one GPU. One object serves one stream, and one thread at a time.

    Beside what the public operations check, arrays are contiguous, but in: ``copy``, ``fill``, ``add``, ``multiply``
    and ``row_dot`` (any strides), ``matmul`` (one of the last two axes contiguous; the CPU takes any), and the leading
    axes of ``causal_softmax`` and ``softmax_backward``. Tokens and targets that there are not give NaN instead of an
    error, which would need a wait.

    Raises, from every operation:
        ShapeError: element types without a kernel, or strides that the operation does not take.
    """

    # --- matrices

    def _matmul(self, a: Array, b: Array, out: Array, add: bool) -> None:
        if not out.size:
            return
        if not a.shape[-1]:
            if not add:
                self._fill(out, 0.0)
            return
        self.gpu.use()
        with self.stream:
            if self._blas is None:
                self._blas = Blas(self.gpu)
            self._blas.matmul(a, b, out, add, self.counters)

    def _column_sum(self, x: Array, out: Array, add: bool) -> None:
        rows, width = x.shape
        if not width:
            return
        if not rows:
            if not add:
                self._fill(out, 0.0)
            return
        kind, wide = x.dtype, self._wide("column_sum", x)
        parts, rows_per_part = parts_of(rows, width)
        if parts == 1 and out.dtype == wide:
            # A row is a block; nothing is left to combine.
            values = (x, x, out, width, rows, -1, add, 1)
            self._launch("ordered_sum", kind, kind, self._grid(width), *values, operation="column_sum")
            return
        if parts == 1 and width * wide.itemsize > self._scratch.nbytes and x.flags.c_contiguous:
            self._sum_strips(x, out, wide.itemsize, add)
            return
        self._sum_parts(x, out, parts, rows_per_part, add)

    def _sum_strips(self, x: Any, out: Any, wide: int, add: bool) -> None:
        """Sum rows whose sums do not fit the scratch and are to be rounded once: columns are copied together first."""
        rows, width = x.shape
        strip = max(1, self._scratch.nbytes // (rows * x.itemsize + wide) // BLOCK) * BLOCK
        for start in range(0, width, strip):
            columns = slice(start, min(start + strip, width))
            size = columns.stop - start
            part = self._temp(strip * wide, rows * size, x.dtype).reshape(rows, size)
            self._copy(x[:, columns], part)
            self._sum_parts(part, out[columns], 1, rows, add)

    def _sum_parts(self, x: Any, out: Array, parts: int, rows_per_part: int, add: bool) -> None:
        (rows, width), kinds, operation = x.shape, (x.dtype, out.dtype), "column_sum"
        sums = self._temp(0, parts * width, self._wide(operation, x))
        values = (x, sums, rows, width, rows_per_part)
        self._launch("column_sum_parts", *kinds, parts * blocks_of(width), *values, operation=operation)
        self._launch("combine_parts", *kinds, self._grid(width), sums, out, width, parts, add, operation=operation)

    def _row_dot(self, x: Array, y: Array, out: Array) -> None:
        if out.size:
            grid = -(-out.size // _WARPS)
            steps = (*elements(x), *elements(y), *elements(out))
            self._launch("row_dot", x.dtype, x.dtype, grid, x, y, out, *x.shape, *steps, strided=True)

    # --- elementwise

    def _add(self, x: Array, y: Array, out: Array) -> None:
        if not out.size:
            return
        if x.flags.c_contiguous and y.flags.c_contiguous and out.flags.c_contiguous:
            self._launch("add", x.dtype, x.dtype, self._grid(x.size), x, y, out, x.size, y.size, strided=True)
            return
        places = self._places(x, y, out)
        if places:
            kind, values = x.dtype, (x, y, out, *places)
            self._launch("add_strided", kind, kind, self._grid(x.size), *values, strided=True, operation="add")
            return
        for i in range(x.shape[0]):
            self._add(x[i], y[i] if y.ndim == x.ndim else y, out[i])

    def _multiply(self, x: Array, y: Array, out: Array, add: bool) -> None:
        if not out.size:
            return
        if x.flags.c_contiguous and y.flags.c_contiguous and out.flags.c_contiguous:
            kinds, sizes = (x.dtype, out.dtype), (x.size, y.size)
            self._launch("multiply", *kinds, self._grid(x.size), x, y, out, *sizes, add, strided=True)
            return
        places = self._places(x, y, out)
        if places:
            kinds, values = (x.dtype, out.dtype), (x, y, out, *places, add)
            self._launch("multiply_strided", *kinds, self._grid(x.size), *values, strided=True, operation="multiply")
            return
        for i in range(x.shape[0]):
            self._multiply(x[i], y[i] if y.ndim == x.ndim else y, out[i], add)

    @staticmethod
    def _places(x: Array, y: Array, out: Array) -> tuple[int, ...]:
        """Return the sizes and strides that the strided kernels take; () where there are too many axes."""
        repeated = (0,) * (x.ndim - y.ndim) + elements(y)
        shape, *steps = joined(x.shape, elements(x), repeated, elements(out))
        if len(shape) > AXES:
            return ()
        return (*padded(shape, 1), *(step for view in steps for step in padded(view, 0)))

    def _gelu(self, x: Array, y: Array, tanh: bool) -> None:
        if x.size:
            self._launch("gelu", x.dtype, x.dtype, self._grid(x.size), x, y, x.size, tanh, strided=True)

    def _gelu_backward(self, x: Array, dy: Array, dx: Array, tanh: bool) -> None:
        if x.size:
            self._launch("gelu_backward", x.dtype, x.dtype, self._grid(x.size), x, dy, dx, x.size, tanh, strided=True)

    def _dropout(self, x: Array, y: Array, rate: float, draw: Draw) -> None:
        if not x.size:
            return
        grid = self._grid(-(-x.size // 8) + 1)  # a thread takes eight numbers
        counter = (draw.seed & _MASK, draw.stream & _MASK, draw.step & _MASK, draw.first)
        self._launch("dropout", x.dtype, x.dtype, grid, x, y, x.size, rate, 1.0 / (1.0 - rate), *counter, strided=True)

    # --- layer norm

    def _layernorm(self, x: Array, weight: Array, bias: Array, y: Array, mean: Array, rstd: Array, eps: float) -> None:
        rows, width = x.shape
        if x.size:
            self._launch("layernorm", x.dtype, x.dtype, rows, x, weight, bias, y, mean, rstd, rows, width, eps)

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
        gradients = [(g, add) for g, add in ((dweight, add_weight), (dbias, add_bias)) if g is not None]
        if not x.size:
            for gradient, add in gradients:
                if not add:
                    self._fill(gradient, 0.0)
            return
        operation = "layernorm_backward"
        kind, wide = x.dtype, self._wide(operation, x)
        if gradients:
            # Before dx is written, which may be dy.
            parts, rows_per_part = parts_of(rows, width)
            weights = self._temp(0, parts * width, wide)
            biases = self._temp(parts * width * wide.itemsize, parts * width, wide)
            grid = parts * blocks_of(width)
            inputs = (x, mean, rstd, dy, weights, biases, rows, width, rows_per_part)
            self._launch("layernorm_backward_params", kind, kind, grid, *inputs, operation=operation)
            for target, sums, add in ((dweight, weights, add_weight), (dbias, biases, add_bias)):
                if target is not None:
                    sizes, kinds = (width, parts, add), (kind, target.dtype)
                    self._launch("combine_parts", *kinds, self._grid(width), sums, target, *sizes, operation=operation)
        values = (x, weight, mean, rstd, dy, dx, rows, width)
        self._launch("layernorm_backward_input", kind, kind, rows, *values, operation=operation)

    # --- embedding

    def _embedding(self, table: Array, tokens: Array, out: Array) -> None:
        if out.size:
            vocabulary, width = table.shape
            self._launch(
                "embedding", table.dtype, table.dtype, tokens.size, table, tokens, out, tokens.size, width, vocabulary
            )

    def _embedding_backward(self, tokens: Array, dy: Array, dtable: Array, add: bool) -> None:
        if not add:
            self._fill(dtable, 0.0)
        if dy.size:
            vocabulary, width = dtable.shape
            sizes = (tokens.size, width, vocabulary)
            self._launch("embedding_backward", dy.dtype, dtable.dtype, tokens.size, tokens, dy, dtable, *sizes)

    # --- attention

    def _causal_softmax(self, scores_: Array, lse: Array, first_row: int, scale: float, replay: bool) -> None:
        heads, rows, keys = scores_.shape
        if not scores_.size:
            return
        steps = (*self._leading("causal_softmax", scores_), *elements(lse))
        kind, sizes = scores_.dtype, (heads, rows, keys, first_row)
        self._launch(
            "causal_softmax", kind, kind, heads * rows, scores_, lse, *sizes, scale, replay, *steps, strided=True
        )

    def _softmax_backward(self, p: Array, dp_: Array, delta: Array, scale: float) -> None:
        heads, rows, keys = p.shape
        if not p.size:
            return
        name = "softmax_backward"
        steps = (*self._leading(name, p), *self._leading(name, dp_), *elements(delta))
        self._launch(
            name, p.dtype, p.dtype, heads * rows, p, dp_, delta, heads, rows, keys, scale, *steps, strided=True
        )

    @staticmethod
    def _leading(name: str, x: Array) -> tuple[int, ...]:
        """Return x's strides but the last, which is 1."""
        *leading, last = elements(x)
        if last != 1 and x.shape[-1] > 1:
            raise ShapeError(
                f"{name} was given {x.shape} with strides {x.strides}; on a GPU the last axis is contiguous: copy it "
                "first"
            )
        return tuple(leading)

    # --- loss

    def _cross_entropy(self, logits_: Array, targets: Array, losses: Array, scale: float, gradient: bool) -> None:
        rows, vocabulary = logits_.shape
        if rows:
            arrays, kind = (logits_, targets, losses), logits_.dtype
            self._launch("cross_entropy", kind, kind, rows, *arrays, rows, vocabulary, scale, gradient)
