"""The layers of a model, each of which tells in which call of which stage it failed."""

from __future__ import annotations

from dataclasses import replace

from mpishard.array.dtypes import Array
from mpishard.array.ops import Ops
from mpishard.nn.layer import Context, Grads, Layer, LossLayer, Params, ParamSpec, Saved
from mpishard.nn.model import AnyLayer, Model, Stage
from mpishard.testing.told import Handed, circumstances, declared, told

__all__ = ["telling"]


def telling(model: Model) -> Model:
    """Return the model with layers whose exceptions are ContractErrors that name stage and call.

    Raises:
        ContractError: a layer's parameters are not declared rightly.
    """

    def layer(stage: Stage) -> AnyLayer:
        inner = stage.layer
        return _Head(stage, inner) if isinstance(inner, LossLayer) else _Inner(stage, inner)

    return replace(model, stages=tuple(replace(stage, layer=layer(stage)) for stage in model.stages))


class _Inner(Layer):
    def __init__(self, stage: Stage, layer: Layer) -> None:
        self.layer, self.where = layer, f" of stage {stage.name}"
        self.names = tuple(spec.name for spec in declared(layer))

    def param_specs(self) -> tuple[ParamSpec, ...]:
        return declared(self.layer)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        with told("output_shape" + self.where):
            return self.layer.output_shape(shape)

    def forward(self, ops: Ops, ctx: Context, params: Params, x: Array, y: Array) -> Saved:
        with told("forward" + self.where, ops):
            return self.layer.forward(ops, ctx, Handed("params", params, self.names), x, y)

    def backward(
        self, ops: Ops, ctx: Context, params: Params, grads: Grads, saved: Saved, dy: Array, dx: Array | None
    ) -> None:
        given = Handed("params", params, self.names), Handed("grads", grads, self.names)
        with told("backward" + self.where + circumstances(grads, dx is None), ops):
            self.layer.backward(ops, ctx, *given, saved, dy, dx)


class _Head(LossLayer):
    def __init__(self, stage: Stage, layer: LossLayer) -> None:
        self.layer, self.where = layer, f" of stage {stage.name}"
        self.names = tuple(spec.name for spec in declared(layer))

    def param_specs(self) -> tuple[ParamSpec, ...]:
        return declared(self.layer)

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
        params = Handed("params", params, self.names)
        grads = None if grads is None else Handed("grads", grads, self.names)
        with told("loss" + self.where, ops):
            self.layer.loss(ops, ctx, params, grads, x, targets, losses, scale, dx)

    def outputs(self) -> int:
        with told("outputs" + self.where):
            return self.layer.outputs()

    def predict(self, ops: Ops, ctx: Context, params: Params, x: Array, logits: Array) -> None:
        with told("predict" + self.where, ops):
            self.layer.predict(ops, ctx, Handed("params", params, self.names), x, logits)
