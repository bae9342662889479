"""The control exchange: one fixed record per rank and step, combined in rank order on every rank.

So every rank updates, skips, saves or stops alike, and ranks that ran different steps are named before anything
worse happens.

[Note: what differs]
Ranks compare digests, which say that something differs and not what. Where they differ every rank knows it, so all
look together for the first difference: they compare digests of ever shorter beginnings, and halve each time.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpishard.comm.base import Communicator
from mpishard.errors import CommError
from mpishard.shard.exact import EXACT_BYTES, ExactSum
from mpishard.shard.instructions import Instruction, digest

__all__ = ["Agreement", "Report", "agree", "combine", "compare", "describe", "first_difference", "same_schedules"]

#: what an engine runs, as it is called in messages
_KINDS = ("the training step", "an evaluation", "a prediction")
#: bytes of a part that differs, as it is told
_TOLD = 160

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


def first_difference(comm: Communicator, parts: Sequence[str]) -> tuple[int, list[str]] | None:
    """Return the first place at which ranks have different parts, and every rank's; None if there is none. Collective.

    A part is told as far as it fits into ``_TOLD`` bytes.
    """
    lengths = comm.exchange(struct.pack("<q", len(parts)), "a search for what differs")
    same, differs = 0, max(struct.unpack("<q", length)[0] for length in lengths) + 1
    while differs - same > 1:
        middle = (same + differs) // 2
        mine = repr(parts[:middle]).encode()
        found = comm.exchange(hashlib.blake2b(mine, digest_size=16).digest(), "a search for what differs")
        if all(one == found[0] for one in found):
            same = middle
        else:
            differs = middle
    part = parts[same] if same < len(parts) else "nothing more"
    records = comm.exchange(part.encode(errors="replace")[:_TOLD].ljust(_TOLD, b"\0"), "what differs")
    told = [record.rstrip(b"\0").decode(errors="ignore") for record in records]
    return (same, told) if any(one != told[0] for one in told) else None


def same_schedules(comm: Communicator, schedules: Sequence[Sequence[Instruction]], facts: str) -> list[bytes]:
    """Compare what the ranks are about to bind and run; return the schedules' digests. Collective.

    Args:
        facts: settings that must be the same too.

    Raises:
        CommError: on every rank, when it differs; it names the first rank that differs from rank 0, and what does.
    """
    mine = [digest(schedule, facts) for schedule in schedules]
    found = comm.exchange(b"".join(mine), "the start of an engine")
    if any(one != found[0] for one in found):
        compare(found, _difference(comm, schedules, facts))
    return mine


def _difference(comm: Communicator, schedules: Sequence[Sequence[Instruction]], facts: str) -> str:
    """Say what differs first: an instruction, else a setting. Collective."""
    for kind, schedule in zip(_KINDS, schedules, strict=True):
        if (first := first_difference(comm, [repr(step) for step in schedule])) is not None:
            place, told = first
            rank = _other(told)
            return f"instruction {place} of {kind} is {told[rank]} on rank {rank} and {told[0]} on rank 0; "
    if (first := first_difference(comm, facts.split(", "))) is not None:
        rank = _other(first[1])
        return f"rank {rank} has {first[1][rank]} where rank 0 has {first[1][0]}; "
    return ""


def _other(told: Sequence[object]) -> int:
    """Return the first rank that differs from rank 0."""
    return next(rank for rank, one in enumerate(told) if one != told[0])


def compare(digests: Sequence[bytes], where: str = "") -> None:
    """Compare the ranks' digests of what they are about to run.

    Args:
        where: the first difference, with a semicolon behind it.

    Raises:
        CommError: on every rank, when they differ; it names the first rank that differs from rank 0.
    """
    for rank, mine in enumerate(digests):
        if mine != digests[0]:
            raise CommError(
                f"rank {rank} has schedules {mine.hex()}, rank 0 {digests[0].hex()}; {where}"
                "all ranks need the same model, settings, optimiser, batch and seed"
            )


def agree(comm: Communicator, report: Report, what: str, ran: Callable[[], list[str]]) -> Agreement:
    """Exchange the ranks' reports and combine them. Collective.

    Args:
        ran: what this rank's running digest of the step is of, in order.

    Raises:
        CommError: as :func:`combine`; where ranks ran different things it says which.
    """
    records = comm.exchange(report.pack(), what)
    try:
        return combine(records)
    except CommError as error:  # on every rank
        first = first_difference(comm, ran())
        if first is None:
            raise
        rank = _other(first[1])
        raise CommError(
            f"{error}; in step {report.step} rank {rank} has {first[1][rank]} where rank 0 has {first[1][0]}"
        ) from None


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
