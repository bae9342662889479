"""GPT-2 (Radford et al. 2019) with the names and shapes of its public checkpoints and a tied head.

Units: ``root`` (wte, wpe, ln_f: read by both ends of the model) and one per block, ``h.0`` to ``h.(L-1)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpishard.errors import ConfigError
from mpishard.nn.block import Block
from mpishard.nn.embedding import Embedding
from mpishard.nn.head import TiedHead
from mpishard.nn.model import Model, Stage, Unit

__all__ = ["Gpt2", "gpt2"]


@dataclass(frozen=True)
class Gpt2:
    """Sizes and choices of a GPT-2.

    Attributes:
        layers, width, heads: blocks, features, attention heads; heads divides width.
        sequence: tokens of a training sequence.
        vocabulary: number of token values.
        dropout: rate on the embedding and on both branches of each block.
        gelu_tanh: GELU's tanh form (the public checkpoints' ``gelu_new``), else exact.
        attention_block: query rows that attention works at once, at most half of a sequence; 0 for all of it.
        head_chunk: tokens whose logits exist at once.
        positions: positions that the model knows, at least ``sequence``; 0 for as many as the sequence has.
        std: deviation of initial weights; branches' last matrices take ``std / sqrt(2 * layers)``.
    """

    layers: int
    width: int
    heads: int
    sequence: int
    vocabulary: int
    dropout: float = 0.0
    gelu_tanh: bool = True
    attention_block: int = 64
    head_chunk: int = 256
    positions: int = 0
    std: float = 0.02


def gpt2(sizes: Gpt2) -> Model:
    """Return the model.

    Raises:
        ConfigError: heads does not divide width, or a sequence is longer than the positions.
    """
    if sizes.width % sizes.heads:
        raise ConfigError(f"{sizes.heads} heads do not divide a width of {sizes.width}; choose a divisor of the width")
    positions = sizes.positions or sizes.sequence
    if sizes.sequence > positions:
        raise ConfigError(
            f"a sequence of {sizes.sequence} tokens is longer than the {positions} positions of the model; "
            "use shorter sequences or more positions"
        )
    embedding = Embedding(sizes.vocabulary, positions, sizes.width, dropout=sizes.dropout, std=sizes.std)
    head = TiedHead(sizes.vocabulary, sizes.width, chunk=sizes.head_chunk, std=sizes.std)
    # Layers hold nothing, so every block is the same object.
    block = Block(
        sizes.width,
        sizes.heads,
        dropout=sizes.dropout,
        tanh=sizes.gelu_tanh,
        attention_block=sizes.attention_block,
        std=sizes.std,
        std_out=sizes.std / math.sqrt(2 * max(1, sizes.layers)),
    )
    names = [f"h.{i}" for i in range(sizes.layers)]
    root = Unit("root", "", embedding.param_specs() + head.ln_f.param_specs(), keep=True)
    return Model(
        units=(root, *(Unit(name, f"{name}.", block.param_specs()) for name in names)),
        stages=(
            Stage("embed", embedding, ("root",), ()),
            *(Stage(name, block, (name,), (name,)) for name in names),
            Stage("head", head, ("root",), ("root",)),
        ),
        sample_shape=(sizes.sequence,),
        sample_dtype="int64",
        target_shape=(sizes.sequence,),
        public_prefix="transformer.",
    )
