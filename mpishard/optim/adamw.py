"""AdamW over flat shards, and clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mpishard.array.dtypes import Array
from mpishard.array.ops import AdamWStep, Ops
from mpishard.errors import ConfigError
from mpishard.shard.entry import number

__all__ = ["AdamW"]


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) with fp32 states.

    Attributes:
        beta1, beta2, eps: as in Adam (Kingma & Ba 2015, algorithm 1).
        decay: weight decay of the parameters whose spec says that they decay, times the learning rate.
        limit: the gradient's global norm is clipped to it; 0 for no clipping.

    Raises:
        ConfigError: one of them is no finite number, is negative, or, of the betas, 1 or more.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1
    limit: float = 1.0
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    writes_cast: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2", "eps", "decay", "limit"):
            given, beta = getattr(self, name), name.startswith("beta")
            value = number(given)
            if not 0.0 <= value < (1.0 if beta else math.inf):
                kind = "0 or more and below 1" if beta else "a finite number, 0 or more"
                raise ConfigError(f"AdamW was given {name} = {given!r}; it must be {kind}")
            # One type, so that the ranks' digests of their optimisers compare values.
            object.__setattr__(self, name, value)

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
        """Update ``param`` (n,), and ``cast`` if it is there, from ``factor * grad`` at update ``count`` (from 1)."""
        corrections = (1.0 - self.beta1**count, 1.0 - self.beta2**count)
        step = AdamWStep(factor, lr, self.beta1, self.beta2, self.eps, *corrections, segments)
        param, grad, exp_avg, exp_avg_sq = (arrays[name] for name in ("param", "grad", *self.states))
        ops.adamw(param, grad, exp_avg, exp_avg_sq, step, arrays.get("cast"))
