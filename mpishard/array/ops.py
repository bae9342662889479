"""The operations that layers, optimiser and communication speak, defined once for every kind of array.

Each public method checks shapes, notes its cost and calls the backend's method of the same name with an
underscore. Backends: :class:`~mpishard.array.numpy_ops.NumpyOps` (the CPU and the reference) and
:class:`~mpishard.array.shape_ops.ShapeOps` (arrays without memory; the memory plan).

[Note: operations write and never allocate]
Results go to arrays that the caller gives. What a backend needs beside them is its own fixed scratch
(``own_bytes``), so a plan made on shapes knows every byte. Names that end in ``_`` are overwritten.

Shape legend: N rows (tokens), C features, B sequences, T positions, H heads, R query rows, K keys, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from mpishard.array.backend import AdamWStep, Backend, Draw
from mpishard.array.constants import CHUNK, EXACT_WORDS
from mpishard.array.dtypes import Array
from mpishard.errors import ShapeError

__all__ = ["AdamWStep", "Draw", "Ops"]


def _misfit(operation: str, expected: str, **arrays: Array | None) -> NoReturn:
    """Raise a ShapeError that names the operation, its shapes and what it takes."""
    found = ", ".join(f"{name} {None if a is None else a.shape}" for name, a in arrays.items())
    raise ShapeError(f"{operation} was given {found}; it takes {expected}")


def _contiguous(*arrays: Array) -> bool:
    """Whether all can be worked on as flat views; a reshape of any other would be a copy, and what is written, lost."""
    return all(array.flags.c_contiguous for array in arrays)


class Ops(Backend):
    """One backend's operations. See the module's notes."""

    @property
    def room(self) -> int:
        """Bytes that :meth:`empty` could give in all, as far as the backend knows."""
        return 1 << 62

    def _note(self, operation: str, flops: float, nbytes: float) -> None:
        """Record a cost; backends that compute do not."""

    # --- memory

    def copy(self, x: Array, out: Array) -> None:
        """``out = x``, cast to out's type; shapes equal."""
        if x.shape != out.shape:
            _misfit("copy", "equal shapes", x=x, out=out)
        self._note("copy", 0, x.nbytes + out.nbytes)
        self._copy(x, out)

    def fill(self, out: Array, value: float) -> None:
        """``out = value`` everywhere."""
        self._note("fill", 0, out.nbytes)
        self._fill(out, value)

    # --- matrices

    def matmul(self, a: Array, b: Array, out: Array, add: bool = False) -> None:
        """``out (+)= a @ b`` over the last two axes; leading axes equal. Views with swapped axes are fine."""
        if (
            a.ndim < 2
            or not a.ndim == b.ndim == out.ndim
            or a.shape[-1] != b.shape[-2]
            or out.shape[-2] != a.shape[-2]
            or out.shape[-1] != b.shape[-1]
            or a.shape[:-2] != b.shape[:-2]
            or a.shape[:-2] != out.shape[:-2]
        ):
            _misfit("matmul", "a (..., N, K), b (..., K, M), out (..., N, M)", a=a, b=b, out=out)
        self._note("matmul", 2.0 * out.size * a.shape[-1], a.nbytes + b.nbytes + out.nbytes * (1 + add))
        self._matmul(a, b, out, add)

    def linear(self, x: Array, weight: Array, bias: Array | None, y: Array) -> None:
        """``y = x @ weight + bias``: x (N, I), weight (I, O), bias (O,) or None, y (N, O)."""
        self.matmul(x, weight, y)
        if bias is not None:
            self.add(y, bias, y)

    def column_sum(self, x: Array, out: Array, add: bool = False) -> None:
        """``out (+)= x.sum(axis=0)``: x (N, C), out (C,)."""
        if x.ndim != 2 or out.shape != x.shape[1:]:
            _misfit("column_sum", "x (N, C), out (C,)", x=x, out=out)
        self._note("column_sum", x.size, x.nbytes + out.nbytes)
        self._column_sum(x, out, add)

    def row_dot(self, x: Array, y: Array, out: Array) -> None:
        """``out = (x * y).sum(axis=-1)``: x and y (N, H, D), strided or not, out (N, H)."""
        if x.shape != y.shape or x.ndim != 3 or out.shape != x.shape[:-1]:
            _misfit("row_dot", "x and y (N, H, D), out (N, H)", x=x, y=y, out=out)
        self._note("row_dot", 2.0 * x.size, x.nbytes + y.nbytes + out.nbytes)
        self._row_dot(x, y, out)

    # --- elementwise

    def add(self, x: Array, y: Array, out: Array) -> None:
        """``out = x + y``; y may lack leading axes (it is repeated along them); out may be x."""
        if out.shape != x.shape or y.shape != x.shape[x.ndim - y.ndim :]:
            _misfit("add", "x and out of one shape, y equal to its last axes", x=x, y=y, out=out)
        self._note("add", x.size, x.nbytes + y.nbytes + out.nbytes)
        self._add(x, y, out)

    def multiply(self, x: Array, y: Array, out: Array, add: bool = False) -> None:
        """``out (+)= x * y``; y may lack leading axes (it is repeated along them); out may be x."""
        if out.shape != x.shape or y.shape != x.shape[x.ndim - y.ndim :]:
            _misfit("multiply", "x and out of one shape, y equal to its last axes", x=x, y=y, out=out)
        self._note("multiply", x.size * (1 + add), x.nbytes + y.nbytes + out.nbytes * (1 + add))
        self._multiply(x, y, out, add)

    def gelu(self, x: Array, y: Array, tanh: bool = True) -> None:
        """GELU (Hendrycks & Gimpel 2016, section 2): the tanh form, or with the error function."""
        if x.shape != y.shape or not _contiguous(x, y):
            _misfit("gelu", "equal shapes, contiguous", x=x, y=y)
        self._note("gelu", 10.0 * x.size, x.nbytes + y.nbytes)
        self._gelu(x, y, tanh)

    def gelu_backward(self, x: Array, dy: Array, dx: Array, tanh: bool = True) -> None:
        """``dx = dy * gelu'(x)``; dx may be dy."""
        if x.shape != dy.shape or x.shape != dx.shape or not _contiguous(x, dy, dx):
            _misfit("gelu_backward", "equal shapes, contiguous", x=x, dy=dy, dx=dx)
        self._note("gelu_backward", 16.0 * x.size, x.nbytes + dy.nbytes + dx.nbytes)
        self._gelu_backward(x, dy, dx, tanh)

    def dropout(self, x: Array, y: Array, rate: float, draw: Draw) -> None:
        """``y = x * keep / (1 - rate)``, keep drawn by counter (Srivastava et al. 2014); y may be x.

        Forward and backward are the same call: the mask is drawn again, not stored.
        """
        if x.shape != y.shape or not 0.0 <= rate < 1.0 or not _contiguous(x, y):
            _misfit("dropout", "equal shapes, contiguous, and 0 <= rate < 1", x=x, y=y)
        self._note("dropout", 3.0 * x.size, x.nbytes + y.nbytes)
        self._dropout(x, y, rate, draw)

    # --- layer norm

    def layernorm(self, x: Array, weight: Array, bias: Array, y: Array, mean: Array, rstd: Array, eps: float) -> None:
        """Layer normalisation (Ba et al. 2016, section 3.1): x, y (N, C); weight, bias (C,); mean, rstd (N,)."""
        if x.ndim != 2 or y.shape != x.shape or not weight.shape == bias.shape == x.shape[1:]:
            _misfit("layernorm", "x, y (N, C), weight, bias (C,)", x=x, weight=weight, bias=bias, y=y)
        if not mean.shape == rstd.shape == x.shape[:1]:
            _misfit("layernorm", "mean, rstd (N,)", x=x, mean=mean, rstd=rstd)
        self._note("layernorm", 8.0 * x.size, x.nbytes + y.nbytes)
        self._layernorm(x, weight, bias, y, mean, rstd, eps)

    def layernorm_backward(
        self,
        x: Array,
        weight: Array,
        mean: Array,
        rstd: Array,
        dy: Array,
        dx: Array,
        dweight: Array | None,
        dbias: Array | None,
        add_weight: bool = False,
        add_bias: bool = False,
    ) -> None:
        """Write dx (N, C); write or add dweight and dbias (C,) unless they are None. dx may be dy."""
        if x.ndim != 2 or dy.shape != x.shape or dx.shape != x.shape or weight.shape != x.shape[1:]:
            _misfit("layernorm_backward", "x, dy, dx (N, C), weight (C,)", x=x, weight=weight, dy=dy, dx=dx)
        for gradient in (dweight, dbias):
            if gradient is not None and gradient.shape != weight.shape:
                _misfit("layernorm_backward", "dweight, dbias (C,)", dweight=dweight, dbias=dbias)
        self._note("layernorm_backward", 14.0 * x.size, x.nbytes + dy.nbytes + dx.nbytes)
        self._layernorm_backward(x, weight, mean, rstd, dy, dx, dweight, dbias, add_weight, add_bias)

    # --- embedding

    def embedding(self, table: Array, tokens: Array, out: Array) -> None:
        """``out[n] = table[tokens[n]]``: table (V, C), tokens (N,) int64 in [0, V), out (N, C).

        Here and below, the CPU backend raises DataError for tokens and targets that are outside.
        """
        if table.ndim != 2 or tokens.ndim != 1 or out.shape != (tokens.size, table.shape[1]):
            _misfit("embedding", "table (V, C), tokens (N,), out (N, C)", table=table, tokens=tokens, out=out)
        self._note("embedding", 0, 2 * out.nbytes)
        self._embedding(table, tokens, out)

    def embedding_backward(self, tokens: Array, dy: Array, dtable: Array, add: bool = False) -> None:
        """``dtable[tokens[n]] += dy[n]`` in the order of n, into zeros unless ``add``."""
        if dtable.ndim != 2 or tokens.ndim != 1 or dy.shape != (tokens.size, dtable.shape[1]):
            _misfit("embedding_backward", "tokens (N,), dy (N, C), dtable (V, C)", tokens=tokens, dy=dy, dtable=dtable)
        self._note("embedding_backward", dy.size, 3 * dy.nbytes + (0 if add else dtable.nbytes))
        self._embedding_backward(tokens, dy, dtable, add)

    # --- attention

    def causal_softmax(self, scores_: Array, lse: Array, first_row: int, scale: float, replay: bool = False) -> None:
        """Turn scores (H, R, K) into causal probabilities; query row r stands at position ``first_row + r``.

        ``K = first_row + R``; key k is seen by rows at positions >= k. ``lse`` (H, R) takes
        ``log(sum(exp(scale * scores)))``, or gives it back where ``replay`` (Dao et al. 2022, section 3.1).
        """
        if scores_.ndim != 3 or scores_.shape[2] != first_row + scores_.shape[1] or lse.shape != scores_.shape[:2]:
            _misfit("causal_softmax", "scores (H, R, first_row + R), lse (H, R)", scores=scores_, lse=lse)
        self._note("causal_softmax", 5.0 * scores_.size, 2 * scores_.nbytes)
        self._causal_softmax(scores_, lse, first_row, scale, replay)

    def softmax_backward(self, p: Array, dp_: Array, delta: Array, scale: float) -> None:
        """``dp = p * (dp - delta) * scale``: p, dp (H, R, K); delta (H, R) is ``(p * dp).sum(-1)``."""
        if p.ndim != 3 or p.shape != dp_.shape or delta.shape != p.shape[:2]:
            _misfit("softmax_backward", "p, dp (H, R, K), delta (H, R)", p=p, dp=dp_, delta=delta)
        self._note("softmax_backward", 3.0 * p.size, 3 * p.nbytes)
        self._softmax_backward(p, dp_, delta, scale)

    # --- loss

    def cross_entropy(self, logits_: Array, targets: Array, losses: Array, scale: float, gradient: bool) -> None:
        """``losses[n] = logsumexp(logits[n]) - logits[n, targets[n]]``, 0 where the target is IGNORE.

        logits (N, V) is overwritten: by ``scale * (softmax(logits) - onehot(targets))`` where ``gradient``,
        else by values that mean nothing. Stable for logits of any finite size.
        """
        if logits_.ndim != 2 or not targets.shape == losses.shape == logits_.shape[:1]:
            expected = "logits (N, V), targets, losses (N,)"
            _misfit("cross_entropy", expected, logits=logits_, targets=targets, losses=losses)
        self._note("cross_entropy", 5.0 * logits_.size, 2 * logits_.nbytes)
        self._cross_entropy(logits_, targets, losses, scale, gradient)

    def sum64(self, x: Array, out: Array) -> None:
        """``out[0] = x.sum()`` in fp64: x (N,), out (1,) float64."""
        if x.ndim != 1 or out.shape != (1,):
            _misfit("sum64", "x (N,), out (1,)", x=x, out=out)
        self._note("sum64", x.size, x.nbytes)
        self._sum64(x, out)

    # --- shards

    def ordered_sum(self, blocks: Sequence[Array], out: Array, add: bool, bracket: int = 1) -> None:
        """``out (+)= blocks[0] + blocks[1] + ...``, one after another in out's type; blocks and out (count,).

        With ``bracket`` k above 1, every k blocks are summed by themselves first, and these sums are the terms:
        ``out (+)= (b[0] + ... + b[k-1]) + (b[k] + ... + b[2k-1]) + ...``, in out's type throughout.
        """
        for block in blocks:
            if block.shape != out.shape or block.ndim != 1:
                _misfit("ordered_sum", "equal 1-D shapes", block=block, out=out)
        if bracket < 1 or len(blocks) % bracket:
            raise ShapeError(
                f"ordered_sum was given {len(blocks)} blocks and bracket {bracket}; it takes whole brackets of blocks"
            )
        self._note("ordered_sum", len(blocks) * out.size, sum(b.nbytes for b in blocks) + 2 * out.nbytes)
        self._ordered_sum(blocks, out, add, bracket)

    def square_sums(self, x: Array, holes: Sequence[tuple[int, int]], out: Array) -> None:
        """``out[i]`` = fp64 sum of squares of x's i-th CHUNK, leaving out what lies in ``holes``.

        x (n * CHUNK,), out (n,) float64, holes (start, stop) ranges in order.
        """
        if x.ndim != 1 or x.size != out.size * CHUNK or out.ndim != 1:
            _misfit("square_sums", f"x (n * {CHUNK},), out (n,)", x=x, out=out)
        self._note("square_sums", 2.0 * x.size, x.nbytes + out.nbytes)
        self._square_sums(x, holes, out)

    def adamw(
        self, param: Array, grad: Array, exp_avg: Array, exp_avg_sq: Array, step: AdamWStep, cast: Array | None = None
    ) -> None:
        """One AdamW update of flat arrays of one size, in place; elements outside the segments stay.

        ``cast`` is the parameters' copy in a narrower type, written along with them.
        """
        if param.ndim != 1 or not param.shape == grad.shape == exp_avg.shape == exp_avg_sq.shape:
            _misfit("adamw", "1-D arrays of one size", param=param, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
        if cast is not None and cast.shape != param.shape:
            _misfit("adamw", "1-D arrays of one size", param=param, cast=cast)
        self._note("adamw", 14.0 * param.size, 7 * param.nbytes + (cast.nbytes if cast is not None else 0))
        self._adamw(param, grad, exp_avg, exp_avg_sq, cast, step)

    def exact_sum(self, values: Array, out: Array) -> None:
        """Add values (n,) float64 to out (EXACT_WORDS,) int64 without rounding; :mod:`mpishard.shard.exact` reads it.

        Words 0 to 19 are 32-bit limbs of a sum in units of 2**-298, each a signed number that need not have been
        carried; word 20 counts values that are not finite, or 2**300 and more (Kulisch 1986, long accumulators).
        """
        if values.ndim != 1 or out.shape != (EXACT_WORDS,):
            _misfit("exact_sum", f"values (n,), out ({EXACT_WORDS},)", values=values, out=out)
        self._note("exact_sum", 2.0 * values.size, values.nbytes + out.nbytes)
        self._exact_sum(values, out)

    def normal(self, out: Array, draw: Draw, std: float) -> None:
        """Fill out (count,) with N(0, std**2) numbers of the stream (Box & Muller 1958), cast to out's type."""
        if out.ndim != 1:
            _misfit("normal", "out (count,)", out=out)
        self._note("normal", 20.0 * out.size, out.nbytes)
        self._normal(out, draw, std)

    def fingerprint(self, x: Array, draw: Draw) -> int:
        """Return a 64-bit sum over x's bits, each element weighted by its place; sums of parts add up mod 2**64."""
        if x.ndim != 1:
            _misfit("fingerprint", "x (count,)", x=x)
        return self._fingerprint(x, draw)
