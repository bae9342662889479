"""The loss curve of a run: points some steps apart, the same whether the run went on or never stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Curve"]


@dataclass
class Curve:
    """Collects points.

    Attributes:
        spacing: steps between points at most.
        points: (steps done, mean training loss since the point before, held-out loss or None).
    """

    spacing: int
    points: list[tuple[int, float, float | None]] = field(default_factory=list)
    _recent: list[float] = field(default_factory=list)

    def add(self, steps: int, loss: float, heldout: float | None, *, last: bool = False) -> None:
        """Add the step after which ``steps`` are done."""
        self._recent.append(loss)
        if last or heldout is not None or steps % self.spacing == 0:
            self.points.append((steps, sum(self._recent) / len(self._recent), heldout))
            self._recent = []

    def replay(self, record: Mapping[str, Any]) -> None:
        """Add a step from what was written about it; null is a loss that was not finite."""
        loss = record["loss"]
        heldout = record.get("heldout_loss")
        self.add(record["step"] + 1, float("nan") if loss is None else loss, heldout)
