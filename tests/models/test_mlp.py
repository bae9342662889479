"""The classifier of features: names, sizes, the whole model's derivative, and predictions by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

import mpishard
from mpishard.errors import ConfigError
from mpishard.models.mlp import MlpClassifier, mlp_classifier
from mpishard.optim import AdamW
from mpishard.shard.whole import parameter_names
from mpishard.testing import check_model

SIZES = MlpClassifier(features=5, classes=3, width=7, layers=2)


@pytest.mark.parametrize(
    "sizes",
    [SIZES, MlpClassifier(5, 3, layers=0), MlpClassifier(1, 1, width=1, layers=1), MlpClassifier(51, 4, 33, 1, False)],
    ids=lambda s: f"F{s.features}-V{s.classes}-C{s.width}-L{s.layers}",
)
def test_derivative_and_same_bits(sizes: MlpClassifier) -> None:
    check_model(lambda: mlp_classifier(sizes), ranks=(1, 3))


def test_names_shapes_and_initial_values() -> None:
    engine = mpishard.full_shard(mlp_classifier(MlpClassifier(400, 3, 300, 1)), None, global_batch=1)
    assert parameter_names(engine.state) == ("hidden.0.weight", "hidden.0.bias", "head.weight", "head.bias")
    for name, shape, std in (("hidden.0", (400, 300), math.sqrt(2 / 400)), ("head", (300, 3), math.sqrt(1 / 300))):
        weight = engine.parameter(f"{name}.weight")
        assert weight.shape == shape
        assert abs(weight.std() / std - 1) < 0.1
        assert (engine.parameter(f"{name}.bias") == 0).all()


def test_predictions() -> None:
    engine = mpishard.full_shard(mlp_classifier(SIZES), AdamW(), global_batch=4, dtype="float64", seed=3)
    x = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    for _ in range(3):
        engine.step(mpishard.batch(x, [0, 1, 2, -100]), lr=0.05)
    flow = x.astype(np.float64)
    for name in ("hidden.0", "hidden.1", "head"):
        flow = flow @ engine.parameter(f"{name}.weight") + engine.parameter(f"{name}.bias")
        if name != "head":
            flow = 0.5 * flow * (1 + np.tanh(math.sqrt(2 / math.pi) * (flow + 0.044715 * flow**3)))
    for sample, logits in zip(x, flow):
        assert abs(engine.predict(sample, 0) - logits).max() < 1e-12
    found = engine.evaluate(mpishard.batch(x, [0, 1, 2, -100]))
    losses = np.log(np.exp(flow).sum(axis=1))[:3] - flow[range(3), range(3)]
    assert found.tokens == 3
    assert abs(found.total - losses.sum()) < 1e-12


@pytest.mark.parametrize(("name", "value"), [("features", 0), ("classes", 0), ("width", 0), ("layers", -1)])
def test_sizes_out_of_range(name: str, value: int) -> None:
    sizes = {"features": 5, "classes": 3} | {name: value}
    with pytest.raises(ConfigError, match=f"^{name} is {value}; it must be {value + 1} or more"):
        mlp_classifier(MlpClassifier(**sizes))
