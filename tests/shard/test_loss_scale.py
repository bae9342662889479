import math

import pytest

from mpishard.errors import ConfigError
from mpishard.optim import LossScale
from mpishard.shard.loss_scale import HIGHEST, LOWEST


def run(scale: LossScale, steps: str) -> list[float]:
    """The scale of each step: + a finite one, - one that is not."""
    found = []
    for step in steps:
        found.append(scale.scale)
        scale.update(step == "+")
    return found


def test_it_grows_after_finite_steps_in_a_row_and_halves_after_each_other():
    scale = LossScale(8.0, every=3)
    assert run(scale, "+++" "+++" "++-" "++-" "--" "+++" "+") == [
        8, 8, 8, 16, 16, 16, 32, 32, 32, 16, 16, 16, 8, 4, 2, 2, 2, 4,
    ]  # fmt: skip
    assert (scale.scale, scale.good) == (4, 1)


def test_the_first_scale_and_the_interval_are_gradscalers():
    scale = LossScale()
    assert (scale.scale, scale.every, scale.dynamic, scale.good) == (65536.0, 2000, True, 0)


def test_a_fixed_scale_never_moves():
    scale = LossScale(4.0, dynamic=False, every=1)
    assert run(scale, "+-+-") == [4.0] * 4
    scale.restore({"scale": 2.0, "good": 5})
    assert (scale.scale, scale.good) == (4.0, 0)


def test_it_stays_a_power_of_two_that_fp32_holds():
    low, high = LossScale(2.0**-23), LossScale(2.0**63, every=1)
    assert run(low, "-" * 4) == [2.0**-23, LOWEST, LOWEST, LOWEST]
    assert run(high, "+" * 4) == [2.0**63, HIGHEST, HIGHEST, HIGHEST]
    assert 2.0**-24 / HIGHEST > 2.0**-126
    assert HIGHEST < 2.0**127


def test_it_goes_on_where_it_was():
    one, two = LossScale(every=4), LossScale(2.0, every=4)
    run(one, "+++" "+-+++")
    two.restore(one.state())
    assert two.state() == one.state() == {"scale": 65536.0, "good": 3}
    assert run(two, "+-++") == run(one, "+-++")
    three = LossScale(every=2)
    three.restore(one.state() | {"good": 9})
    assert run(three, "++") == [65536.0, 131072.0]


@pytest.mark.parametrize(
    "scale",
    [0, 0.0, -2.0, 3.0, 65535, 1.5, math.nan, math.inf, -math.inf, 2.0**-25, 2.0**65, 10**400, True, "8", None],
)
def test_what_is_no_scale(scale):
    with pytest.raises(ConfigError) as caught:
        LossScale(scale)
    assert str(caught.value) == (
        f"LossScale: scale is {scale!r}; it must be a power of two from 2**-24 to 2**64, such as 65536"
    )
    with pytest.raises(ConfigError, match="cannot be restored: scale is"):
        LossScale().restore({"scale": scale, "good": 0})


@pytest.mark.parametrize("scale", [1, 2**20, 0.5, LOWEST, HIGHEST])
def test_powers_of_two(scale):
    assert LossScale(scale).scale == scale


@pytest.mark.parametrize("every", [0, -1, 1.0, True, "8"])
def test_what_is_no_interval(every):
    with pytest.raises(ConfigError, match=r"^LossScale: every is .*; it must be a whole number of steps, 1 or more$"):
        LossScale(every=every)


@pytest.mark.parametrize("dynamic", [None, "no", 1])
def test_it_is_dynamic_or_fixed(dynamic):
    with pytest.raises(ConfigError, match=r"^LossScale: dynamic is .*; it must be True, or False for a fixed scale$"):
        LossScale(dynamic=dynamic)


@pytest.mark.parametrize("state", [{}, {"scale": 2.0}, {"scale": 2.0, "good": -1}, {"scale": 2.0, "good": 1.0}])
def test_what_is_no_state(state):
    with pytest.raises(ConfigError, match="the loss scale's state cannot be restored"):
        LossScale().restore(state)
