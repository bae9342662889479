"""Backward of every layer on the GPU: along random directions against forward, and against the CPU's gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from gpu_check.arrays import from_device, on_device
from gpu_check.report import Report, Task
from mpishard.array.cupy_ops import CupyOps
from mpishard.array.dtypes import DTYPES, accumulator
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.ops import Draw
from mpishard.array.random import stream
from mpishard.nn.activation import Dropout, Gelu
from mpishard.nn.attention import CausalSelfAttention
from mpishard.nn.block import Block
from mpishard.nn.classifier import Hidden, LinearHead
from mpishard.nn.embedding import Embedding
from mpishard.nn.head import TiedHead
from mpishard.nn.linear import Linear
from mpishard.nn.mlp import Mlp
from mpishard.nn.norm import LayerNorm

__all__ = ["LAYERS", "check"]

#: Of the norm of a gradient, from the CPU's in the same type; and of a directional derivative in float64.
BOUND = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
DERIVATIVE = 1e-7
STEP = 2e-5  # of differences of the fourth order
SCALE = 0.25  # of a loss

Arrays = dict[str, np.ndarray]

#: (layer, shape of x, values of x that are tokens, classes of targets); sizes are odd where they can be
LAYERS: tuple[tuple[Callable[[], Any], tuple[int, ...], int, int], ...] = (
    (lambda: Linear("fc", 37, 29), (3, 5, 37), 0, 0),
    (lambda: LayerNorm("ln", 33), (3, 7, 33), 0, 0),
    (lambda: Gelu(True), (3, 5, 17), 0, 0),
    (lambda: Gelu(False), (3, 5, 17), 0, 0),
    (lambda: Dropout("drop", 0.3), (3, 5, 17), 0, 0),
    (lambda: Embedding(31, 9, 12, dropout=0.2), (2, 7), 31, 0),
    (lambda: CausalSelfAttention("attn", 24, 3, block=4), (2, 11, 24), 0, 0),
    (lambda: CausalSelfAttention("attn", 24, 3, block=0), (2, 11, 24), 0, 0),
    (lambda: Mlp("mlp", 12, 48), (2, 7, 12), 0, 0),
    (lambda: Block(24, 3, dropout=0.1, attention_block=4), (2, 11, 24), 0, 0),
    (lambda: Hidden("hidden", 13, 9), (5, 13), 0, 0),
    (lambda: LinearHead("head", 13, 11), (5, 13), 0, 11),
    (lambda: TiedHead(101, 12, chunk=5), (2, 7, 12), 0, 101),
    (lambda: Block(256, 4, attention_block=64), (2, 130, 256), 0, 0),  # more rows and columns than a block of threads
)


class _Context:
    """What a layer asks of its caller; memory is taken anew each time and lives as long as this."""

    training = True

    def __init__(self, ops: Any, kind: Any) -> None:
        self._ops, self._kind, self._taken = ops, kind, []

    def keep(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        self._taken.append(self._ops.empty(math.prod(shape), np.dtype(dtype or self._kind)))
        return self._taken[-1].reshape(shape)

    scratch = keep

    def frame(self) -> Any:
        return nullcontext()

    def draw(self, name: str, features: int) -> Draw:
        return Draw(7, stream(f"h.1.{name}"), 3, 5 * features)


class _Problem:
    """One layer's arguments in a type, and its runs."""

    def __init__(self, ops: Any, make: Callable[[], Any], shape: tuple[int, ...], tokens: int, classes: int) -> None:
        self.ops, self.layer, self.loss = ops, make(), classes > 0
        rng = np.random.default_rng(5)
        self.x = rng.integers(0, tokens, shape) if tokens else rng.standard_normal(shape)
        specs = self.layer.param_specs()
        self.params = {spec.name: spec.value + 0.5 * rng.standard_normal(spec.shape) for spec in specs}
        if self.loss:
            self.dy = rng.integers(0, classes, shape[:-1])
            self.dy.reshape(-1)[::3] = -100
        else:
            self.dy = rng.standard_normal(self.layer.output_shape(shape))

    def run(self, kind: str, x: Any, params: Arrays, gradients: bool) -> tuple[np.ndarray, Arrays]:
        """Return y, or the losses, and the gradients of all parameters and of x, as host arrays."""
        ops, dtype = self.ops, DTYPES[kind]
        context = _Context(ops, dtype)

        def there(value: np.ndarray) -> Any:
            return on_device(ops, value if value.dtype.kind == "i" else value.astype(dtype))

        x, dy = there(np.asarray(x)), there(self.dy)
        given = {name: there(value) for name, value in params.items()}
        dx = context.keep(x.shape) if gradients and x.dtype == dtype else None
        grads = {name: (context.keep(value.shape, self._wide(dtype)), False) for name, value in given.items()}
        if self.loss:
            y = context.keep((self.dy.size,), accumulator(dtype))
            self.layer.loss(ops, context, given, grads if gradients else None, x, dy, y, SCALE, dx)
        else:
            y = context.keep(self.layer.output_shape(x.shape))
            saved = self.layer.forward(ops, context, given, x, y)
            if gradients:
                self.layer.backward(ops, context, given, grads, saved, dy, dx)
        found = {name: self._back(gradient) for name, (gradient, _) in grads.items() if gradients}
        return self._back(y), found if dx is None else found | {"x": self._back(dx)}

    def _wide(self, dtype: Any) -> Any:
        return accumulator(dtype) if self.loss else dtype  # a loss adds chunks up

    def _back(self, x: Any) -> np.ndarray:
        return np.array(from_device(self.ops, x) if hasattr(x, "__cuda_array_interface__") else x, np.float64)

    def slopes(self, kind: str) -> Arrays:
        return self.run(kind, self.x, self.params, True)[1]

    def derivative_error(self) -> float:
        """Return the relative error of the derivative along one random direction of x and all parameters at once."""
        slopes, rng = self.slopes("float64"), np.random.default_rng(6)
        way = {name: rng.standard_normal(slope.shape) for name, slope in slopes.items()}

        def along(h: float) -> float:
            params = {name: value + h * way[name] for name, value in self.params.items()}
            y, _ = self.run("float64", self.x + h * way["x"] if "x" in way else self.x, params, False)
            return float(SCALE * y.sum() if self.loss else (y * self.dy).sum())

        numeric = (8 * (along(STEP) - along(-STEP)) - (along(2 * STEP) - along(-2 * STEP))) / (12 * STEP)
        exact = float(sum((slopes[name] * way[name]).sum() for name in slopes))
        return abs(numeric - exact) / max(abs(numeric), abs(exact), 1e-10)


def check(task: Task, report: Report) -> None:
    gpu, cpu = CupyOps(task.device), NumpyOps()
    table = report.table(
        "Gradients of layers",
        *("layer", "x", "derivative float64", *(f"from CPU's {kind}" for kind in BOUND)),
        note=f"Relative errors. Bounds: {DERIVATIVE:g} for the derivative along a random direction against differences "
        f"of forward; of a gradient's norm from the CPU's {', '.join(f'{b:g} in {k}' for k, b in BOUND.items())}.",
    )
    for make, shape, tokens, classes in LAYERS[: -1 if task.small else None]:
        ours, theirs = (_Problem(ops, make, shape, tokens, classes) for ops in (gpu, cpu))
        name = type(ours.layer).__name__
        slope = ours.derivative_error()
        report.require(slope <= DERIVATIVE, f"{name} {shape}: a directional derivative is off by {slope:.1e}")
        errors = []
        for kind, bound in BOUND.items():
            found, wanted = ours.slopes(kind), theirs.slopes(kind)
            # A gradient that is a difference of large terms is compared with the largest of the layer.
            largest = max(float(np.linalg.norm(value)) for value in wanted.values())
            apart = {n: float(np.linalg.norm(found[n] - value)) for n, value in wanted.items()}
            relative = {n: a / max(float(np.linalg.norm(wanted[n])), 1e-3 * largest) for n, a in apart.items()}
            worst = max(relative, key=lambda n: math.inf if math.isnan(relative[n]) else relative[n])
            errors.append(relative[worst])
            what = f"the gradient of {worst} in {kind} is {errors[-1]:.1e} from the CPU's"
            report.require(errors[-1] <= bound, f"{name} {shape}: {what}")
        table.row(name, "x".join(map(str, shape)), slope, *errors)
