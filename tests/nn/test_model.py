"""Models as data: what is refused, and who owns a parameter."""

import pytest

from mpishard.errors import EngineError
from mpishard.nn.head import TiedHead
from mpishard.nn.linear import Linear
from mpishard.nn.model import Model, Stage, Unit

HEAD, BODY = TiedHead(5, 3), Linear("fc", 3, 3)
UNITS = (Unit("body", "body.", BODY.param_specs()), Unit("head", "", HEAD.param_specs(), keep=True))
STAGES = (Stage("body", BODY, ("body",), ("body",)), Stage("head", HEAD, ("head",), ("head",)))


def model(units=UNITS, stages=STAGES):
    return Model(units, stages, sample_shape=(3,), sample_dtype="float32", target_shape=())


def test_parameters_and_units():
    built = model()
    assert built.parameters == 3 * 3 + 3 + 3 + 3 + 5 * 3
    assert built.unit("body") is UNITS[0]
    assert built.owner(STAGES[1], "wte.weight") is UNITS[1]


def test_the_last_stage_is_the_loss():
    with pytest.raises(EngineError, match="stage head: the last stage, and no other, is a LossLayer"):
        model(stages=STAGES[::-1])
    with pytest.raises(EngineError, match="stage body: the last stage, and no other, is a LossLayer"):
        model(units=UNITS[:1], stages=STAGES[:1])


def test_a_stage_needs_a_unit_with_its_parameters():
    lost = Stage("body", BODY, ("head",), ())
    with pytest.raises(EngineError, match=r"stage body has no unit with parameter fc\.weight; its units: head"):
        model(stages=(lost, STAGES[1]))


def test_a_parameter_that_no_stage_uses_is_refused():
    units = (*UNITS, Unit("spare", "spare.", Linear("fc", 2, 2).param_specs()))
    with pytest.raises(EngineError, match=r"parameter spare\.fc\.weight of unit spare is used by no stage"):
        model(units=units)


def test_a_name_that_stands_twice_in_a_unit_is_refused():
    units = (Unit("body", "body.", BODY.param_specs() * 2), UNITS[1])
    with pytest.raises(EngineError, match=r"unit body holds parameter fc\.weight twice"):
        model(units=units)
