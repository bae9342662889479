"""A layer that keeps its contract, and copies of it that each break one rule."""

from __future__ import annotations

import itertools
import threading

import numpy as np

from mpishard.nn import Layer, LinearHead, Mlp, Model, ParamSpec, Stage, Unit

CALLS = itertools.count()


class Scale(Layer):
    """y = gelu(x * weight): x (N, C), weight (C,)."""

    def __init__(self, width: int = 5) -> None:
        self.width = width

    def param_specs(self):
        return (ParamSpec("weight", (self.width,), value=1.0),)

    def forward(self, ops, ctx, params, x, y):
        before = ctx.keep(x.shape)
        ops.multiply(x, params["weight"], before)
        ops.gelu(before, y)
        return x, before

    def backward(self, ops, ctx, params, grads, saved, dy, dx):
        x, before = saved
        with ctx.frame():
            dbefore, product = ctx.scratch(dy.shape), ctx.scratch(dy.shape)
            ops.gelu_backward(before, dy, dbefore)
            if (weight := grads["weight"]) is not None:
                ops.multiply(x, dbefore, product)
                ops.column_sum(product, *weight)
            if dx is not None:
                ops.multiply(dbefore, params["weight"], dx)


class SavesParameter(Scale):
    def forward(self, ops, ctx, params, x, y):
        return *super().forward(ops, ctx, params, x, y), params["weight"]

    def backward(self, ops, ctx, params, grads, saved, dy, dx):
        super().backward(ops, ctx, params, grads, saved[:2], dy, dx)


class SmugglesParameter(Scale):
    """Past saved, through the class."""

    def forward(self, ops, ctx, params, x, y):
        SmugglesParameter.weight = params["weight"]
        return super().forward(ops, ctx, params, x, y)

    def backward(self, ops, ctx, params, grads, saved, dy, dx):
        super().backward(ops, ctx, {"weight": SmugglesParameter.weight}, grads, saved, dy, dx)


class SavesScratch(Scale):
    def forward(self, ops, ctx, params, x, y):
        before = ctx.scratch(x.shape)
        ops.multiply(x, params["weight"], before)
        ops.gelu(before, y)
        return x, before


class SavesOwnMemory(Scale):
    def forward(self, ops, ctx, params, x, y):
        _, before = super().forward(ops, ctx, params, x, y)
        return x, before.copy()


class SavesObject(Scale):
    def forward(self, ops, ctx, params, x, y):
        x, before = super().forward(ops, ctx, params, x, y)
        return x, {"before": before}


class LeavesGradient(Scale):
    def backward(self, ops, ctx, params, grads, saved, dy, dx):
        super().backward(ops, ctx, params, {"weight": None}, saved, dy, dx)


class LeavesRowsOfDx(Scale):
    def backward(self, ops, ctx, params, grads, saved, dy, dx):
        super().backward(ops, ctx, params, grads, saved, dy, None)
        if dx is not None:
            ops.fill(dx[:-1], 0.0)


class IgnoresAdd(Scale):
    def backward(self, ops, ctx, params, grads, saved, dy, dx):
        written = {name: target and (target[0], False) for name, target in grads.items()}
        super().backward(ops, ctx, params, written, saved, dy, dx)


class AlwaysAdds(Scale):
    def backward(self, ops, ctx, params, grads, saved, dy, dx):
        if (weight := grads["weight"]) is not None and not weight[1]:
            ops.copy(dy[0], weight[0])
        added = {name: target and (target[0], True) for name, target in grads.items()}
        super().backward(ops, ctx, params, added, saved, dy, dx)


class NeedsDx(Scale):
    def backward(self, ops, ctx, params, grads, saved, dy, dx):
        super().backward(ops, ctx, params, grads, saved, dy, dx)
        if dx is None and grads["weight"] is not None:
            ops.fill(grads["weight"][0], 0.0)


class ChangesDy(Scale):
    def backward(self, ops, ctx, params, grads, saved, dy, dx):
        super().backward(ops, ctx, params, grads, saved, dy, dx)
        ops.fill(dy, 0.0)


class ChangesAndRestoresX(Scale):
    def forward(self, ops, ctx, params, x, y):
        saved = super().forward(ops, ctx, params, x, y)
        with ctx.frame():
            before = ctx.scratch(x.shape)
            ops.copy(x, before)
            ops.fill(x, 0.0)
            ops.copy(before, x)
        return saved


class ChangesParameter(Scale):
    def forward(self, ops, ctx, params, x, y):
        saved = super().forward(ops, ctx, params, x, y)
        ops.fill(params["weight"], 0.0)
        return saved


class WrongDerivative(Scale):
    def backward(self, ops, ctx, params, grads, saved, dy, dx):
        super().backward(ops, ctx, params, grads, saved, dy, dx)
        if dx is not None:
            ops.multiply(dx, params["weight"], dx)


class WrongGradient(Scale):
    def backward(self, ops, ctx, params, grads, saved, dy, dx):
        super().backward(ops, ctx, params, grads, (saved[1], saved[1]), dy, dx)


class MakesItsOwnMemory(Scale):
    def forward(self, ops, ctx, params, x, y):
        before = np.empty_like(x)
        ops.gelu(x, before)
        return super().forward(ops, ctx, params, x, y)


class ComputesWithNumpy(Scale):
    def forward(self, ops, ctx, params, x, y):
        saved = super().forward(ops, ctx, params, x, y)
        y[...] = np.tanh(x)
        return saved


class TakesMoreByValue(Scale):
    def forward(self, ops, ctx, params, x, y):
        if x.any():  # arrays without memory read as zeros
            ctx.keep(x.shape)
        return super().forward(ops, ctx, params, x, y)


class TakesLessByValue(Scale):
    def forward(self, ops, ctx, params, x, y):
        if not x.any():
            ctx.keep(x.shape)
        return super().forward(ops, ctx, params, x, y)


class Random(Scale):
    def forward(self, ops, ctx, params, x, y):
        saved = super().forward(ops, ctx, params, x, y)
        ops.dropout(y, y, 0.5, ctx.draw("scale", self.width)._replace(step=next(CALLS)))
        return saved


class Remembers(Scale):
    def forward(self, ops, ctx, params, x, y):
        self.saved = super().forward(ops, ctx, params, x, y)

    def backward(self, ops, ctx, params, grads, saved, dy, dx):
        super().backward(ops, ctx, params, grads, self.saved, dy, dx)


class LosesDigits(Scale):
    """Near enough in float64: x + 1e4 - 1e4."""

    def forward(self, ops, ctx, params, x, y):
        before = ctx.keep(x.shape)
        with ctx.frame():
            large = ctx.scratch((self.width,))
            ops.fill(large, 1e4)
            ops.add(x, large, before)
            ops.fill(large, -1e4)
            ops.add(before, large, before)
            ops.multiply(before, params["weight"], before)
        ops.gelu(before, y)
        return x, before


class ForgetsRowsOfY(Scale):
    def forward(self, ops, ctx, params, x, y):
        before = ctx.keep(x.shape)
        ops.multiply(x, params["weight"], before)
        ops.gelu(before[:-1], y[:-1])
        if ctx.kept.category == "saved":
            ops.gelu(before, y)
        return x, before


class StopsAtWhatIsFrozen(Mlp):
    """Two parameters that are frozen together take the gradient of x with them; one alone, or all four, do not."""

    def backward(self, ops, ctx, params, grads, saved, dy, dx):
        frozen = [name.removeprefix("mlp.c_fc.") for name, target in grads.items() if target is None]
        super().backward(ops, ctx, params, grads, saved, dy, None if frozen == ["weight", "bias"] else dx)


class KnowsTheRank(Scale):
    def forward(self, ops, ctx, params, x, y):
        saved = super().forward(ops, ctx, params, x, y)
        if threading.current_thread().name == "rank 1":
            ops.add(y, params["weight"], y)
        return saved


def model_of(layer: Layer, backward_units: tuple[str, ...] = ("body",), width: int = 5) -> Model:
    """The layer twice, then a head."""
    head = LinearHead("head", width, 3, std=0.5)
    return Model(
        units=(
            Unit("first", "first.", layer.param_specs()),
            Unit("body", "body.", layer.param_specs()),
            Unit("head", "", head.param_specs()),
        ),
        stages=(
            Stage("first", layer, ("first",), ("first",)),
            Stage("body", layer, ("body",), backward_units),
            Stage("head", head, ("head",), ("head",)),
        ),
        sample_shape=(width,),
        sample_dtype="float32",
        target_shape=(),
    )
