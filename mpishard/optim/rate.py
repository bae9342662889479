"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["WarmupCosine"]


@dataclass(frozen=True)
class WarmupCosine:
    """Linear warm-up, then half a cosine down to ``lowest * peak`` (Loshchilov & Hutter 2017, equation 5).

    Attributes:
        peak: the rate after warm-up.
        lowest: the last rate as a fraction of the peak.
        warmup, steps: steps of warm-up, and of the whole run.
    """

    peak: float
    lowest: float
    warmup: int
    steps: int

    def __call__(self, step: int) -> float:
        """Return the rate of a step, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - 1 - self.warmup))
        return self.peak * (self.lowest + (1.0 - self.lowest) * 0.5 * (1.0 + math.cos(math.pi * progress)))
