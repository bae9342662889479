"""A GPT-2 of which some parameters are frozen, through the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mpishard
from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.nn.model import freeze
from mpishard.optim import AdamW
from mpishard.testing import check_model
from tests.models.engine_access import Batch

SMALL = Gpt2(layers=2, width=18, heads=3, sequence=5, vocabulary=11, attention_block=2, head_chunk=3, dropout=0.1)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    "patterns", [["wte.*", "h.0.*"], ["*.bias", "*.ln_?.*", "wpe.*"]], ids=["blocks", "biases and norms"]
)
def test_frozen_parameters_keep_their_bits_and_the_others_train(patterns, again):
    model = freeze(gpt2(replace(SMALL, recompute_attention=again)), patterns)
    engine = mpishard.full_shard(model, AdamW(), None, global_batch=4, micro_batch=2, seed=1)
    frozen = {unit.prefix + spec.name: not spec.trainable for unit in model.units for spec in unit.specs}
    before = {name: engine.parameter(name).tobytes() for name in frozen}
    for step in range(2):
        assert engine.step(Batch(SMALL, 4, seed=step), lr=0.01).updated
    assert {name: engine.parameter(name).tobytes() == before[name] for name in frozen} == frozen
    engine.close()


def test_derivative_and_same_bits():
    check_model(lambda: freeze(gpt2(SMALL), ["wte.*", "h.0.*", "*.c_proj.bias"]), ranks=(1, 3))
