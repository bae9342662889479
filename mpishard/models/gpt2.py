"""GPT-2 (Radford et al. 2019) with the names and shapes of its public checkpoints and a tied head.

Units: ``root`` (wte, wpe, ln_f: read by both ends of the model) and one per block, ``h.0`` to ``h.(L-1)``.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpishard.errors import CheckpointError, ConfigError
from mpishard.nn.block import Block
from mpishard.nn.embedding import Embedding
from mpishard.nn.head import TiedHead
from mpishard.nn.model import Model, Stage, Unit

__all__ = ["Gpt2", "gpt2", "public_config", "sizes_from"]


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
        recompute_attention: blocks keep attention's input alone, and backward makes the rest again; changes no bit.
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
    recompute_attention: bool = False


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
        recompute_attention=sizes.recompute_attention,
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
        ignored=(".attn.bias", ".attn.masked_bias"),  # the causal mask and what it fills in
        ties=(("lm_head.weight", "wte.weight"),),
    )


def public_config(sizes: Gpt2) -> dict[str, Any]:
    """Return the ``config.json`` with which other tools open a checkpoint of these sizes as a GPT-2.

    The keys are those of Hugging Face's ``GPT2LMHeadModel``. Attention probabilities are not dropped; the mark
    that begins and ends a text is token 50256 in the public vocabulary and no token in any other.
    """
    mark = 50256 if sizes.vocabulary == 50257 else None
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": sizes.vocabulary,
        "n_positions": sizes.positions or sizes.sequence,
        "n_embd": sizes.width,
        "n_layer": sizes.layers,
        "n_head": sizes.heads,
        "n_inner": None,
        "activation_function": "gelu_new" if sizes.gelu_tanh else "gelu",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": sizes.std,
        "embd_pdrop": sizes.dropout,
        "resid_pdrop": sizes.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": mark,
        "eos_token_id": mark,
    }


#: what a GPT-2 of another kind would say under these keys, and what this one computes
_ONLY = {
    "model_type": ("gpt2",),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
}

#: the largest sizes that are taken from a file: far beyond any GPT-2, and within what the plan of a run can compute
_MOST = {"n_layer": 10_000, "n_embd": 10**8, "n_head": 10**8, "n_positions": 10**8, "vocab_size": 10**8}


def sizes_from(config: Mapping[str, Any], origin: str) -> Gpt2:
    """Return the sizes that a public ``config.json`` describes; the sequence is as long as the positions.

    Args:
        config: what the file holds, as :func:`public_config` makes it; keys that are absent have GPT-2's values.
        origin: names the file in errors.

    Raises:
        CheckpointError: it describes another kind of model, or a size is absent, no whole number from 1 on, or beyond
            any GPT-2.
    """
    if not isinstance(config, Mapping) or "model_type" not in config:
        raise CheckpointError(f"{origin}: has no model_type; the config.json of a GPT-2 is needed")
    for key, known in _ONLY.items():
        if config.get(key, known[0]) not in known:
            raise CheckpointError(
                f"{origin}: {key} is {reprlib.repr(config[key])}; "
                f"this GPT-2 computes with {' or '.join(map(repr, known))} alone"
            )
    sizes = {}
    for key, most in _MOST.items():
        size = config.get(key)
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= most:
            raise CheckpointError(f"{origin}: {key} is {reprlib.repr(size)}; it must be a whole number in 1 .. {most}")
        sizes[key] = size
    inner = config.get("n_inner")
    if inner not in (None, 4 * sizes["n_embd"]):
        raise CheckpointError(
            f"{origin}: n_inner is {reprlib.repr(inner)}; this GPT-2 has 4 times n_embd, {4 * sizes['n_embd']}"
        )
    return Gpt2(
        layers=sizes["n_layer"],
        width=sizes["n_embd"],
        heads=sizes["n_head"],
        sequence=sizes["n_positions"],
        vocabulary=sizes["vocab_size"],
        gelu_tanh=config.get("activation_function", "gelu_new") != "gelu",
        positions=sizes["n_positions"],
    )
