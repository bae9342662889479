"""The tied head of a vocabulary of 131072: its logits are never whole, on shapes and in what NumPy really takes."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest

from mpishard.array.arena import Arena
from mpishard.array.constants import IGNORE
from mpishard.array.dtypes import DTYPES, accumulator
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.shape_ops import ShapeOps
from mpishard.models.gpt2 import Gpt2
from mpishard.nn.head import TiedHead
from mpishard.shard.runner import StepContext
from tests.models.engine_access import Batch, engine_for

V, C = 131072, 8
KINDS = ("float32", "bfloat16", "float16")


def called(ops, peaks, arrays, kind, chunk):
    """One call of the loss, with all gradients; return bytes of the stacks."""
    arena = Arena(ops, peaks, poison=peaks is not None)
    params, grads, x, targets, losses, dx = arrays
    context = StepContext(arena, DTYPES[kind], 0)
    tracemalloc.clear_traces()
    TiedHead(V, C, chunk=chunk).loss(ops, context, params, grads, x, targets, losses, 1.0, dx)
    return arena.peaks()


def arrays_of(array, kind, tokens):
    """What the head is given; the gradient of the table in the accumulator's type, as an engine gives it."""
    own, wide = DTYPES[kind], accumulator(DTYPES[kind])
    shapes = {"wte.weight": (V, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
    params = {name: array(shape, own) for name, shape in shapes.items()}
    grads = {name: (array(shape, wide), False) for name, shape in shapes.items()}
    x, dx, losses = array((1, tokens, C), own), array((1, tokens, C), own), array((tokens,), wide)
    return params, grads, x, array((1, tokens), np.dtype(np.int64)), losses, dx


def on_shapes(kind, chunk, tokens):
    shapes = ShapeOps()
    found = arrays_of(lambda shape, dtype: shapes.empty(int(np.prod(shape)), dtype).reshape(shape), kind, tokens)
    return called(shapes, None, found, kind, chunk)["workspace"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 16, 256])
@pytest.mark.parametrize("tokens", [1, 20, 512, 8192])
def test_the_workspace_is_one_chunk_of_logits(tokens, chunk, kind):
    """And the normalised features and statistics of all tokens. The chunk is at most half of the tokens."""
    size, wide = DTYPES[kind].itemsize, accumulator(DTYPES[kind]).itemsize
    logits = size * V * min(chunk, -(-tokens // 2))
    rest = tokens * (size * C + 2 * wide)
    assert logits + rest <= on_shapes(kind, chunk, tokens) <= logits + rest + 4 * 64


@pytest.mark.parametrize("kind", KINDS)
def test_the_chunk_bounds_the_memory_and_not_the_tokens(kind):
    size = DTYPES[kind].itemsize
    by_chunk = [on_shapes(kind, chunk, 4096) for chunk in (32, 64, 128)]
    assert [more - less for less, more in itertools.pairwise(by_chunk)] == [32 * V * size, 64 * V * size]
    few, many = (on_shapes(kind, 64, tokens) for tokens in (128, 128 + 4096))
    assert many - few == 4096 * (size * C + 2 * 4)


@pytest.mark.parametrize("kind", KINDS)
def test_numpy_takes_no_more_than_was_planned(kind):
    """Not a row of logits beside the arena and the backend's scratch, which is there before: in fp32 neither."""
    chunk, tokens = 8, 21
    ops, rng = NumpyOps(), np.random.default_rng(0)
    ops.prepare(DTYPES[kind])
    arrays = arrays_of(lambda shape, dtype: np.zeros(shape, dtype), kind, tokens)
    params, grads, x, targets, losses, dx = arrays
    params["wte.weight"][...] = rng.standard_normal((V, C))
    params["ln_f.weight"][...] = 1.0
    x[...] = rng.standard_normal(x.shape)
    targets[...] = rng.integers(0, V, targets.shape)
    targets[0, ::5] = IGNORE
    planned = {"saved": 0, "workspace": on_shapes(kind, chunk, tokens)}
    tracemalloc.start()
    try:
        assert called(ops, planned, arrays, kind, chunk) == planned
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 16, f"{peak} bytes beside the plan; a row of logits is {V * DTYPES[kind].itemsize}"

    wide = x[0].astype(np.float64)
    normal = (wide - wide.mean(axis=1, keepdims=True)) / np.sqrt(wide.var(axis=1, keepdims=True) + 1e-5)
    logits = normal @ params["wte.weight"].astype(np.float64).T
    counted = np.flatnonzero(targets[0] != IGNORE)
    top = logits.max(axis=1)
    entropy = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top
    expected = np.zeros(tokens)
    expected[counted] = (entropy - logits[np.arange(tokens), np.maximum(targets[0], 0)])[counted]
    assert abs(losses - expected).max() < {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}[kind]
    gradient = grads["wte.weight"][0]
    # softmax - onehot sums to nothing over the vocabulary, whatever it is multiplied with
    assert abs(gradient.sum(axis=0)).max() < 0.05 * abs(gradient).sum(axis=0).max()
    assert np.isfinite(dx.astype(np.float64)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_that_vocabulary_trains(kind):
    """Through the engine: its workspace holds one chunk, and the loss of new weights is that of a guess."""
    sizes = Gpt2(layers=1, width=8, heads=2, sequence=16, vocabulary=V, attention_block=8, head_chunk=2)
    engine = engine_for(sizes, batch=2, dtype_name=kind, poison=False)
    result = engine.step(Batch(sizes, 2), lr=0.001)
    chunk = 2 * V * DTYPES[kind].itemsize
    assert chunk <= engine.arena.peaks()["workspace"] < 1.1 * chunk
    assert result.updated
    assert abs(result.loss - np.log(V)) < 0.05
