"""The model that a configuration describes."""

from __future__ import annotations

from dataclasses import replace

from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.nn.model import Model, freeze
from mpishard.train.sections import ModelConfig

__all__ = ["build_model", "sizes_of"]


def build_model(config: ModelConfig, *, recompute_attention: bool = False) -> Model:
    """Return the model that a configuration describes, with the parameters frozen that it names.

    Args:
        recompute_attention: blocks make anew in backward what lies between their input and their attention's output.

    Raises:
        ConfigError: a pattern of ``model.frozen`` names no parameter, or nothing is left to train.
    """
    model = gpt2(replace(sizes_of(config), recompute_attention=recompute_attention))
    patterns = [pattern.strip() for pattern in config.frozen.split(",") if pattern.strip()]
    return freeze(model, patterns) if patterns else model


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
