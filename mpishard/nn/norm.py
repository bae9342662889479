"""Layer normalisation over the last axis (Ba et al. 2016, section 3.1)."""

from __future__ import annotations

from mpishard.array.dtypes import Array, accumulator
from mpishard.array.ops import Ops
from mpishard.nn.layer import Context, Grads, Layer, Params, ParamSpec, Saved

__all__ = ["LayerNorm"]


class LayerNorm(Layer):
    """x (..., C) -> y (..., C), with parameters ``name.weight`` and ``name.bias`` (C,).

    The statistics of rows have the accumulator's type: float32 where x is bfloat16.
    """

    def __init__(self, name: str, width: int, eps: float = 1e-5) -> None:
        self.width, self.eps = width, eps
        self.weight, self.bias = f"{name}.weight", f"{name}.bias"

    def param_specs(self) -> tuple[ParamSpec, ...]:
        """Neither decays."""
        return ParamSpec(self.weight, (self.width,), value=1.0), ParamSpec(self.bias, (self.width,))

    def forward(self, ops: Ops, ctx: Context, params: Params, x: Array, y: Array) -> Saved:
        """Saves x itself, and mean and rstd (N,) of its rows."""
        x = x.reshape(-1, self.width)
        kind = accumulator(x.dtype)
        mean, rstd = ctx.keep(x.shape[:1], kind), ctx.keep(x.shape[:1], kind)
        ops.layernorm(x, params[self.weight], params[self.bias], y.reshape(x.shape), mean, rstd, self.eps)
        return x, mean, rstd

    def backward(
        self, ops: Ops, ctx: Context, params: Params, grads: Grads, saved: Saved, dy: Array, dx: Array | None
    ) -> None:
        """dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) with g = dy * weight."""
        x, mean, rstd = saved
        dweight, add_weight = grads[self.weight] or (None, False)
        dbias, add_bias = grads[self.bias] or (None, False)
        with ctx.frame():
            target = ctx.scratch(x.shape) if dx is None else dx.reshape(x.shape)
            ops.layernorm_backward(
                x,
                params[self.weight],
                mean,
                rstd,
                dy.reshape(x.shape),
                target,
                dweight,
                dbias,
                add_weight,
                add_bias,
            )
