"""Dropout as layers use it: named by stage and layer, counted by the step's global rows."""

import numpy as np
import pytest

from mpishard.array.arena import Arena
from mpishard.array.numpy_ops import NumpyOps
from mpishard.nn.activation import Dropout
from mpishard.nn.block import Block
from mpishard.nn.embedding import Embedding
from mpishard.shard.runner import StepContext

F64 = np.dtype(np.float64)


def context(stage="h.0", step=0, first_row=0, seed=1):
    arena = Arena(NumpyOps(), {"saved": 1 << 16, "workspace": 1 << 16}, poison=True)
    found = StepContext(arena, F64, seed)
    found.stage, found.step, found.first_row = stage, step, first_row
    return found


def mask(ctx, name="drop", rows=8, features=5):
    y = np.empty((rows, features))
    Dropout(name, 0.5).forward(NumpyOps(), ctx, {}, np.ones_like(y), y)
    return y


def test_masks_differ_by_seed_stage_layer_step_and_row():
    masks = [
        mask(context()), mask(context(seed=2)), mask(context(stage="h.1")), mask(context(), name="other"),
        mask(context(step=1)), mask(context(first_row=8)),
    ]  # fmt: skip
    assert len({m.tobytes() for m in masks}) == len(masks)


def test_rows_have_the_mask_of_their_global_number():
    whole = mask(context(), rows=24)
    parts = [mask(context(first_row=first)) for first in (0, 8, 16)]
    assert np.concatenate(parts).tobytes() == whole.tobytes()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_dropout_is_active_only_in_training(training, rate):
    ctx = context()
    ctx.training = training
    layer, x = Dropout("drop", rate), np.arange(1.0, 11.0)
    assert layer.active(ctx) == (training and rate > 0)
    y, dx = np.empty(10), np.empty(10)
    assert layer.forward(NumpyOps(), ctx, {}, x, y) is None
    layer.backward(NumpyOps(), ctx, {}, {}, None, x, dx)
    assert y.tobytes() == dx.tobytes()
    if layer.active(ctx):
        assert set((y / x).tolist()) == {0.0, 2.0}
    else:
        assert y.tobytes() == x.tobytes()
    layer.forward(NumpyOps(), ctx, {}, x, x)
    assert x.tobytes() == y.tobytes()


def test_a_block_s_dropouts_and_the_embedding_s_have_names_of_their_own():
    block, embedding = Block(4, 2, dropout=0.1), Embedding(3, 3, 4, dropout=0.1)
    assert len({block.drop_1.name, block.drop_2.name, embedding.dropout.name}) == 3
