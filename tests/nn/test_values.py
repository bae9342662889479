"""Forward values against plain float64: a wrong forward may well have a right gradient."""

import math

import numpy as np
import pytest

from mpishard.array.arena import Arena
from mpishard.array.numpy_ops import NumpyOps
from mpishard.nn.attention import CausalSelfAttention
from mpishard.nn.block import Block
from mpishard.nn.embedding import Embedding
from mpishard.shard.runner import StepContext


def forward(layer, params, x):
    arena = Arena(NumpyOps(), {"saved": 1 << 18, "workspace": 1 << 18}, poison=True)
    y = np.full(layer.output_shape(x.shape), np.nan)
    layer.forward(NumpyOps(), StepContext(arena, np.dtype(np.float64), 0), params, x, y)
    return y


def setting(layer, shape, seed=0):
    rng = np.random.default_rng(seed)
    params = {spec.name: spec.value + 0.5 * rng.standard_normal(spec.shape) for spec in layer.param_specs()}
    return params, rng.standard_normal(shape)


def attention(p, x, heads):
    """One row of one head at a time."""
    batch, length, width = x.shape
    size = width // heads
    q, k, v = np.split(x @ p["attn.c_attn.weight"] + p["attn.c_attn.bias"], 3, axis=2)
    mixed = np.empty_like(x)
    for b in range(batch):
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            for t in range(length):
                weights = np.exp(k[b, : t + 1, part] @ q[b, t, part] / math.sqrt(size))
                mixed[b, t, part] = weights @ v[b, : t + 1, part] / weights.sum()
    return mixed @ p["attn.c_proj.weight"] + p["attn.c_proj.bias"]


def norm(p, name, x):
    center = x - x.mean(axis=-1, keepdims=True)
    return center / np.sqrt((center**2).mean(axis=-1, keepdims=True) + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


@pytest.mark.parametrize("rows", [0, 1, 3, 64])
@pytest.mark.parametrize(("shape", "heads"), [((2, 7, 6), 3), ((1, 5, 3), 1), ((3, 1, 4), 2)])
def test_attention(shape, heads, rows):
    layer = CausalSelfAttention("attn", shape[-1], heads, block=rows)
    params, x = setting(layer, shape)
    assert abs(forward(layer, params, x) - attention(params, x, heads)).max() < 1e-13


@pytest.mark.parametrize("tanh", [True, False])
def test_block(tanh):
    layer = Block(6, 3, tanh=tanh, attention_block=3)
    p, x = setting(layer, (2, 7, 6))
    r = x + attention(p, norm(p, "ln_1", x), 3)
    u = norm(p, "ln_2", r) @ p["mlp.c_fc.weight"] + p["mlp.c_fc.bias"]
    if tanh:
        bent = np.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))
    else:
        bent = np.vectorize(math.erf)(u / math.sqrt(2))
    expected = r + 0.5 * u * (1 + bent) @ p["mlp.c_proj.weight"] + p["mlp.c_proj.bias"]
    assert abs(forward(layer, p, x) - expected).max() < 1e-12


@pytest.mark.parametrize("rows", [0, 1, 3, 64])
def test_nothing_sees_a_later_token(rows):
    layer = Block(6, 3, attention_block=rows)
    params, x = setting(layer, (1, 7, 6))
    y = forward(layer, params, x)
    for t in range(6):
        other = x.copy()
        other[:, t + 1 :] += 1.0
        assert forward(layer, params, other)[:, : t + 1].tobytes() == y[:, : t + 1].tobytes()


def test_embedding():
    layer = Embedding(5, 9, 3)
    params, _ = setting(layer, ())
    tokens = np.array([[4, 0, 4, 2], [1, 1, 3, 0]])
    expected = params["wte.weight"][tokens] + params["wpe.weight"][:4]
    assert abs(forward(layer, params, tokens) - expected).max() == 0
