"""The whole model in float64, through the engine: derivatives of the loss along random directions."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mpishard.models.gpt2 import Gpt2
from tests.models.engine_access import Batch, engine_for, named, summed_gradients, widen

SMALL = Gpt2(layers=2, width=6, heads=3, sequence=7, vocabulary=11, attention_block=3, head_chunk=3)
STEP = 2e-5  # as in mpishard/testing/layer.py
LIMIT = 1e-7


def loss(engine, batch) -> float:
    """Summed loss of a training step that changes nothing, always with the masks of step 0."""
    engine.steps = 0
    result = engine.step(batch, lr=0.0)
    return result.loss * result.tokens


def check(sizes: Gpt2, *, batch: int = 2, ignored: str = "none", **options) -> float:
    """Return the worst relative error, of each parameter and of all together."""
    engine, feed = engine_for(sizes, batch=batch, **options), Batch(sizes, batch, ignored)
    widen(engine)
    params = named(engine, "param")
    start = {name: param.copy() for name, param in params.items()}
    loss(engine, feed)
    slopes = summed_gradients(engine)
    rng, worst = np.random.default_rng(1), 0.0
    for names in [*([name] for name in params), list(params), list(params)]:
        direction = {name: rng.standard_normal(params[name].shape) for name in names}

        def along(h: float, direction=direction) -> float:
            for name, way in direction.items():
                params[name][...] = start[name] + h * way
            found = loss(engine, feed)
            for name in direction:
                params[name][...] = start[name]
            return found

        outer, inner = along(2 * STEP) - along(-2 * STEP), along(STEP) - along(-STEP)
        numeric = (8 * inner - outer) / (12 * STEP)
        exact = float(sum((slopes[name] * way).sum() for name, way in direction.items()))
        largest = max(abs(numeric), abs(exact))
        error = abs(numeric - exact) / largest if largest > 1e-9 else 0.0
        assert error <= LIMIT, f"along {', '.join(names)}: {exact!r} is not {numeric!r}, relative error {error:.1e}"
        worst = max(worst, error)
    return worst


@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_recomputation_and_both_gelus(tanh, recompute):
    check(replace(SMALL, gelu_tanh=tanh), recompute=recompute, ignored="some")


@pytest.mark.parametrize("rows", [0, 1, 64])
def test_attention_blocks(rows):
    check(replace(SMALL, attention_block=rows, layers=1), batch=1)


@pytest.mark.parametrize("chunk", [1, 256])
def test_head_chunks(chunk):
    check(replace(SMALL, head_chunk=chunk, layers=1), batch=3, ignored="some")


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_dropout(recompute):
    check(replace(SMALL, dropout=0.2), recompute=recompute)


def test_micro_batches():
    check(SMALL, batch=3, micro_batch=1, ignored="some")


@pytest.mark.parametrize(
    "sizes",
    [
        Gpt2(layers=1, width=5, heads=1, sequence=1, vocabulary=3),
        Gpt2(layers=1, width=3, heads=3, sequence=4, vocabulary=2),
        Gpt2(layers=0, width=3, heads=1, sequence=4, vocabulary=5),
        Gpt2(layers=1, width=1, heads=1, sequence=3, vocabulary=4),
        Gpt2(layers=1, width=4, heads=2, sequence=3, vocabulary=1),
    ],
    ids=lambda s: f"L{s.layers}-C{s.width}-H{s.heads}-T{s.sequence}-V{s.vocabulary}",
)
@pytest.mark.parametrize("batch", [1, 2])
def test_sizes_of_one(sizes, batch):
    check(sizes, batch=batch)


def test_nothing_counts():
    """All targets ignored: no loss, no gradient, no update, and the next step is a whole one."""
    engine = engine_for(SMALL, batch=2)
    before = {name: param.copy() for name, param in named(engine, "param").items()}
    result = engine.step(Batch(SMALL, 2, "all"), lr=0.1)
    assert (result.tokens, result.updated) == (0, False)
    assert math.isnan(result.loss)
    assert all((gradient == 0).all() for gradient in named(engine, "grad").values())
    assert all((param == before[name]).all() for name, param in named(engine, "param").items())
    check(SMALL, ignored="some")


def test_poison_changes_no_bit():
    """NaN in memory that was released, taken back or not yet arrived."""
    found = []
    for poison in (True, False):
        engine = engine_for(replace(SMALL, dropout=0.1), batch=2, micro_batch=1, poison=poison)
        results = [engine.step(Batch(SMALL, 2, seed=s), lr=0.01) for s in range(3)]
        found.append(
            ([(r.loss, r.grad_norm) for r in results], {n: p.tobytes() for n, p in named(engine, "param").items()})
        )
    assert found[0] == found[1]
