"""Every layer through the shared suite, at odd sizes, at one and across the borders of tiles and blocks."""

import inspect

import pytest

from mpishard.array.numpy_tiles import TILE
from mpishard.nn import activation, attention, block, classifier, embedding, head, linear, mlp, norm
from mpishard.nn.activation import Dropout, Gelu
from mpishard.nn.attention import CausalSelfAttention
from mpishard.nn.block import Block
from mpishard.nn.classifier import Hidden, LinearHead
from mpishard.nn.embedding import Embedding
from mpishard.nn.head import TiedHead
from mpishard.nn.layer import Layer, LossLayer
from mpishard.nn.linear import Linear
from mpishard.nn.mlp import Mlp
from mpishard.nn.norm import LayerNorm
from mpishard.testing import check_layer, check_loss

CHECKED = {Linear, LayerNorm, Gelu, Dropout, Embedding, CausalSelfAttention, Mlp, Block, Hidden, LinearHead, TiedHead}


def test_every_layer_is_checked_here():
    modules = (activation, attention, block, classifier, embedding, head, linear, mlp, norm)
    found = {c for m in modules for _, c in inspect.getmembers(m, inspect.isclass) if issubclass(c, Layer | LossLayer)}
    assert found - {Layer, LossLayer} == CHECKED


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("x_shape", "outputs"), [((3, 5, 7), 11), ((1, 1, 1), 1), ((13, 1), 3), ((1, 9), 1), ((7,), 5)]
)
def test_linear(x_shape, outputs, bias):
    check_layer(lambda: Linear("fc", x_shape[-1], outputs, bias=bias), x_shape)


@pytest.mark.parametrize("x_shape", [(3, 5, 7), (1, 1, 1), (1, 33), (17, 1), (2, 1, 2), (TILE // 7 + 2, 7)])
def test_layer_norm(x_shape):
    check_layer(lambda: LayerNorm("ln", x_shape[-1]), x_shape)


@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize("x_shape", [(3, 5, 7), (1, 1, 1), (TILE + 1,)])
def test_gelu(x_shape, tanh):
    check_layer(lambda: Gelu(tanh), x_shape)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("x_shape", [(3, 5, 7), (1, 1, 1), (TILE // 2 + 1, 1)])
def test_dropout(x_shape, rate, training):
    check_layer(lambda: Dropout("drop", rate), x_shape, training=training)


@pytest.mark.parametrize(
    ("shape", "vocabulary", "positions", "width"),
    [((3, 4), 7, 9, 5), ((1, 1), 1, 1, 1), ((1, 1), 5, 3, 2), ((2, 7), 1, 7, 3), ((5, 1), 3, 2, 1), ((1, 9), 2, 10, 3)],
)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_embedding(shape, vocabulary, positions, width, dropout):
    check_layer(lambda: Embedding(vocabulary, positions, width, dropout=dropout), shape, tokens=vocabulary, reads=False)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 64])
@pytest.mark.parametrize(
    ("x_shape", "heads"),
    [((2, 7, 6), 3), ((1, 5, 3), 1), ((1, 1, 1), 1), ((3, 1, 4), 2), ((1, 4, 3), 3), ((1, 65, 2), 1)],
)
def test_attention(x_shape, heads, rows, recompute):
    if rows == 64 and x_shape[1] < 64:
        rows = min(rows, x_shape[1])  # as a model does it, and as large as the sequence
    check_layer(lambda: CausalSelfAttention("attn", x_shape[-1], heads, block=rows, recompute=recompute), x_shape)


def test_attention_of_blocks_longer_than_the_sequence():
    check_layer(lambda: CausalSelfAttention("attn", 6, 3, block=64), (2, 5, 6))


@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize(("x_shape", "hidden"), [((3, 5, 7), 9), ((1, 1, 1), 1), ((1, 3), 12)])
def test_mlp(x_shape, hidden, tanh):
    check_layer(lambda: Mlp("mlp", x_shape[-1], hidden, tanh=tanh), x_shape)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize(
    ("x_shape", "heads", "rows"), [((2, 7, 6), 3, 3), ((1, 1, 1), 1, 64), ((1, 1, 4), 1, 0), ((3, 5, 2), 2, 1)]
)
def test_block(x_shape, heads, rows, tanh, dropout):
    check_layer(lambda: Block(x_shape[-1], heads, dropout=dropout, tanh=tanh, attention_block=rows), x_shape)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("x_shape", "heads", "rows"), [((2, 7, 6), 3, 3), ((1, 1, 1), 1, 64), ((3, 5, 2), 2, 0)])
def test_block_that_recomputes_attention(x_shape, heads, rows, dropout):
    make = lambda: Block(x_shape[-1], heads, dropout=dropout, attention_block=rows, recompute_attention=True)  # noqa: E731
    check_layer(make, x_shape)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_block_that_does_not_train(dropout, recompute):
    make = lambda: Block(6, 3, dropout=dropout, attention_block=3, recompute_attention=recompute)  # noqa: E731
    check_layer(make, (2, 7, 6), training=False)


@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("chunk", [1, 3, 256])
@pytest.mark.parametrize(
    ("x_shape", "vocabulary"), [((3, 5, 7), 11), ((1, 1, 1), 1), ((1, 1, 3), 5), ((2, 3, 1), 4), ((1, 7, 4), 1)]
)
def test_tied_head(x_shape, vocabulary, chunk, ignored):
    check_loss(lambda: TiedHead(vocabulary, x_shape[-1], chunk=chunk), x_shape, classes=vocabulary, ignored=ignored)


@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize(("x_shape", "outputs"), [((3, 5, 7), 11), ((1, 1), 1), ((13, 1), 3), ((1, 9), 1), ((7,), 5)])
def test_hidden(x_shape, outputs, tanh):
    check_layer(lambda: Hidden("hidden.0", x_shape[-1], outputs, tanh=tanh), x_shape)


@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize(("x_shape", "classes"), [((7, 5), 11), ((1, 1), 1), ((2, 3, 4), 2), ((5, 1), 4), ((1, 3), 5)])
def test_linear_head(x_shape, classes, ignored):
    check_loss(lambda: LinearHead("head", x_shape[-1], classes), x_shape, classes=classes, ignored=ignored)
