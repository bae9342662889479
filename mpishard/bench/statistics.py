"""What is made of samples: medians, bandwidths, ratios, and the line through them.

Bandwidths are those of nccl-tests (doc/PERFORMANCE.md): with S the bytes of the whole message, all ranks' parts
together, and t the seconds, ``algbw = S / t``; ``busbw`` is what crosses a link each way, ``algbw * (n - 1) / n``, and
twice that for an all-reduce. So it can be compared with a link's peak, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpishard.array.dtypes import Array

__all__ = ["OPS", "Fit", "Summary", "bus_factor", "fit", "ratio", "summary"]

#: the collectives that are measured
OPS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Summary:
    """Seconds: the median, and the 10th and the 90th percentile."""

    seconds: float
    p10: float
    p90: float
    samples: int


def summary(samples: Array) -> Summary:
    """Return what samples (n,), seconds of the slowest rank each, say together."""
    low, middle, high = np.percentile(samples, (10, 50, 90))
    return Summary(float(middle), float(low), float(high), int(samples.size))


def bus_factor(op: str, ranks: int) -> float:
    """Return busbw / algbw."""
    return (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks


def ratio(reference: float | None, seconds: float) -> float | None:
    """Return how many times as fast as a reference: 2.0 is half its time. None where there is no reference."""
    return None if reference is None or seconds <= 0 else reference / seconds


@dataclass(frozen=True)
class Fit:
    """``t = alpha + beta * bytes``: the latency in seconds, the bandwidth in GB/s, and how far off it is at most."""

    alpha: float
    GBps: float | None
    worst: float


def fit(points: Sequence[tuple[int, float]]) -> Fit | None:
    """Return the line through (bytes, seconds) that is nearest in relative distance; None of fewer than three sizes.

    Relative, since sizes span decades: the largest would be all that counts. Neither number is negative: the other one
    is fitted alone then.
    """
    if len({size for size, _ in points}) < 3:  # through two there is a line always
        return None
    sizes, seconds = (np.array(column, np.float64) for column in zip(*points, strict=True))
    # sum of ((a + b x - t) / t)^2
    columns = np.stack([1 / seconds, sizes / seconds], axis=1)
    ones = np.ones_like(seconds)
    scale = np.linalg.norm(columns, axis=0)
    alpha, beta = np.linalg.lstsq(columns / scale, ones, rcond=None)[0] / scale
    if alpha < 0:
        alpha, beta = 0.0, float(columns[:, 1] @ ones / (columns[:, 1] @ columns[:, 1]))
    if beta < 0:
        alpha, beta = float(columns[:, 0] @ ones / (columns[:, 0] @ columns[:, 0])), 0.0
    worst = float(np.abs((alpha + beta * sizes) / seconds - 1).max())
    return Fit(float(alpha), float(1e-9 / beta) if beta > 0 else None, worst)
