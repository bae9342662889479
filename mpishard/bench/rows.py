"""What a measurement of a collective says, and the document that all of them make together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mpishard.bench.statistics import Fit, Summary, bus_factor, fit, ratio

__all__ = ["References", "Row", "document", "fits"]


@dataclass(frozen=True)
class References:
    """Seconds of what a row is compared with, measured in turn with it: the baseline, a copy and a sum of its size."""

    baseline: float | None
    copy: float
    add: float


@dataclass(frozen=True)
class Row:
    """One operation of one size on one transport.

    Attributes:
        dtype: as it was asked for: fp32, bf16.
        bytes: of the whole message, all ranks' parts together.
        seconds: median over samples of the slowest rank's time.
        vs_baseline, vs_copy, vs_add: how many times as fast as the baseline, as a copy, and as a sum of as many bytes
            by every rank at once; None for no baseline.
        correct: every element on every rank was right, before the samples and after them.
    """

    op: str
    transport: str
    algorithm: str
    dtype: str
    ranks: int
    bytes: int
    seconds: float
    p10: float
    p90: float
    samples: int
    algbw_GBps: float  # noqa: N815 - GB is how it is written
    busbw_GBps: float  # noqa: N815
    vs_baseline: float | None
    vs_copy: float | None
    vs_add: float | None
    correct: bool

    @classmethod
    def of(
        cls,
        op: str,
        variant: tuple[str, str],
        dtype: str,
        ranks: int,
        nbytes: int,
        found: Summary,
        references: References,
        *,
        correct: bool,
    ) -> Row:
        """Return the row of a measurement; ``variant`` is the transport and the algorithm."""
        bandwidth = nbytes / found.seconds * 1e-9 if found.seconds > 0 else 0.0
        return cls(
            op, *variant, dtype, ranks, nbytes, found.seconds, found.p10, found.p90, found.samples,
            bandwidth, bandwidth * bus_factor(op, ranks), ratio(references.baseline, found.seconds),
            ratio(references.copy, found.seconds), ratio(references.add, found.seconds), correct,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """The variant, as it is written on the command line."""
        return self.transport if self.algorithm == "auto" else f"{self.transport}:{self.algorithm}"


def fits(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the line through the sizes of each (op, transport, algorithm, dtype) that has three or more."""
    points: dict[tuple[str, str, str, str], list[tuple[int, float]]] = {}
    for row in rows:
        points.setdefault((row.op, row.transport, row.algorithm, row.dtype), []).append((row.bytes, row.seconds))
    found: list[tuple[tuple[str, str, str, str], Fit]] = []
    for key, each in points.items():
        if (line := fit(each)) is not None:
            found.append((key, line))
    return [dict(zip(("op", "transport", "algorithm", "dtype"), key, strict=True)) | asdict(f) for key, f in found]


def document(host: Mapping[str, Any], rows: Sequence[Row], notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return what ``--json`` writes; docs/benchmarks.md describes it."""
    return {"host": dict(host), "rows": [asdict(row) for row in rows], "fits": fits(rows), "notes": list(notes)}
