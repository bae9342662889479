"""The model that a configuration describes."""

from __future__ import annotations

from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.nn.model import Model
from mpishard.train.sections import ModelConfig

__all__ = ["build_model", "sizes_of"]


def build_model(config: ModelConfig) -> Model:
    """Return the model that a configuration describes."""
    return gpt2(sizes_of(config))


def sizes_of(config: ModelConfig) -> Gpt2:
    """Return the GPT-2 that a configuration describes."""
    return Gpt2(
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        sequence=config.sequence,
        vocabulary=config.vocabulary,
        dropout=config.dropout,
        gelu_tanh=config.gelu == "tanh",
        attention_block=config.attention_block,
        head_chunk=config.head_chunk,
        positions=config.positions,
        std=config.init_std,
    )
