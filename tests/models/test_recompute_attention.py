"""Attention made again in backward, through the engine: the same bits, less memory."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from mpishard.models.gpt2 import Gpt2
from tests.models.engine_access import Batch, engine_for, named, widen
from tests.models.test_gradient import check

SMALL = Gpt2(layers=3, width=24, heads=3, sequence=21, vocabulary=31, attention_block=4, head_chunk=16)
AGAIN = {"recompute_attention": True}


def trained(sizes, kind, recompute, steps=3):
    """Losses, norms, gradients and parameters of some steps, in two micro-batches."""
    engine = engine_for(sizes, batch=4, micro_batch=2, dtype_name=kind, recompute=recompute)
    widen(engine, std=0.1)
    found = []
    for step in range(steps):
        result = engine.step(Batch(sizes, 4, "some", seed=step), lr=0.01)
        assert result.updated
        grads = {name: gradient.tobytes() for name, gradient in named(engine, "grad").items()}
        found.append((result.loss, result.grad_norm, grads, engine.checksum()))
    return found, engine.memory()["saved"]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["float64", "float32", "bfloat16", "float16"])
def test_the_same_bits_with_and_without_and_with_blocks_recomputed_too(kind, dropout):
    sizes = replace(SMALL, dropout=dropout)
    ways = [
        trained(replace(sizes, recompute_attention=again), kind, recompute)
        for again, recompute in itertools.product((False, True), ("none", "block"))
    ]
    (expected, kept), *others = ways
    assert len({gradient for _, _, grads, _ in expected for gradient in grads.values()}) > 3 * 12 * SMALL.layers
    for found, saved in others:
        assert found == expected
        assert saved < kept


@pytest.mark.parametrize(("kind", "size"), [("float32", 4), ("bfloat16", 2)])
def test_each_block_keeps_a_quarter_less(kind, size):
    """4 numbers a token and feature of 16, and the log-sums; all sizes here are multiples of 64 bytes."""
    sizes = Gpt2(layers=3, width=64, heads=4, sequence=16, vocabulary=32, attention_block=8)
    saved = [
        engine_for(replace(sizes, recompute_attention=again), batch=2, dtype_name=kind).memory()["saved"]
        for again in (False, True)
    ]
    tokens = 2 * sizes.sequence
    assert saved[0] - saved[1] == sizes.layers * tokens * (4 * sizes.width * size + sizes.heads * 4)


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_derivative(recompute):
    sizes = Gpt2(layers=2, width=6, heads=3, sequence=7, vocabulary=11, attention_block=3, dropout=0.2, **AGAIN)
    check(sizes, recompute=recompute, ignored="some")


def test_predictions_and_evaluation_are_the_same():
    found = []
    for again in (False, True):
        engine = engine_for(replace(SMALL, recompute_attention=again), batch=2, dtype_name="float32")
        widen(engine)
        batch = Batch(SMALL, 2)
        found.append((engine.evaluate(batch).loss, engine.predict(batch.tokens[0], 7).tobytes()))
    assert found[0] == found[1]
