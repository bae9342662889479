"""What a classifier of features is made of: hidden layers with GELU, and a linear head with cross-entropy.

Shape legend: B samples, I inputs, O outputs, V classes.
"""

from __future__ import annotations

from mpishard.array.dtypes import Array
from mpishard.array.ops import Ops
from mpishard.nn.layer import Context, Grads, Layer, LossLayer, Params, ParamSpec, Saved
from mpishard.nn.linear import Linear

__all__ = ["Hidden", "LinearHead"]


class Hidden(Layer):
    """y = gelu(x @ weight + bias): x (..., I) -> y (..., O), with parameters ``name.weight`` and ``name.bias``.

    Args:
        std: deviation of the initial weights; the bias begins at zero.
        tanh: GELU's tanh form, else exact.
    """

    def __init__(self, name: str, inputs: int, outputs: int, *, std: float = 0.02, tanh: bool = True) -> None:
        self.linear, self.tanh = Linear(name, inputs, outputs, std=std), tanh

    def param_specs(self) -> tuple[ParamSpec, ...]:
        """Those of the linear layer."""
        return self.linear.param_specs()

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """(..., I) -> (..., O)."""
        return self.linear.output_shape(shape)

    def forward(self, ops: Ops, ctx: Context, params: Params, x: Array, y: Array) -> Saved:
        """Saves x itself, and the features before GELU (..., O)."""
        before = ctx.keep(y.shape)
        self.linear.forward(ops, ctx, params, x, before)
        ops.gelu(before, y, self.tanh)
        return x, before

    def backward(
        self, ops: Ops, ctx: Context, params: Params, grads: Grads, saved: Saved, dy: Array, dx: Array | None
    ) -> None:
        """dbefore = dy * gelu'(before), and the linear layer's backward of it."""
        x, before = saved
        with ctx.frame():
            dbefore = ctx.scratch(dy.shape)
            ops.gelu_backward(before, dy, dbefore, self.tanh)
            self.linear.backward(ops, ctx, params, grads, x, dbefore, dx)


class LinearHead(LossLayer):
    """x (..., I), targets (...) -> losses (N,): cross-entropy of logits = x @ weight + bias over V classes.

    Parameters are ``name.weight`` (I, V) and ``name.bias`` (V,). The logits of a micro-batch exist at once.
    Losses have the accumulator's type: float32 where x is bfloat16.

    Args:
        std: deviation of the initial weights; the bias begins at zero.
    """

    def __init__(self, name: str, inputs: int, classes: int, *, std: float = 0.02) -> None:
        self.inputs, self.classes = inputs, classes
        self.linear = Linear(name, inputs, classes, std=std)

    def param_specs(self) -> tuple[ParamSpec, ...]:
        """Those of the linear layer."""
        return self.linear.param_specs()

    def outputs(self) -> int:
        """V."""
        return self.classes

    def loss(
        self,
        ops: Ops,
        ctx: Context,
        params: Params,
        grads: Grads | None,
        x: Array,
        targets: Array,
        losses: Array,
        scale: float,
        dx: Array | None,
    ) -> None:
        """dlogits = scale * (softmax - onehot) overwrites the logits; the rest is the linear layer's backward."""
        x, targets = x.reshape(-1, self.inputs), targets.reshape(-1)
        with ctx.frame():
            logits = ctx.scratch((targets.size, self.classes))
            self.predict(ops, ctx, params, x, logits)
            ops.cross_entropy(logits, targets, losses, scale, grads is not None)
            if grads is not None:
                self.linear.backward(ops, ctx, params, grads, x, logits, dx)

    def predict(self, ops: Ops, ctx: Context, params: Params, x: Array, logits: Array) -> None:
        """Logits (N, V) of x (N, I)."""
        self.linear.forward(ops, ctx, params, x, logits)
