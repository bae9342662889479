"""AdamW over flat shards, and clipping by the global norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpishard.array.dtypes import Array
from mpishard.array.ops import AdamWStep, Ops

__all__ = ["AdamW"]


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) with fp32 states.

    Attributes:
        beta1, beta2, eps: as in Adam (Kingma & Ba 2015, algorithm 1).
        decay: weight decay of the parameters whose spec says that they decay, times the learning rate.
        limit: the gradient's global norm is clipped to it; 0 for no clipping.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1
    limit: float = 1.0
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def clip(self, norm: float) -> float:
        """Return ``min(1, limit / norm)``."""
        return self.limit / norm if 0.0 < self.limit < norm else 1.0

    def update(
        self,
        ops: Ops,
        arrays: Mapping[str, Array],
        segments: tuple[tuple[int, int, float], ...],
        factor: float,
        lr: float,
        count: int,
    ) -> None:
        """Update ``param`` (n,) from ``factor * grad`` at update number ``count`` (from 1)."""
        corrections = (1.0 - self.beta1**count, 1.0 - self.beta2**count)
        step = AdamWStep(factor, lr, self.beta1, self.beta2, self.eps, *corrections, segments)
        ops.adamw(arrays["param"], arrays["grad"], arrays["exp_avg"], arrays["exp_avg_sq"], step)
