"""The control exchange: one fixed record per rank and step, combined in rank order on every rank.

So every rank updates, skips, saves or stops alike, and ranks that ran different steps are named before anything
worse happens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from mpishard.errors import CommError
from mpishard.shard.exact import EXACT_BYTES, ExactSum

__all__ = ["Agreement", "Report", "combine", "compare", "describe"]

_RECORD = struct.Struct(f"<8s8sq{EXACT_BYTES}s{EXACT_BYTES}sqBBBB")


@dataclass
class Report:
    """What one rank says at the end of a step.

    Attributes:
        schedule: digest of the step it was told to run.
        executed: running digest of the collectives that it has run.
        step: number of the step.
        squares: sum of squares of its own slices of the gradient.
        loss: sum of its micro-batches' losses.
        tokens: its targets that count.
        more: it has data for the next step.
        stop: it wants the run to end after this step.
    """

    schedule: bytes
    executed: bytes
    step: int
    squares: ExactSum
    loss: ExactSum
    tokens: int
    more: bool
    stop: bool

    def pack(self) -> bytes:
        """Return the record, of one length on every rank."""
        return _RECORD.pack(
            self.schedule,
            self.executed,
            self.step,
            self.squares.pack(),
            self.loss.pack(),
            self.tokens,
            self.squares.finite,
            self.loss.finite,
            self.more,
            self.stop,
        )

    @classmethod
    def unpack(cls, record: bytes) -> Report:
        """Read what :meth:`pack` wrote."""
        schedule, executed, step, squares, loss, tokens, finite, loss_finite, more, stop = _RECORD.unpack(record)
        return cls(
            schedule,
            executed,
            step,
            ExactSum.unpack(squares, bool(finite)),
            ExactSum.unpack(loss, bool(loss_finite)),
            tokens,
            bool(more),
            bool(stop),
        )


@dataclass(frozen=True)
class Agreement:
    """What all ranks know after the exchange."""

    squares: float
    loss: float
    tokens: int
    finite: bool
    more: bool
    stop: bool


def describe(thing: object) -> str:
    """Return the settings in an object (a layer, an optimiser), and in what it is made of; no addresses, no arrays."""
    if thing is None or isinstance(thing, bool | int | float | str):
        return repr(thing)
    if isinstance(thing, tuple | list):
        return f"[{', '.join(map(describe, thing))}]"
    public = {name: value for name, value in getattr(thing, "__dict__", {}).items() if not name.startswith("_")}
    inside = ", ".join(f"{name}={describe(value)}" for name, value in sorted(public.items()))
    return f"{type(thing).__qualname__}({inside})"


def compare(digests: Sequence[bytes]) -> None:
    """Compare what the ranks are about to bind and run.

    Raises:
        CommError: on every rank, when it differs; it names the first rank that differs from rank 0.
    """
    for rank, mine in enumerate(digests):
        if mine != digests[0]:
            raise CommError(
                f"rank {rank} has schedules {mine.hex()}, rank 0 {digests[0].hex()}; "
                "all ranks need the same model, settings, optimiser, batch and seed"
            )


def combine(records: Sequence[bytes]) -> Agreement:
    """Combine the ranks' records.

    Raises:
        CommError: on every rank, when they ran different steps; it names the first rank that differs from rank 0.
    """
    reports = [Report.unpack(record) for record in records]
    for rank, report in enumerate(reports):
        for what, mine, first in (
            ("is at step", report.step, reports[0].step),
            ("was given schedule", report.schedule.hex(), reports[0].schedule.hex()),
            ("ran collectives and rates", report.executed.hex(), reports[0].executed.hex()),
        ):
            if mine != first:
                raise CommError(
                    f"rank {rank} {what} {mine}, rank 0 {first}; all ranks need the same configuration and program"
                )
    squares, loss = ExactSum(), ExactSum()
    for report in reports:
        squares.merge(report.squares)
        loss.merge(report.loss)
    return Agreement(
        squares.value,
        loss.value,
        sum(report.tokens for report in reports),
        squares.finite and loss.finite,
        all(report.more for report in reports),
        any(report.stop for report in reports),
    )
