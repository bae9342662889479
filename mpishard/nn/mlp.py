"""The position-wise network of a transformer block: linear, GELU, linear."""

from __future__ import annotations

from mpishard.array.dtypes import Array
from mpishard.array.ops import Ops
from mpishard.nn.activation import Gelu
from mpishard.nn.layer import Context, Grads, Layer, Params, ParamSpec, Saved
from mpishard.nn.linear import Linear

__all__ = ["Mlp"]


class Mlp(Layer):
    """x (..., C) -> y (..., C) through ``hidden`` features; parameters ``name.c_fc`` and ``name.c_proj``."""

    def __init__(
        self, name: str, width: int, hidden: int, *, tanh: bool = True, std: float = 0.02, std_out: float = 0.02
    ) -> None:
        self.hidden = hidden
        self.c_fc = Linear(f"{name}.c_fc", width, hidden, std=std)
        self.gelu = Gelu(tanh)
        self.c_proj = Linear(f"{name}.c_proj", hidden, width, std=std_out)

    def param_specs(self) -> tuple[ParamSpec, ...]:
        """Those of the two linear layers."""
        return self.c_fc.param_specs() + self.c_proj.param_specs()

    def forward(self, ops: Ops, ctx: Context, params: Params, x: Array, y: Array) -> Saved:
        """Saves x itself and the hidden features before and after GELU (..., hidden)."""
        shape = self.c_fc.output_shape(x.shape)
        before, after = ctx.keep(shape), ctx.keep(shape)
        self.c_fc.forward(ops, ctx, params, x, before)
        self.gelu.forward(ops, ctx, params, before, after)
        self.c_proj.forward(ops, ctx, params, after, y)
        return x, before, after

    def backward(
        self, ops: Ops, ctx: Context, params: Params, grads: Grads, saved: Saved, dy: Array, dx: Array | None
    ) -> None:
        """The three backwards in turn."""
        x, before, after = saved
        with ctx.frame():
            dhidden = ctx.scratch(after.shape)
            self.c_proj.backward(ops, ctx, params, grads, after, dy, dhidden)
            self.gelu.backward(ops, ctx, params, grads, before, dhidden, dhidden)
            self.c_fc.backward(ops, ctx, params, grads, x, dhidden, dx)
