"""Linear: y = x @ weight + bias, weight (inputs, outputs) as GPT-2's public checkpoints store it."""

from __future__ import annotations

from mpishard.array.dtypes import Array
from mpishard.array.ops import Ops
from mpishard.nn.layer import Context, Grads, Layer, Params, ParamSpec, Saved

__all__ = ["Linear"]


class Linear(Layer):
    """x (..., I) -> y (..., O).

    Args:
        name: prefix of the parameters ``name.weight`` (I, O) and ``name.bias`` (O,).
        std: deviation of the initial weights; the bias begins at zero.
    """

    def __init__(self, name: str, inputs: int, outputs: int, *, bias: bool = True, std: float = 0.02) -> None:
        self.inputs, self.outputs, self.std = inputs, outputs, std
        self.weight = f"{name}.weight"
        self.bias = f"{name}.bias" if bias else None

    def param_specs(self) -> tuple[ParamSpec, ...]:
        """``weight`` decays, ``bias`` does not."""
        weight = ParamSpec(self.weight, (self.inputs, self.outputs), std=self.std, decay=True)
        return (weight,) if self.bias is None else (weight, ParamSpec(self.bias, (self.outputs,)))

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """(..., I) -> (..., O)."""
        return (*shape[:-1], self.outputs)

    def forward(self, ops: Ops, ctx: Context, params: Params, x: Array, y: Array) -> Saved:
        """Saves x itself."""
        bias = None if self.bias is None else params[self.bias]
        ops.linear(x.reshape(-1, self.inputs), params[self.weight], bias, y.reshape(-1, self.outputs))
        return x

    def backward(
        self, ops: Ops, ctx: Context, params: Params, grads: Grads, saved: Saved, dy: Array, dx: Array | None
    ) -> None:
        """dweight = x.T @ dy, dbias = column sums of dy, dx = dy @ weight.T."""
        x, dy = saved.reshape(-1, self.inputs), dy.reshape(-1, self.outputs)
        if (dweight := grads[self.weight]) is not None:
            ops.matmul(x.T, dy, *dweight)
        if self.bias is not None and (dbias := grads[self.bias]) is not None:
            ops.column_sum(dy, *dbias)
        if dx is not None:
            ops.matmul(dy, params[self.weight].T, dx.reshape(-1, self.inputs))
