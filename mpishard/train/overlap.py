"""How much of a run's communication was hidden behind its computing, and why it was not more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpishard.shard.engine import Engine
from mpishard.shard.results import hidden_share
from mpishard.shard.text import hideable

__all__ = ["LOW", "Overlap", "why_low"]

#: below this share of what the schedule could hide the reason is told
LOW = 0.85


@dataclass
class Overlap:
    """Sums up rank 0's steps.

    Attributes:
        ceiling: the share that the schedule could hide (:func:`mpishard.shard.text.hideable`).
        progress: as in :attr:`mpishard.comm.base.Communicator.progress`.
    """

    prefetch: int
    progress: str
    ceiling: float
    steps: int = 0
    computing: float = 0.0
    in_flight: float = 0.0
    exposed: float = 0.0

    @classmethod
    def of(cls, engine: Engine) -> Overlap:
        """Return the sums of a run that begins."""
        sizes = {name: layout.total for name, layout in engine.layouts.items()}
        return cls(engine.settings.prefetch, engine.comm.progress, hideable(engine.schedule, sizes))

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add a step's seconds."""
        self.steps += 1
        self.computing += seconds["computing"]
        self.in_flight += seconds["in_flight"]
        self.exposed += seconds["exposed"]

    @property
    def share(self) -> float | None:
        """The share that was hidden."""
        return hidden_share(self.in_flight, self.exposed)

    @property
    def why(self) -> str:
        """Why it is low, or empty."""
        return why_low(self.share, self.ceiling, self.prefetch, self.progress, self.computing, self.in_flight)

    def record(self) -> dict[str, Any]:
        """Return what the run's report says of it."""
        steps = max(1, self.steps)
        return {
            "hidden": self.share,
            "ceiling": self.ceiling,
            "why": self.why,
            "computing": self.computing / steps,
            "in_flight": self.in_flight / steps,
            "exposed": self.exposed / steps,
        }

    def told(self) -> str:
        """Return the line at the end of a run."""
        if self.share is None:
            return "communication: none"
        steps = max(1, self.steps)
        reason = f"; {self.why}" if self.why else ""
        return (
            f"communication: {100 * self.share:.0f} % hidden, {self.exposed / steps:.4f} of "
            f"{self.in_flight / steps:.4f} s a step exposed on rank 0{reason}"
        )


def why_low(
    share: float | None, ceiling: float, prefetch: int, progress: str, computing: float, in_flight: float
) -> str:
    """Say why little communication is hidden; empty where it is as much as can be expected, or there is none.

    Args:
        share: of the time in flight that was hidden, 0 to 1.
        ceiling: the share that the schedule could hide.
        prefetch: units that are gathered ahead.
        progress: what moves data while a rank computes.
        computing, in_flight: seconds; collectives that are in flight together count each.
    """
    if share is None or share >= LOW:
        return ""
    if progress == "copies":
        return "ranks of one host copy with their own cores, so there is no time in which it could be hidden"
    if progress == "none":
        return "MPI was started without threads (less than MPI_THREAD_SERIALIZED), so nothing moves while ranks compute"
    if prefetch == 0:
        return "shard.prefetch is 0, so nothing is gathered while ranks compute; set it to 1 or more"
    if share >= LOW * ceiling:
        return f"the first gather and the last reduction have nothing beside them: {100 * ceiling:.0f} % can be hidden"
    if computing < in_flight:
        return "it takes longer than the computing beside it; larger micro-batches or fewer ranks compute longer"
    return "ranks wait for one that is late, which 'mpishard timeline' of a run with --trace shows"
