"""What the suites say of a layer that raises: in which call, and the reason where that is certain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpishard.errors import ShapeError
from mpishard.nn import Layer, LinearHead, Model, Stage, freeze
from mpishard.testing import ContractError, check_layer, check_loss, check_model
from tests.testing import slips
from tests.testing.broken_layers import Scale, model_of

DX = r"^backward where dx is None fails \(AttributeError: 'NoneType' .*reshape.*\); dx is None where nobody needs"
FROZEN = r"^backward where grads\['weight'\] is None fails \(TypeError: .*NoneType.*\); grads\[name\] is None for a"
NO_OPERATION = r" uses ops\.rsqrt, which is no operation; layers have add, .*matmul, .*writing-a-layer\.md"
LAYERS = [
    (slips.ForgetsDxMayBeNone, AttributeError, DX),
    (slips.ForgetsFrozen, TypeError, FROZEN),
    (slips.ForgetsFrozenAndUnpacks, TypeError, FROZEN),
    (slips.ChangesX, None, r"^x was changed; it belongs to the caller and is read-only$"),
    (slips.ChangesXInBackward, None, r"^x was changed; it belongs to the caller and is read-only$"),
    (slips.ReturnsNothing, TypeError, r"^backward fails \(TypeError: cannot unpack .*\); forward returned None, which"),
    (slips.SavesNothingAndMisspells, NameError, r"^backward fails \(NameError: name 'dyy' is not defined.*\)$"),
    (slips.LeavesOutASpec, KeyError, r"^forward asks for params\['weight'\], which .*; it declares bias$"),
    (slips.LeavesOutASpecThatBackwardReads, KeyError, r"^backward asks for grads\['scale'\], .* it declares weight$"),
    (slips.DeclaresTwice, None, r"^param_specs declares weight twice; names are unique within a unit"),
    (slips.DeclaresTuples, None, r"^param_specs gives a tuple where a ParamSpec is due"),
    (slips.DeclaresWrongly, AttributeError, r"^param_specs fails \(AttributeError: .*depth.*\)$"),
    (slips.UsesNoOperation, AttributeError, "^forward" + NO_OPERATION),
    (slips.UsesNoOperationInBackward, AttributeError, "^backward" + NO_OPERATION),
    (slips.AsksContext, AttributeError, r"^forward uses ctx\.save, .* ask for training, keep, scratch, frame, draw$"),
    (slips.Misfits, ShapeError, r"^forward fails \(ShapeError: multiply was given x \(4, 5\), y \(3, 5\).*\)$"),
    (slips.ForwardOnce, AttributeError, r"^forward fails \(AttributeError: 'int' object .*\)$"),
    (slips.FailsTheSecondTime, IndexError, r"^forward run a second time fails \(IndexError: pop from empty list\)"),
    (slips.FailsInEvaluation, NotImplementedError, r"^forward where ctx.training is False fails \(NotImplemented"),
    (slips.HasNoShape, IndexError, r"^output_shape fails \(IndexError: tuple index out of range\)$"),
]


@pytest.mark.parametrize(("layer", "cause", "message"), LAYERS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_slip(layer, cause, message) -> None:
    with pytest.raises(ContractError, match=message) as caught:
        check_layer(layer, (4, 5))
    assert "\n" not in str(caught.value)
    if cause is not None:  # the original, with its lines, is printed above the message
        assert isinstance(caught.value.__cause__, cause)


HEADS = [
    (slips.HeadForgetsDx, r"^loss where dx is None fails .*; dx is None where nobody needs the gradient of x"),
    (slips.HeadForgetsEvaluation, r"^loss where grads is None fails .*; grads is None where only losses are wanted"),
    (slips.HeadForgetsFrozen, r"^loss where grads\['head\.weight'\] is None fails .*; grads\[name\] is None for a"),
]


@pytest.mark.parametrize(("head", "message"), HEADS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_slip_in_a_head(head, message) -> None:
    with pytest.raises(ContractError, match=message):
        check_loss(lambda: head("head", 5, 3), (4, 5), classes=3)


def with_head(head: type[LinearHead]) -> Model:
    model = model_of(Scale())
    last = replace(model.stages[-1], layer=head("head", 5, 3, std=0.5))
    return replace(model, stages=(*model.stages[:-1], last))


def frozen() -> Model:
    """A frozen layer that does not expect it, above one that is trained."""
    return freeze(model_of(slips.ForgetsFrozen()), ["body.*"])


MODELS = [
    (lambda: model_of(slips.UsesNoOperation()), r"^forward of stage first uses ops\.rsqrt, which is no operation"),
    (lambda: model_of(slips.Misfits()), r"^forward of stage first fails \(ShapeError: multiply was given"),
    (lambda: model_of(slips.ReturnsNothing()), r"^backward of stage body fails \(TypeError: cannot unpack"),
    (lambda: with_head(slips.HeadCannotPredict), r"^predict of stage head asks for params\['wieght'\], "),
    (frozen, r"^backward of stage body where grads\['weight'\] is None fails \(TypeError: "),
]


@pytest.mark.parametrize(("make", "message"), MODELS, ids=["operation", "shape", "saved", "predict", "frozen"])
def test_a_slip_in_a_model(make, message) -> None:
    with pytest.raises(ContractError, match=message):
        check_model(make)


class Noise(Layer):
    """y = x + noise of the operation ``normal`` while it trains."""

    def param_specs(self):
        return ()

    def forward(self, ops, ctx, params, x, y):
        with ctx.frame():
            noise = ctx.scratch(x.shape)
            ops.normal(noise.reshape(-1), ctx.draw("noise", x.shape[-1]), 0.1 if ctx.training else 0.0)
            ops.add(x, noise, y)

    def backward(self, ops, ctx, params, grads, saved, dy, dx):
        if dx is not None:
            ops.copy(dy, dx)


def test_a_layer_may_draw_normal_numbers() -> None:
    def noisy() -> Model:
        model = model_of(Scale())
        return replace(model, stages=(model.stages[0], Stage("noise", Noise(), (), ()), *model.stages[1:]))

    assert check_layer(Noise, (4, 5)) < 1e-8
    assert check_model(noisy) < 1e-8
