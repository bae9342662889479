"""Shapes for a model of which the number of parameters alone is known.

They are those of GPT-3 (Brown et al. 2020, table 2.1): heads of 128 features, 50,257 tokens, sequences of 2,048, and a
width of about 128 times the layers, as its largest model has (96 layers, width 12,288). Smaller models of that
table are less wide; what a plan says of one is a first guess, and says that it is.
"""

from __future__ import annotations

import math

from mpishard.models.gpt2 import Gpt2

__all__ = ["ASPECT", "HEAD", "SEQUENCE", "SOURCE", "VOCABULARY", "assumed_sizes"]

SOURCE = "GPT-3's aspect ratio (Brown et al. 2020, table 2.1)"
ASPECT = 128
HEAD = 128
VOCABULARY = 50257
SEQUENCE = 2048
#: how far the parameters of the shapes may be from those asked for while a rounder width is taken
_NEAR = 0.02


def assumed_sizes(parameters: int, *, vocabulary: int = VOCABULARY, sequence: int = SEQUENCE) -> Gpt2:
    """Return a GPT of about so many parameters: within 3 % from 1e6 on.

    The width is a multiple of 128 where that comes near, else of a smaller power of two, so that heads
    have 128, 64, 32, ... features. A number too small for the vocabulary gives the smallest such model.
    """
    rows = vocabulary + sequence
    middle = _layers(parameters, rows)
    near: list[tuple[float, int, int]] = []
    far: list[tuple[float, int, int]] = []
    rounding = HEAD
    while rounding and not near:
        for layers in range(max(1, math.floor(middle * 0.85)), max(2, math.ceil(middle * 1.15)) + 1):
            exact = _width(parameters, layers, rows)
            for width in {max(1, math.floor(exact / rounding)) * rounding, math.ceil(exact / rounding) * rounding}:
                error = abs(_count(layers, width, rows) / parameters - 1)
                far.append((error, layers, width))
                if error <= _NEAR:
                    near.append((abs(layers - middle), layers, width))
        rounding //= 2
    _, layers, width = min(near or far)
    head = math.gcd(width, HEAD)
    # A width below one head's is one head.
    heads = width // head if width > HEAD else 1
    return Gpt2(layers=layers, width=width, heads=heads, sequence=sequence, vocabulary=vocabulary)


def _count(layers: int, width: float, rows: int) -> float:
    """Parameters of a GPT-2: a block has 12 matrices of width x width, and 13 vectors."""
    return rows * width + 2 * width + layers * (12 * width * width + 13 * width)


def _width(parameters: int, layers: int, rows: int) -> float:
    linear = rows + 2 + 13 * layers
    return (math.sqrt(linear * linear + 48 * layers * parameters) - linear) / (24 * layers)


def _layers(parameters: int, rows: int) -> float:
    """Layers, as a real number, of a model whose width is ``ASPECT`` times as many."""
    low, high = 0.0, (parameters / (12 * ASPECT**2)) ** (1 / 3) + 1
    for _ in range(60):
        half = (low + high) / 2
        width = ASPECT * half
        count = (rows + 2) * width + half * (12 * width * width + 13 * width)
        low, high = (half, high) if count < parameters else (low, half)
    return low
