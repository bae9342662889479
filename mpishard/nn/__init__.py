"""Layers with hand-written backward passes, and models as data."""

from mpishard.nn.activation import Dropout, Gelu
from mpishard.nn.attention import CausalSelfAttention
from mpishard.nn.block import Block
from mpishard.nn.classifier import Hidden, LinearHead
from mpishard.nn.embedding import Embedding
from mpishard.nn.head import TiedHead
from mpishard.nn.layer import Context, Grads, Layer, LossLayer, Params, ParamSpec, Saved
from mpishard.nn.linear import Linear
from mpishard.nn.mlp import Mlp
from mpishard.nn.model import Model, Stage, Unit, freeze
from mpishard.nn.norm import LayerNorm

__all__ = [
    "Block",
    "CausalSelfAttention",
    "Context",
    "Dropout",
    "Embedding",
    "Gelu",
    "Grads",
    "Hidden",
    "Layer",
    "LayerNorm",
    "Linear",
    "LinearHead",
    "LossLayer",
    "Mlp",
    "Model",
    "ParamSpec",
    "Params",
    "Saved",
    "Stage",
    "TiedHead",
    "Unit",
    "freeze",
]
