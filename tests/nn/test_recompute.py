"""Attention that makes its features again in backward: the same bits of every gradient, and what is kept for them."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES, accumulator
from mpishard.array.numpy_ops import NumpyOps
from mpishard.nn.attention import CausalSelfAttention
from mpishard.nn.block import Block
from mpishard.testing.stage import Problem, machine_for, planned

KINDS = ("float64", "float32", "bfloat16", "float16")
SHAPES = [((2, 33, 24), 3, 4), ((2, 33, 24), 3, 0), ((1, 7, 6), 1, 64), ((3, 1, 4), 2, 1), ((1, 1, 1), 1, 64)]


def problem(make, shape, kind, training=True):
    """x, parameters and dy in the type ``kind``; the same values for each layer of the same parameters."""
    rng, layer = np.random.default_rng(3), make()

    def draw(*shape):
        return rng.standard_normal(shape).astype(DTYPES[kind])

    params = {s.name: (s.value + 0.4 * draw(*s.shape)).astype(DTYPES[kind]) for s in layer.param_specs()}
    return Problem(make, draw(*shape), params, draw(*layer.output_shape(shape)), training, True)


def results(given, kind, add=False, gradients=""):
    """Bits of the output and of all gradients."""
    wide = DTYPES[gradients or kind]
    grads = {name: (np.full(p.shape, 0.5 if add else np.nan, wide), add) for name, p in given.params.items()}
    dx = np.full_like(given.x, np.nan)
    y = machine_for(given, kind=kind).run(given, grads, dx)
    found = {"y": y, "x": dx, **{name: array for name, (array, _) in grads.items()}}
    assert all(np.isfinite(array.astype(np.float64)).all() for array in found.values())
    return {name: array.tobytes() for name, array in found.items()}


def both(layer, *arguments, **options):
    """The layer that keeps and the one that makes again, as ``make``."""
    name = "recompute" if layer is CausalSelfAttention else "recompute_attention"
    return [lambda again=again: layer(*arguments, **options, **{name: again}) for again in (False, True)]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "heads", "rows"), SHAPES)
def test_attention_gives_the_same_bits(shape, heads, rows, kind, add):
    kept, again = both(CausalSelfAttention, "attn", shape[-1], heads, block=rows)
    assert results(problem(kept, shape, kind), kind, add) == results(problem(again, shape, kind), kind, add)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "heads", "rows"), SHAPES)
def test_a_block_gives_the_same_bits(shape, heads, rows, kind, dropout):
    kept, again = both(Block, shape[-1], heads, attention_block=rows, dropout=dropout)
    gradients = "float32" if len(kind) > 7 else ""  # 16-bit parameters' gradients in the accumulator's type
    one, other = (results(problem(make, shape, kind), kind, gradients=gradients) for make in (kept, again))
    assert one == other


def test_the_comparison_sees_a_bit():
    """Another number of rows at once is the same mathematics in another order of sums."""
    shape = (2, 33, 24)
    one, other = (
        results(problem(lambda r=rows: CausalSelfAttention("attn", 24, 3, block=r), shape, "float32"), "float32")
        for rows in (4, 8)
    )
    assert one != other


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_keeps_12_numbers_in_place_of_16(kind):
    """A token and feature, with the output; statistics besides: of two norms, and of attention unless it recomputes."""
    batch, length, width, heads = 2, 64, 64, 4
    size, wide = DTYPES[kind].itemsize, accumulator(DTYPES[kind]).itemsize
    tokens = batch * length
    saved = [
        planned(problem(make, (batch, length, width), kind), kind, True)["saved"]
        for make in both(Block, width, heads, attention_block=16)
    ]
    norms, lse = 2 * 2 * tokens * wide, heads * tokens * wide
    assert saved == [16 * tokens * width * size + norms + lse, 12 * tokens * width * size + norms]


def test_the_price_is_workspace_of_one_attention():
    """q k v, the heads' outputs and lse lie in scratch once, however many blocks there are."""
    shape, heads, rows = (2, 64, 64), 4, 16
    peaks = [
        planned(problem(make, shape, "float32"), "float32", True)["workspace"]
        for make in both(CausalSelfAttention, "attn", 64, heads, block=rows)
    ]
    assert peaks[1] - peaks[0] == 4 * (4 * 2 * 64 * 64 + 2 * heads * 64)


@pytest.mark.parametrize("kind", KINDS)
def test_the_causal_mask_takes_no_memory(kind):
    """A whole sequence at once: the rows and keys of a mask would be a mebibyte here."""
    ops, length = NumpyOps(), 1024
    ops.prepare(DTYPES[kind])
    scores = np.random.default_rng(0).standard_normal((1, length, length)).astype(DTYPES[kind])
    lse = np.empty((1, length), accumulator(DTYPES[kind]))
    tracemalloc.start()
    try:
        ops.causal_softmax(scores, lse, 0, 0.5)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 17
    assert (scores[0].astype(float)[np.triu_indices(length, 1)] == 0).all()
    assert abs(scores.astype(float).sum(axis=-1) - 1).max() < 0.05
