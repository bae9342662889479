import math

import numpy as np
import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.errors import ConfigError
from mpishard.optim.adamw import AdamW

N = 1000
SEGMENTS = ((0, 300, 0.1), (304, 317, 0.0), (320, 990, 0.1))


def start(kind, seed=0):
    rng = np.random.default_rng(seed)
    arrays = {"param": rng.standard_normal(N), "grad": np.zeros(N), "exp_avg": np.zeros(N), "exp_avg_sq": np.zeros(N)}
    return rng, {name: array.astype(kind) for name, array in arrays.items()}


class Reference:
    """Algorithm 2 of Loshchilov & Hutter (2019) with decay lr * decay, element by element in float64."""

    def __init__(self, param, beta1=0.9, beta2=0.95, eps=1e-8):
        self.param, self.m, self.v = param.astype(float), np.zeros(N), np.zeros(N)
        self.beta1, self.beta2, self.eps, self.count = beta1, beta2, eps, 0

    def update(self, grad, lr):
        self.count += 1
        decay = np.zeros(N)
        trained = np.zeros(N, bool)
        for begin, end, rate in SEGMENTS:
            decay[begin:end], trained[begin:end] = rate, True
        m = self.beta1 * self.m + (1 - self.beta1) * grad
        v = self.beta2 * self.v + (1 - self.beta2) * grad**2
        mhat, vhat = m / (1 - self.beta1**self.count), v / (1 - self.beta2**self.count)
        param = self.param - lr * decay * self.param - lr * mhat / (np.sqrt(vhat) + self.eps)
        for name, new in (("m", m), ("v", v), ("param", param)):
            setattr(self, name, np.where(trained, new, getattr(self, name)))


@pytest.mark.parametrize(("kind", "limit"), [("float64", 1e-14), ("float32", 2e-6)])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.999), (0.5, 0.5)])
def test_twenty_updates_against_the_reference(kind, limit, betas):
    rng, arrays = start(kind)
    reference, optimizer = Reference(arrays["param"], *betas), AdamW(*betas)
    for count in range(1, 21):
        grad = rng.standard_normal(N) * 10.0 ** rng.uniform(-3, 3)
        arrays["grad"][...] = grad
        factor, lr = 0.5 / count, 0.01 / count
        optimizer.update(NumpyOps(), arrays, SEGMENTS, factor, lr, count)
        reference.update(factor * arrays["grad"].astype(float), lr)
        for name, want in (("param", reference.param), ("exp_avg", reference.m), ("exp_avg_sq", reference.v)):
            assert abs(arrays[name] - want).max() <= limit * max(1.0, abs(want).max()), (name, count)
        assert (arrays["grad"] == grad.astype(kind)).all()


def test_the_first_update_moves_each_element_by_the_rate():
    """Adam's first step is lr * sign(grad), whatever the gradient's size."""
    _, arrays = start("float64")
    before = arrays["param"].copy()
    arrays["grad"][...] = np.where(np.arange(N) % 2, 1e-3, -1e4)
    AdamW(decay=0.0).update(NumpyOps(), arrays, ((0, N, 0.0),), 1.0, 0.25, 1)
    assert abs(before - arrays["param"] - 0.25 * np.sign(arrays["grad"])).max() < 1e-5


def test_a_rate_of_zero_moves_nothing():
    _, arrays = start("float32")
    before = arrays["param"].copy()
    arrays["grad"][...] = 1
    AdamW().update(NumpyOps(), arrays, SEGMENTS, 1.0, 0.0, 1)
    assert arrays["param"].tobytes() == before.tobytes()
    assert (arrays["exp_avg"][:300] != 0).all()


def test_decay_is_decoupled_from_the_gradient():
    """Without a gradient, parameters that decay shrink by lr * decay; no moment sees it."""
    _, arrays = start("float64")
    before = arrays["param"].copy()
    AdamW().update(NumpyOps(), arrays, SEGMENTS, 1.0, 0.5, 1)
    assert abs(arrays["param"][:300] - 0.95 * before[:300]).max() < 1e-15
    assert (arrays["param"][300:320] == before[300:320]).all()
    assert not arrays["exp_avg"].any() and not arrays["exp_avg_sq"].any()


@pytest.mark.parametrize(
    ("limit", "norm", "factor"),
    [(1.0, 4.0, 0.25), (1.0, 1.0, 1.0), (1.0, 0.5, 1.0), (2.0, 8.0, 0.25), (0.0, 100.0, 1.0), (1.0, 0.0, 1.0)],
)
def test_clipping(limit, norm, factor):
    assert AdamW(limit=limit).clip(norm) == factor


def test_clipping_makes_the_norm_the_limit():
    gradient = np.random.default_rng(0).standard_normal(100)
    norm = math.sqrt((gradient**2).sum())
    assert abs(np.linalg.norm(AdamW(limit=0.7).clip(norm) * gradient) - 0.7) < 1e-14


def test_states_are_named():
    assert AdamW().states == ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("name", ["beta1", "beta2", "eps", "decay", "limit"])
@pytest.mark.parametrize("value", [-1e-9, 10**400, math.nan, math.inf, "0.5", None, True, 1j])
def test_wrong_settings_are_refused(name, value):
    with pytest.raises(ConfigError, match=rf"^AdamW was given {name} = .*; it must be .*0 or more[a-z0-9 ]*$"):
        AdamW(**{name: value})


@pytest.mark.parametrize("beta", [1.0, 1, 2.0])
def test_a_beta_is_below_one(beta):
    for name in ("beta1", "beta2"):
        with pytest.raises(ConfigError, match=rf"^AdamW was given {name} = {beta}; it must be 0 or more and below 1$"):
            AdamW(**{name: beta})


def test_settings_of_any_type_of_number():
    """They become floats, so that ranks whose types differ agree, and those whose values differ do not."""
    assert AdamW(0, np.float64(0.5), np.float32(0.25), np.int64(2), 3) == AdamW(0.0, 0.5, 0.25, 2.0, 3.0)
    assert {type(value) for name, value in vars(AdamW(0, decay=np.float32(0.5))).items() if name != "states"} == {float}
