"""Layers on bfloat16 and float16: close to float64, with statistics, losses and sums in float32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mpishard.array.constants import IGNORE
from mpishard.array.dtypes import DTYPES, accumulator
from mpishard.nn.attention import CausalSelfAttention
from mpishard.nn.block import Block
from mpishard.nn.classifier import Hidden, LinearHead
from mpishard.nn.embedding import Embedding
from mpishard.nn.head import TiedHead
from mpishard.nn.layer import LossLayer
from mpishard.nn.linear import Linear
from mpishard.nn.mlp import Mlp
from mpishard.nn.norm import LayerNorm
from mpishard.testing.stage import Problem, machine_for

NARROW = ("bfloat16", "float16")
F32 = np.dtype(np.float32)
#: a layer, the shape of x, and the tokens or classes
LAYERS = {
    "linear": (lambda: Linear("fc", 33, 65), (3, 5, 33), 0),
    "norm": (lambda: LayerNorm("ln", 48), (7, 48), 0),
    "embedding": (lambda: Embedding(5, 9, 7, dropout=0.2), (6, 8), 5),
    "attention": (lambda: CausalSelfAttention("attn", 24, 3, block=4), (2, 33, 24), 0),
    "attention at once": (lambda: CausalSelfAttention("attn", 24, 3, block=0), (2, 33, 24), 0),
    "attention again": (lambda: CausalSelfAttention("attn", 24, 3, block=4, recompute=True), (2, 33, 24), 0),
    "mlp": (lambda: Mlp("mlp", 24, 96), (2, 9, 24), 0),
    "block": (lambda: Block(24, 3, attention_block=4, dropout=0.1), (2, 33, 24), 0),
    "hidden": (lambda: Hidden("hidden", 24, 32, tanh=False), (9, 24), 0),
    "linear head": (lambda: LinearHead("head", 24, 7), (11, 24), 7),
    "tied head": (lambda: TiedHead(31, 24, chunk=5), (3, 7, 24), 31),
}


def problem_of(name, kind, seed=0):
    """Values that ``kind`` holds exactly, in float64."""
    make, shape, numbers = LAYERS[name]
    rng, layer = np.random.default_rng(seed), make()

    def draw(*shape):
        return rng.standard_normal(shape).astype(DTYPES[kind]).astype(float)

    params = {s.name: (s.value + 0.3 * draw(*s.shape)).astype(DTYPES[kind]).astype(float) for s in layer.param_specs()}
    if isinstance(layer, LossLayer):
        targets = rng.integers(0, numbers, shape[:-1])
        targets.reshape(-1)[::3] = IGNORE
        return Problem(make, draw(*shape), params, targets, True, True)
    x = rng.integers(0, numbers, shape) if numbers else draw(*shape)
    return Problem(make, x, params, draw(*layer.output_shape(shape)), True, True)


def narrowed(problem, kind):
    def cast(array):
        return array if array.dtype.kind == "i" else array.astype(DTYPES[kind])

    params = {name: cast(array) for name, array in problem.params.items()}
    return replace(problem, x=cast(problem.x), params=params, dy=cast(problem.dy))


def results(problem, kind, gradients=""):
    """The output, and the gradients in the type ``gradients``."""
    wide = DTYPES[gradients or kind]
    grads = {name: (np.full(p.shape, np.nan, wide), False) for name, p in problem.params.items()}
    dx = None if problem.integers else np.full_like(problem.x, np.nan)
    y = machine_for(problem, kind=kind).run(problem, grads, dx)
    return {"y": y, **{name: array for name, (array, _) in grads.items()}} | ({} if dx is None else {"x": dx})


def error(found, expected):
    return float(np.linalg.norm(found.astype(float) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("wide", [False, True], ids=["own", "accumulated"])
@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_near_float64(name, kind, wide):
    problem = problem_of(name, kind)
    expected = results(problem, "float64")
    found = results(narrowed(problem, kind), kind, "float32" if wide else "")
    unit = 2.0 ** (-8 if kind == "bfloat16" else -11)
    for part, array in found.items():
        assert error(array, expected[part]) <= 4 * unit, f"{part}: {error(array, expected[part]):.1e}"


@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("name", ["norm", "attention", "block"])
def test_statistics_are_kept_in_the_accumulators_type(name, kind):
    problem = narrowed(problem_of(name, kind), kind)
    machine = machine_for(problem, kind=kind)
    machine.allow([problem.x, *problem.params.values()])
    y = machine.array(problem.make().output_shape(problem.x.shape), DTYPES[kind])
    machine.allow([y], more=True)
    record = machine.forward("forward", problem.make(), problem.params, problem.x, y)
    rows = int(np.prod(problem.x.shape[:-1]))

    def arrays(saved):
        return [saved] if isinstance(saved, np.ndarray) else [a for item in saved or () for a in arrays(item)]

    statistics = [a for a in arrays(record) if a.shape == (rows,) or a.shape == (2, 3, 33)]
    assert len(statistics) == {"norm": 2, "attention": 1, "block": 5}[name]
    assert {a.dtype for a in statistics} == {F32}
    others = [a for a in arrays(record) if not any(a is s for s in statistics)]
    assert {a.dtype for a in others} == {DTYPES[kind]}


@pytest.mark.parametrize("name", ["linear head", "tied head"])
def test_losses_are_of_the_accumulators_type(name):
    problem = narrowed(problem_of(name, "bfloat16"), "bfloat16")
    assert results(problem, "bfloat16")["y"].dtype == accumulator(DTYPES["bfloat16"]) == F32


def test_blocks_of_attention_cost_no_precision():
    """dk and dv are sums over blocks: 65 of them here."""
    errors = []
    for block in (0, 1):
        make = lambda block=block: CausalSelfAttention("attn", 8, 1, block=block)  # noqa: E731
        rng = np.random.default_rng(1)

        def draw(*shape, rng=rng):
            return rng.standard_normal(shape).astype(DTYPES["bfloat16"]).astype(float)

        params = {s.name: draw(*s.shape) * 0.25 for s in make().param_specs()}
        problem = Problem(make, draw(1, 65, 8), params, draw(1, 65, 8), True, True)
        expected = results(problem, "float64")
        found = results(narrowed(problem, "bfloat16"), "bfloat16", "float32")
        errors.append(error(found["attn.c_attn.weight"], expected["attn.c_attn.weight"]))
    assert errors[1] <= 1.2 * errors[0]


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_attention_in_wide_types_gathers_nothing(kind):
    """Its workspace: the gradients of heads, q, k and v, delta, and two rooms for scores."""
    batch, length, width, heads, block = 2, 33, 24, 3, 4
    problem = problem_of("attention", kind)
    peaks = machine_for(narrowed(problem, kind), kind=kind).arena.workspace.capacity
    size = batch * length * (width + 3 * width + heads) + 2 * heads * block * length
    assert size <= peaks // DTYPES[kind].itemsize <= size + 4 * 16
