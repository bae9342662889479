"""Token and position embedding, with dropout: y[b, t] = wte[token[b, t]] + wpe[t]."""

from __future__ import annotations

from mpishard.array.dtypes import Array
from mpishard.array.ops import Ops
from mpishard.nn.activation import Dropout
from mpishard.nn.layer import Context, Grads, Layer, Params, ParamSpec, Saved

__all__ = ["Embedding"]


class Embedding(Layer):
    """Tokens (B, T) int64 -> y (B, T, C); parameters ``wte.weight`` (V, C), ``wpe.weight`` (P, C), T <= P.

    Gradients of either table may have the accumulator's type; of 16 bits, a row is rounded once in a call.
    """

    def __init__(self, vocabulary: int, positions: int, width: int, *, dropout: float = 0.0, std: float = 0.02) -> None:
        self.vocabulary, self.positions, self.width, self.std = vocabulary, positions, width, std
        self.dropout = Dropout("drop", dropout)

    def param_specs(self) -> tuple[ParamSpec, ...]:
        """Both are matrices and decay."""
        return (
            ParamSpec("wte.weight", (self.vocabulary, self.width), std=self.std, decay=True),
            ParamSpec("wpe.weight", (self.positions, self.width), std=self.std / 2, decay=True),
        )

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """(B, T) -> (B, T, C)."""
        return (*shape, self.width)

    def forward(self, ops: Ops, ctx: Context, params: Params, x: Array, y: Array) -> Saved:
        """Saves the tokens themselves."""
        ops.embedding(params["wte.weight"], x.reshape(-1), y.reshape(-1, self.width))
        ops.add(y, params["wpe.weight"][: x.shape[1]], y)
        if self.dropout.active(ctx):
            self.dropout.forward(ops, ctx, params, y, y)
        return x

    def backward(
        self, ops: Ops, ctx: Context, params: Params, grads: Grads, saved: Saved, dy: Array, dx: Array | None
    ) -> None:
        """Reads no parameter: rows of dy go to their tokens, and summed over sequences to their positions."""
        tokens = saved
        batch, length = tokens.shape
        with ctx.frame():
            if self.dropout.active(ctx):
                dropped = ctx.scratch(dy.shape)
                self.dropout.backward(ops, ctx, params, grads, None, dy, dropped)
                dy = dropped
            if (token := grads["wte.weight"]) is not None:
                ops.embedding_backward(tokens.reshape(-1), dy.reshape(-1, self.width), *token)
            if (position := grads["wpe.weight"]) is not None:
                dwpe, add = position
                used = dwpe[:length].reshape(-1)
                ops.column_sum(dy.reshape(batch, -1), used, add)
                if not add:
                    ops.fill(dwpe[length:], 0.0)
