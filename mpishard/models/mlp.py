"""A classifier of feature vectors: hidden layers with GELU, and a linear head with cross-entropy.

Units: one per hidden layer, ``hidden.0`` to ``hidden.(L-1)``, and ``head``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpishard.errors import ConfigError
from mpishard.nn.classifier import Hidden, LinearHead
from mpishard.nn.model import Model, Stage, Unit

__all__ = ["MlpClassifier", "mlp_classifier"]


@dataclass(frozen=True)
class MlpClassifier:
    """Sizes of a classifier.

    Attributes:
        features: numbers of a sample.
        classes: values of a target.
        width, layers: outputs of a hidden layer, and hidden layers; 0 layers is logistic regression.
        gelu_tanh: GELU's tanh form, else exact.
    """

    features: int
    classes: int
    width: int = 64
    layers: int = 2
    gelu_tanh: bool = True


def mlp_classifier(sizes: MlpClassifier) -> Model:
    """Return the model: samples (F,) float32, one target each; parameters ``hidden.0.weight`` to ``head.bias``.

    Weights begin normal with deviation ``sqrt(2 / inputs)`` (He et al. 2015, section 2.2), the head's with
    ``sqrt(1 / inputs)``; biases begin at zero.

    Raises:
        ConfigError: a size is out of its range.
    """
    for name, least in (("features", 1), ("classes", 1), ("width", 1), ("layers", 0)):
        if (found := getattr(sizes, name)) < least:
            raise ConfigError(f"{name} is {found}; it must be {least} or more")
    inputs = [sizes.features] + [sizes.width] * sizes.layers
    hidden = [
        (f"hidden.{i}", Hidden(f"hidden.{i}", size, sizes.width, std=math.sqrt(2.0 / size), tanh=sizes.gelu_tanh))
        for i, size in enumerate(inputs[:-1])
    ]
    head = LinearHead("head", inputs[-1], sizes.classes, std=math.sqrt(1.0 / inputs[-1]))
    return Model(
        units=(*(Unit(name, "", layer.param_specs()) for name, layer in hidden), Unit("head", "", head.param_specs())),
        stages=(
            # Nobody needs the gradient of the features, so the first backward reads no weight.
            *(Stage(name, layer, (name,), () if i == 0 else (name,)) for i, (name, layer) in enumerate(hidden)),
            Stage("head", head, ("head",), ("head",)),
        ),
        sample_shape=(sizes.features,),
        sample_dtype="float32",
        target_shape=(),
    )
