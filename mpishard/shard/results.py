"""What the engine asks of an optimiser, and what its steps give back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mpishard.array.dtypes import Array
from mpishard.array.ops import Ops
from mpishard.comm.base import Communicator

__all__ = ["Evaluation", "Optimizer", "StepResult", "hidden_share", "spent"]


class Optimizer(Protocol):
    """What the engine asks of an optimiser."""

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states kept for each element."""

    @property
    def decay(self) -> float:
        """Weight decay of the parameters that decay."""

    def clip(self, norm: float) -> float:
        """Return the factor on a gradient whose global norm is ``norm``."""

    def update(
        self,
        ops: Ops,
        arrays: Mapping[str, Array],
        segments: tuple[tuple[int, int, float], ...],
        factor: float,
        lr: float,
        count: int,
    ) -> None:
        """Update ``arrays["param"]`` from ``factor * arrays["grad"]``; ``count`` is 1 for the first update.

        The arrays, and the (start, stop, decay) of ``segments`` in them, are those of this rank's part of a unit, or of
        a chunk of it where the states are offloaded: what becomes of an element depends on that element alone.

        Where there is ``arrays["cast"]``, the engine rounds the new values into it, unless the optimiser has an
        attribute ``writes_cast`` that is True and does it itself.
        """


@dataclass(frozen=True)
class StepResult:
    """What a training step did; the same on every rank, but for ``seconds``.

    Attributes:
        loss: mean loss of the step's targets, before the update, in nats.
        grad_norm: global norm of the mean gradient, before clipping.
        updated: False where the gradient was not finite or no target counted: the update was skipped.
        more, stop: every rank has data for the next step; some rank wants to stop.
        loss_scale: by which the loss was multiplied in this step; 1 without loss scaling.
        seconds: this rank's time: ``computing``, ``waiting`` for others, ``communicating`` (in flight, hidden
            or not), ``total``; and of the collectives that carry parameters and gradients ``in_flight`` and
            ``exposed``, the part of it in which computation stood still.
    """

    step: int
    loss: float
    tokens: int
    grad_norm: float
    lr: float
    updated: bool
    more: bool
    stop: bool
    loss_scale: float
    seconds: dict[str, float] = field(compare=False)


    @property
    def hidden(self) -> float | None:
        """The share of communication that was hidden behind computing; None where there was none."""
        return hidden_share(self.seconds.get("in_flight", 0.0), self.seconds.get("exposed", 0.0))


def hidden_share(busy: float, waited: float) -> float | None:
    """Return 1 - waited / busy, from 0 to 1; None where nothing was communicated."""
    return min(1.0, max(0.0, 1.0 - waited / busy)) if busy > 0 else None


def spent(comms: Sequence[Communicator], before: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return the seconds that communicators' tallies have, less those of ``before``.

    Where nothing moves while a rank computes, a collective is in flight only while somebody waits for it.
    """
    now = dict.fromkeys(("communicating", "in_flight", "exposed"), 0.0)
    for comm in comms:
        for name, tally in comm.tallies.items():
            now["communicating"] += tally.busy
            if name in ("all_gather", "reduce_scatter"):
                now["exposed"] += tally.waited
                now["in_flight"] += tally.busy if comm.progress == "background" else tally.waited
    return {name: seconds - (before[name] if before is not None else 0.0) for name, seconds in now.items()}


@dataclass(frozen=True)
class Evaluation:
    """Loss over held-out data: the sum over ``tokens`` targets, in nats."""

    total: float
    tokens: int

    @property
    def loss(self) -> float:
        """Mean loss in nats."""
        return self.total / self.tokens if self.tokens else float("nan")
