"""Text out of a model that is being trained: every rank computes the same tokens, from gathered units."""

from __future__ import annotations

import numpy as np

from mpishard.shard.engine import Engine

__all__ = ["sample"]


def sample(engine: Engine, prompt: list[int], count: int, *, temperature: float = 0.8, seed: int = 0) -> list[int]:
    """Return the prompt and ``count`` tokens after it, each drawn given at most T before it. Collective.

    Fewer are returned by a model whose predictions are not finite.

    Args:
        prompt: at least one token.
        temperature: divides the logits; above 0.
    """
    length = engine.model.sample_shape[0]
    generator = np.random.Generator(np.random.Philox(seed))
    tokens = list(prompt)
    window = np.zeros(length, dtype=np.int64)
    for _ in range(count):
        recent = tokens[-length:]
        # What stands after the last token is not seen by it: attention is causal.
        window[: len(recent)] = recent
        logits = engine.predict(window, len(recent) - 1).astype(np.float64) / temperature
        if not np.isfinite(logits).all():
            break  # the model has diverged; every rank sees the same logits and stops here
        weights = np.exp(logits - logits.max())
        total = np.cumsum(weights)
        tokens.append(int(np.searchsorted(total, generator.random() * total[-1], side="right")))
    return tokens
