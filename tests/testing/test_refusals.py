"""Layers and models that break their contract: each is refused, in words that say how."""

from __future__ import annotations

import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm import LocalCommunicator
from mpishard.nn import LinearHead
from mpishard.testing import ContractError, check_communicator, check_layer, check_loss, check_model
from tests.testing import broken_layers as broken
from tests.testing.broken_layers import Scale, model_of

REFUSED = [
    (broken.SavesParameter, r"^saved holds memory of the parameter weight, which is released before backward"),
    (broken.SmugglesParameter, r"^20 of 20 elements of the gradient of x are NaN .*, or read memory that was released"),
    (broken.SavesScratch, r"^saved holds an array \(4, 5\) from ctx.scratch, which is gone .* use ctx.keep"),
    (broken.SavesOwnMemory, r"^saved holds an array \(4, 5\) of memory that the layer made itself.* use ctx.keep"),
    (broken.SavesObject, r"^saved holds a dict; arrays, numbers, None, and tuples and lists of them are allowed"),
    (broken.LeavesGradient, r"^5 of 5 elements of the gradient of weight are NaN after backward: it did not write all"),
    (broken.LeavesRowsOfDx, r"^5 of 20 elements of the gradient of x are NaN after backward: it did not write all"),
    (broken.IgnoresAdd, r"^the gradient of weight is not added to what was there where the gradients of weight are to"),
    (broken.AlwaysAdds, r"^the gradient of weight is not added to what was there"),
    (broken.NeedsDx, r"^leaving dx out changes the bits of the gradient of weight"),
    (broken.ChangesDy, r"^dy was changed; it belongs to the caller and is read-only"),
    (broken.ChangesAndRestoresX, r"^forward writes to x, dy or a parameter; they belong to the caller"),
    (broken.ChangesParameter, r"^forward writes to x, dy or a parameter"),
    (broken.WrongDerivative, r"^the gradient of x is wrong: along a random direction backward gives .* differences of"),
    (broken.WrongGradient, r"^the gradient of weight is wrong: along a random direction"),
    (broken.MakesItsOwnMemory, r"^gelu was given an array \(4, 5\) of memory that the layer made itself.* no plan"),
    (broken.ComputesWithNumpy, r"^forward writes to an array by itself; use the operations of ops"),
    (broken.TakesMoreByValue, r"^forward takes more memory than the same call on shapes \(saved: .* shapes only"),
    (broken.TakesLessByValue, r"^the layer used .* bytes and .* on shapes; what it takes from ctx.keep"),
    (broken.Random, r"^forward gives other bits the second time; .* must come from ctx.draw"),
    (broken.Remembers, r"^backward fails .*; backward of the object that ran forward succeeds; a layer remem"),
    (broken.LosesDigits, r"^in float32 the gradient of weight is off by "),
    (broken.ForgetsRowsOfY, r"^forward does not write all of y"),
]


def test_the_layer_that_they_are_made_from_keeps_its_contract() -> None:
    assert check_layer(Scale, (4, 5)) < 1e-8
    assert check_model(lambda: model_of(Scale())) < 1e-8


@pytest.mark.parametrize(("layer", "message"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_layer(layer, message) -> None:
    with pytest.raises(ContractError, match=message):
        check_layer(layer, (4, 5))


def test_a_layer_that_is_wrong_where_certain_parameters_are_frozen_together() -> None:
    message = r"^freezing mlp\.c_fc\.weight, mlp\.c_fc\.bias .* changes the bits of the gradient of x$"
    with pytest.raises(ContractError, match=message):
        check_layer(lambda: broken.StopsAtWhatIsFrozen("mlp", 5, 3), (4, 5))


def test_a_layer_that_reads_parameters_in_backward_and_is_said_not_to() -> None:
    with pytest.raises(ContractError, match=r"^backward reads the parameter weight, and was said to read none"):
        check_layer(Scale, (4, 5), reads=False)


class OtherLosses(LinearHead):
    """Its losses depend on whether gradients are asked for."""

    def loss(self, ops, ctx, params, grads, x, targets, losses, scale, dx):
        super().loss(ops, ctx, params, grads, x, targets, losses, scale, dx)
        if grads is None:
            ops.add(losses, losses, losses)


class ForgetsScale(LinearHead):
    """Gradients of the losses, whatever the scale."""

    def loss(self, ops, ctx, params, grads, x, targets, losses, scale, dx):
        super().loss(ops, ctx, params, grads, x, targets, losses, 1.0, dx)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (OtherLosses, "^the losses depend on whether there is a gradient"),
        (ForgetsScale, "^the gradient of .* is wrong"),
    ],
)
def test_a_broken_head(head, message) -> None:
    with pytest.raises(ContractError, match=message):
        check_loss(lambda: head("head", 5, 3), (4, 5), classes=3)


MODELS = [
    (lambda: model_of(broken.WrongDerivative()), r"^the gradient of first\.weight is wrong: .* the step gives"),
    (lambda: model_of(Scale(), backward_units=()), r"^backward of stage body reads the parameter 'weight', which no"),
    (lambda: model_of(broken.KnowsTheRank()), r"^2 ranks, full_shard, prefetch 0, .*: losses are .* a layer's results"),
]


@pytest.mark.parametrize(("make", "message"), MODELS, ids=["derivative", "units", "rank"])
def test_a_broken_model(make, message) -> None:
    with pytest.raises(ContractError, match=message):
        check_model(make)


def test_a_communicator_is_checked_whole() -> None:
    check_communicator(LocalCommunicator(NumpyOps()))


class Unordered(LocalCommunicator):
    """Writes what it must add."""

    def _bind_reduce_scatter(self, *arguments):
        made = super()._bind_reduce_scatter(*arguments)
        launch, made._launch = made._launch, lambda add: launch(False)
        return made


def test_a_broken_communicator() -> None:
    with pytest.raises(ContractError, match=r"^reduce_scatter: reduce-scatter of float16 x 1, add=True, round 0: "):
        check_communicator(Unordered(NumpyOps()))
