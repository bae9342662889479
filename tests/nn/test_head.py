"""The tied head: chunks, predictions, memory."""

import numpy as np
import pytest

from mpishard.array.arena import Arena
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.shape_ops import ShapeOps
from mpishard.nn.head import TiedHead
from mpishard.shard.runner import StepContext

F32 = np.dtype(np.float32)
V, C = 13, 5


def setting(peaks=1 << 20):
    arena = Arena(NumpyOps(), {"saved": 0, "workspace": peaks}, poison=True)
    rng = np.random.default_rng(1)
    params = {
        "wte.weight": rng.standard_normal((V, C)),
        "ln_f.weight": rng.standard_normal(C),
        "ln_f.bias": rng.standard_normal(C),
    }
    return StepContext(arena, np.dtype(np.float64), 0), params, rng


def test_predictions_are_the_logits_of_the_loss():
    ctx, params, rng = setting()
    head, x = TiedHead(V, C, chunk=2), rng.standard_normal((7, C))
    logits, losses = np.empty((7, V)), np.empty(7)
    targets = rng.integers(0, V, 7)
    head.predict(NumpyOps(), ctx, params, x, logits)
    head.loss(NumpyOps(), ctx, params, None, x[None], targets[None], losses, 1.0, None)
    normal = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)
    expected = (normal * params["ln_f.weight"] + params["ln_f.bias"]) @ params["wte.weight"].T
    assert abs(logits - expected).max() < 1e-12
    entropy = np.log(np.exp(expected).sum(axis=1)) - expected[np.arange(7), targets]
    assert abs(losses - entropy).max() < 1e-12
    assert head.outputs() == V


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7, 100])
def test_chunks_change_nothing_but_the_order_of_sums(chunk):
    found = []
    for size in (chunk, 4):
        ctx, params, rng = setting()
        x, targets, losses = rng.standard_normal((1, 7, C)), rng.integers(0, V, (1, 7)), np.empty(7)
        grads = {name: (np.full_like(p, np.nan), False) for name, p in params.items()}
        dx = np.full_like(x, np.nan)
        TiedHead(V, C, chunk=size).loss(NumpyOps(), ctx, params, grads, x, targets, losses, 0.5, dx)
        found.append([losses, dx, *(array for array, _ in grads.values())])
    for one, other in zip(*found):
        assert abs(one - other).max() < 1e-13


def test_the_scale_is_on_gradients_and_not_on_losses():
    found = []
    for scale in (1.0, 0.25):
        ctx, params, rng = setting()
        x, targets, losses = rng.standard_normal((1, 7, C)), rng.integers(0, V, (1, 7)), np.empty(7)
        dx = np.empty_like(x)
        TiedHead(V, C).loss(NumpyOps(), ctx, params, dict.fromkeys(params), x, targets, losses, scale, dx)
        found.append((losses, dx / scale))
    assert found[0][0].tobytes() == found[1][0].tobytes()
    assert abs(found[0][1] - found[1][1]).max() < 1e-14


@pytest.mark.parametrize("tokens", [64, 640])
def test_logits_exist_for_one_chunk_at_a_time(tokens):
    """The head's workspace grows with the tokens by their features only, not by the vocabulary."""
    shapes, vocabulary, chunk = ShapeOps(), 50257, 16
    ctx = StepContext(arena := Arena(shapes, None), F32, 0)

    def shape(*extents):
        return shapes.empty(int(np.prod(extents)), F32).reshape(extents)

    params = {"wte.weight": shape(vocabulary, C), "ln_f.weight": shape(C), "ln_f.bias": shape(C)}
    x, losses = shape(1, tokens, C), shape(tokens)
    targets = shapes.empty(tokens, np.dtype(np.int64)).reshape(1, tokens)
    grads = {name: (p, False) for name, p in params.items()}
    TiedHead(vocabulary, C, chunk=chunk).loss(shapes, ctx, params, grads, x, targets, losses, 1.0, x)
    expected = 4 * (chunk * vocabulary + tokens * (C + 2))
    assert expected <= arena.peaks()["workspace"] <= expected + 4 * 64
