"""Layers without parameters: GELU and dropout."""

from __future__ import annotations

from mpishard.array.dtypes import Array
from mpishard.array.ops import Ops
from mpishard.nn.layer import Context, Grads, Layer, Params, ParamSpec, Saved

__all__ = ["Dropout", "Gelu"]


class Gelu(Layer):
    """GELU (Hendrycks & Gimpel 2016): the tanh form of section 2, or exact with the error function."""

    def __init__(self, tanh: bool = True) -> None:
        self.tanh = tanh

    def param_specs(self) -> tuple[ParamSpec, ...]:
        """None."""
        return ()

    def forward(self, ops: Ops, ctx: Context, params: Params, x: Array, y: Array) -> Saved:
        """Saves x itself."""
        ops.gelu(x, y, self.tanh)
        return x

    def backward(
        self, ops: Ops, ctx: Context, params: Params, grads: Grads, saved: Saved, dy: Array, dx: Array | None
    ) -> None:
        """dx = dy * gelu'(x); dx may be dy."""
        if dx is not None:
            ops.gelu_backward(saved, dy, dx, self.tanh)


class Dropout(Layer):
    """Dropout whose mask is a function of (seed, step, stage, name, global token, feature): never stored."""

    def __init__(self, name: str, rate: float) -> None:
        self.name, self.rate = name, rate

    def active(self, ctx: Context) -> bool:
        """Whether anything is dropped now."""
        return ctx.training and self.rate > 0.0

    def param_specs(self) -> tuple[ParamSpec, ...]:
        """None."""
        return ()

    def forward(self, ops: Ops, ctx: Context, params: Params, x: Array, y: Array) -> Saved:
        """Saves nothing; y may be x."""
        if self.active(ctx):
            ops.dropout(x, y, self.rate, ctx.draw(self.name, x.shape[-1]))
        elif y is not x:
            ops.copy(x, y)

    def backward(
        self, ops: Ops, ctx: Context, params: Params, grads: Grads, saved: Saved, dy: Array, dx: Array | None
    ) -> None:
        """The same mask on dy."""
        if dx is not None:
            self.forward(ops, ctx, params, dy, dx)
