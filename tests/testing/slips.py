"""Layers with the slips of a first try: most end in an exception of Python's that does not say why."""

from __future__ import annotations

from mpishard.nn import LinearHead, ParamSpec
from tests.testing.broken_layers import Scale


class ForgetsDxMayBeNone(Scale):
    def backward(self, ops, ctx, params, grads, saved, dy, dx):
        super().backward(ops, ctx, params, grads, saved, dy, dx.reshape(-1, self.width))


class ForgetsFrozen(Scale):
    def backward(self, ops, ctx, params, grads, saved, dy, dx):
        super().backward(ops, ctx, params, {"weight": None}, saved, dy, dx)
        with ctx.frame():
            product = ctx.scratch(dy.shape)
            ops.gelu_backward(saved[1], dy, product)
            ops.multiply(saved[0], product, product)
            self.write(ops, product, grads["weight"])

    def write(self, ops, product, weight):
        ops.column_sum(product, *weight)


class ForgetsFrozenAndUnpacks(ForgetsFrozen):
    def write(self, ops, product, weight):
        array, add = weight
        ops.column_sum(product, array, add)


class ChangesX(Scale):
    def forward(self, ops, ctx, params, x, y):
        saved = super().forward(ops, ctx, params, x, y)
        ops.fill(x, 0.0)
        return saved


class ChangesXInBackward(Scale):
    def backward(self, ops, ctx, params, grads, saved, dy, dx):
        super().backward(ops, ctx, params, grads, saved, dy, dx)
        ops.fill(saved[0], 0.0)


class ReturnsNothing(Scale):
    def forward(self, ops, ctx, params, x, y):
        super().forward(ops, ctx, params, x, y)


class SavesNothingAndMisspells(Scale):
    """What fails has nothing to do with what forward returned."""

    def forward(self, ops, ctx, params, x, y):
        ops.multiply(x, params["weight"], y)

    def backward(self, ops, ctx, params, grads, saved, dy, dx):
        ops.multiply(dyy, params["weight"], dx)  # noqa: F821


class LeavesOutASpec(Scale):
    def param_specs(self):
        return (ParamSpec("bias", (self.width,)),)


class LeavesOutASpecThatBackwardReads(Scale):
    def backward(self, ops, ctx, params, grads, saved, dy, dx):
        super().backward(ops, ctx, params, {"weight": grads["scale"]}, saved, dy, dx)


class DeclaresTwice(Scale):
    def param_specs(self):
        return super().param_specs() * 2


class DeclaresTuples(Scale):
    def param_specs(self):
        return (("weight", (self.width,)),)


class DeclaresWrongly(Scale):
    def param_specs(self):
        return (ParamSpec("weight", (self.depth,)),)


class UsesNoOperation(Scale):
    def forward(self, ops, ctx, params, x, y):
        ops.rsqrt(x, y)


class UsesNoOperationInBackward(Scale):
    def backward(self, ops, ctx, params, grads, saved, dy, dx):
        ops.rsqrt(dy, dx)


class AsksContext(Scale):
    def forward(self, ops, ctx, params, x, y):
        return x, ctx.save(x.shape)


class Misfits(Scale):
    def forward(self, ops, ctx, params, x, y):
        ops.multiply(x, y[:-1], y)


class ForwardOnce(Scale):
    def forward(self, ops, ctx, params, x, y):
        self.width.calls = 1


class FailsTheSecondTime(Scale):
    def __init__(self, width: int = 5) -> None:
        super().__init__(width)
        self.left = [0]

    def forward(self, ops, ctx, params, x, y):
        self.left.pop()
        return super().forward(ops, ctx, params, x, y)


class FailsInEvaluation(Scale):
    def forward(self, ops, ctx, params, x, y):
        if not ctx.training:
            raise NotImplementedError
        return super().forward(ops, ctx, params, x, y)


class HasNoShape(Scale):
    def output_shape(self, shape):
        return shape[0], shape[7]


class HeadForgetsDx(LinearHead):
    def loss(self, ops, ctx, params, grads, x, targets, losses, scale, dx):
        super().loss(ops, ctx, params, grads, x, targets, losses, scale, None if grads is None else dx.reshape(x.shape))


class HeadForgetsEvaluation(LinearHead):
    def loss(self, ops, ctx, params, grads, x, targets, losses, scale, dx):
        super().loss(ops, ctx, params, dict(grads.items()), x, targets, losses, scale, dx)


class HeadForgetsFrozen(LinearHead):
    def loss(self, ops, ctx, params, grads, x, targets, losses, scale, dx):
        for target in (grads or {}).values():
            _, _ = target
        super().loss(ops, ctx, params, grads, x, targets, losses, scale, dx)


class HeadCannotPredict(LinearHead):
    def predict(self, ops, ctx, params, x, logits):
        super().predict(ops, ctx, params, x, logits)
        if len(x) == 1:  # not as a part of the loss
            ops.copy(params["wieght"], logits)
