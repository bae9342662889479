"""A pre-norm transformer block (Radford et al. 2019, section 2.3):

    r = x + dropout(attn(ln_1(x)))
    y = r + dropout(mlp(ln_2(r)))
"""

from __future__ import annotations

from mpishard.array.dtypes import Array
from mpishard.array.ops import Ops
from mpishard.nn.activation import Dropout
from mpishard.nn.attention import CausalSelfAttention
from mpishard.nn.layer import Context, Grads, Layer, Params, ParamSpec, Saved
from mpishard.nn.mlp import Mlp
from mpishard.nn.norm import LayerNorm

__all__ = ["Block"]


class Block(Layer):
    """x (B, T, C) -> y (B, T, C).

    Args:
        dropout: rate behind both branches.
        tanh: GELU's tanh form, else exact.
        attention_block: query rows that attention works at once; 0 for all.
        recompute_attention: attention keeps its input alone, and its backward makes the rest again: 12 numbers a token
            and feature are kept in place of 16, the output among them.
        std, std_out: deviations of the initial weights; std_out of the branches' last matrices.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        dropout: float = 0.0,
        tanh: bool = True,
        attention_block: int = 64,
        recompute_attention: bool = False,
        std: float = 0.02,
        std_out: float = 0.02,
    ) -> None:
        self.ln_1 = LayerNorm("ln_1", width)
        self.attn = CausalSelfAttention(
            "attn", width, heads, block=attention_block, recompute=recompute_attention, std=std, std_out=std_out
        )
        self.drop_1 = Dropout("attn.drop", dropout)
        self.ln_2 = LayerNorm("ln_2", width)
        self.mlp = Mlp("mlp", width, 4 * width, tanh=tanh, std=std, std_out=std_out)
        self.drop_2 = Dropout("mlp.drop", dropout)

    def param_specs(self) -> tuple[ParamSpec, ...]:
        """ln_1, attn, ln_2, mlp: the order of GPT-2's checkpoints."""
        layers = (self.ln_1, self.attn, self.ln_2, self.mlp)
        return tuple(spec for layer in layers for spec in layer.param_specs())

    def forward(self, ops: Ops, ctx: Context, params: Params, x: Array, y: Array) -> Saved:
        """Saves both normalised inputs and r (B, T, C), and what the parts save."""
        normal, middle, normal2 = ctx.keep(x.shape), ctx.keep(x.shape), ctx.keep(x.shape)
        ln_1 = self.ln_1.forward(ops, ctx, params, x, normal)
        attn = self.attn.forward(ops, ctx, params, normal, middle)
        if self.drop_1.active(ctx):
            self.drop_1.forward(ops, ctx, params, middle, middle)
        ops.add(middle, x, middle)
        ln_2 = self.ln_2.forward(ops, ctx, params, middle, normal2)
        mlp = self.mlp.forward(ops, ctx, params, normal2, y)
        if self.drop_2.active(ctx):
            self.drop_2.forward(ops, ctx, params, y, y)
        ops.add(y, middle, y)
        return ln_1, attn, ln_2, mlp

    def backward(
        self, ops: Ops, ctx: Context, params: Params, grads: Grads, saved: Saved, dy: Array, dx: Array | None
    ) -> None:
        """dr = dy + ln_2'(mlp'(dropout'(dy))); dx = dr + ln_1'(attn'(dropout'(dr)))."""
        ln_1, attn, ln_2, mlp = saved
        with ctx.frame():
            dmiddle, dnormal = ctx.scratch(dy.shape), ctx.scratch(dy.shape)
            dout = dy
            if self.drop_2.active(ctx):
                self.drop_2.backward(ops, ctx, params, grads, None, dy, dmiddle)
                dout = dmiddle  # free until ln_2's backward writes it
            self.mlp.backward(ops, ctx, params, grads, mlp, dout, dnormal)
            self.ln_2.backward(ops, ctx, params, grads, ln_2, dnormal, dmiddle)
            ops.add(dmiddle, dy, dmiddle)
            dout = dmiddle
            if self.drop_1.active(ctx):
                dout = ctx.scratch(dy.shape)
                self.drop_1.backward(ops, ctx, params, grads, None, dmiddle, dout)
            self.attn.backward(ops, ctx, params, grads, attn, dout, dnormal)
            self.ln_1.backward(ops, ctx, params, grads, ln_1, dnormal, dx)
            if dx is not None:
                ops.add(dx, dmiddle, dx)
