"""Who computed, who waited, and for whom: a run's times as one row a rank.

[Note: the late rank]
A collective cannot end before its last rank has come to it. What the others had waited by then they waited for that
rank, and for nothing else; what they wait afterwards is the time of the communication. The late rank is the one for
which the others have waited longest in this sense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mpishard.shard.results import hidden_share
from mpishard.timeline.reading import RankTrace
from mpishard.timeline.spans import MEET, communications, measured, pairs, unit_of

__all__ = ["RankSummary", "late_rank", "lines", "summarise"]

_UNITS = 3


@dataclass
class RankSummary:
    """One rank's seconds over the steps that were timed.

    Attributes:
        computing, waiting, in_flight: of its own time; collectives that are in flight together count each.
        last: collectives to which it came last.
        caused: for which others waited because it had not come.
        units: unit -> seconds in which it waited for its collectives.
    """

    rank: int
    host: str
    computing: float = 0.0
    waiting: float = 0.0
    in_flight: float = 0.0
    exposed: float = 0.0
    last: int = 0
    caused: float = 0.0
    units: dict[str, float] = field(default_factory=dict)

    @property
    def hidden(self) -> float | None:
        """The share of its communication that was hidden."""
        return hidden_share(self.in_flight, self.exposed)


def summarise(traces: Sequence[RankTrace]) -> list[RankSummary]:
    """Return a row for each rank."""
    rows = [RankSummary(trace.rank, trace.host) for trace in traces]
    waits = pairs(traces[0].instructions)
    for trace, row in zip(traces, rows, strict=True):
        for step in trace.steps:
            for span in measured(trace, step):
                if span.lane == "computing":
                    row.computing += span.seconds
                    continue
                row.waiting += span.seconds
                unit = "the step's begin" if span.name == MEET else unit_of(span.name)
                row.units[unit] = row.units.get(unit, 0.0) + span.seconds
                if waits.get(span.index, span.index) != span.index:  # started before, so it could have been hidden
                    row.exposed += span.seconds
                    row.in_flight += 0.0 if trace.progress == "background" else span.seconds
            for span in communications(trace, step):
                if trace.progress == "background" and waits.get(span.index) != span.index:
                    row.in_flight += span.seconds
    if len(traces) > 1:
        for position in range(len(traces[0].steps)):
            _blame(traces, rows, waits, position)
    return rows


def _blame(traces: Sequence[RankTrace], rows: Sequence[RankSummary], waits: dict[int, int], position: int) -> None:
    """Add to each rank what others waited for it in a step."""
    steps = [trace.steps[position] for trace in traces]
    meetings = [([step.came for step in steps], [step.came for step in steps])]
    meetings += [
        ([step.times[start] for step in steps], [step.times[end] for step in steps]) for end, start in waits.items()
    ]
    for came, stood in meetings:
        latest = max(came)
        rank = came.index(latest)
        error = traces[rank].error
        rows[rank].last += 1
        rows[rank].caused += sum(
            max(0.0, latest - begin - error - trace.error)
            for other, (begin, trace) in enumerate(zip(stood, traces, strict=True))
            if other != rank
        )


def late_rank(rows: Sequence[RankSummary]) -> RankSummary | None:
    """Return the rank that the others waited for longest; None for one rank, or where nobody waited for anybody."""
    worst = max(rows, key=lambda row: row.caused)
    return worst if len(rows) > 1 and worst.caused > 0 else None


def lines(rows: Sequence[RankSummary], traces: Sequence[RankTrace]) -> list[str]:
    """Return what people read: the late rank, and a table of milliseconds a step."""
    steps = [step.number for step in traces[0].steps]
    many = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    count = len(steps)
    error = max(trace.error for trace in traces)
    clocks = f", clocks within {1e6 * error:.0f} us" if error else ", one clock"
    text = [f"{many} of {len(rows)} rank{'s' if len(rows) > 1 else ''} over {traces[0].transport}{clocks}"]
    collectives = count * (len(pairs(traces[0].instructions)) + 1)
    if (late := late_rank(rows)) is not None:
        text.append(
            f"rank {late.rank} is late: it came last to {late.last} of {collectives} meetings, and the others waited "
            f"{1e3 * late.caused / count:.2f} ms a step for it"
        )
    elif len(rows) > 1:
        text.append("no rank is late: nobody waited for one that had not come")
    text += ["", "rank  computing    waiting   hidden     last  waited for it  most waited for (ms a step)"]
    for row in rows:
        hidden = "-" if row.hidden is None else f"{100 * row.hidden:.0f} %"
        most = sorted(row.units.items(), key=lambda item: -item[1])[:_UNITS]
        units = ", ".join(f"{unit} {1e3 * seconds / count:.2f}" for unit, seconds in most)
        text.append(
            f"{row.rank:4}  {1e3 * row.computing / count:9.2f}  {1e3 * row.waiting / count:9.2f}  {hidden:>7}  "
            f"{row.last:7}  {1e3 * row.caused / count:13.2f}  {units}"
        )
    return text
