"""Text out of a model: every rank computes the same tokens, from gathered units."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpishard.array.dtypes import Array
from mpishard.shard.engine import Engine

__all__ = ["choose", "sample"]


def sample(
    engine: Engine,
    prompt: list[int],
    count: int,
    *,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    told: Callable[[int], None] | None = None,
) -> list[int]:
    """Return the prompt and ``count`` tokens after it, each drawn given at most T before it. Collective.

    All ranks see the same logits and draw the same numbers, so they end together. Fewer tokens are returned by a
    model whose predictions are not finite.

    Args:
        prompt: at least one token.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw among the k most likely tokens; 0 for all.
        told: called with each new token.
    """
    length = engine.model.sample_shape[0]
    generator = np.random.Generator(np.random.Philox(seed))
    tokens = list(prompt)
    window = np.zeros(length, dtype=np.int64)
    for _ in range(count):
        recent = tokens[-length:]
        # What stands after the last token is not seen by it: attention is causal.
        window[: len(recent)] = recent
        logits = engine.predict(window, len(recent) - 1).astype(np.float64)
        if not np.isfinite(logits).all():
            break  # the model has diverged
        tokens.append(choose(logits, generator.random(), temperature, top_k))
        if told is not None:
            told(tokens[-1])
    return tokens


def choose(logits: Array, draw: float, temperature: float, top_k: int) -> int:
    """Return the token that a number in [0, 1) selects: logits (V,) float64.

    The first of equally likely tokens counts as the likelier one.
    """
    if temperature == 0.0:
        return int(np.argmax(logits))
    kept = np.arange(logits.size)
    if 0 < top_k < logits.size:
        kept = np.sort(np.argsort(-logits, kind="stable")[:top_k])
    with np.errstate(over="ignore"):  # a temperature near 0 makes the differences infinite
        weights = np.exp((logits[kept] - logits.max()) / temperature)
    total = np.cumsum(weights)
    return int(kept[np.searchsorted(total, draw * total[-1], side="right")])
