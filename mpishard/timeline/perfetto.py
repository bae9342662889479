"""A run's times as a trace file: JSON in Chrome's trace event format, which https://ui.perfetto.dev opens.

Each rank is a process; its threads are what was planned, what it computed, what it waited for, and what it had in
flight. Viewers give spans a colour by their name; ``cname`` is red for waits where a viewer heeds it, and waits have
names and a category of their own for those that do not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpishard.errors import ConfigError
from mpishard.timeline.reading import RankTrace
from mpishard.timeline.spans import Span, communications, measured, planned
from mpishard.timeline.summary import late_rank, summarise

__all__ = ["events", "lanes", "write_trace"]

_PLANNED, _PLANNED_BESIDE, _COMPUTING, _WAITING, _COMMUNICATING = range(5)
_THREADS = {
    _PLANNED: "planned: computing",
    _PLANNED_BESIDE: "planned: in flight",
    _COMPUTING: "computing",
    _WAITING: "waiting",
    _COMMUNICATING: "in flight",
}
#: threads that a lane may take where its spans overlap
_ROOM = 100


def lanes(spans: Sequence[Span]) -> list[int]:
    """Return a lane for each span, in which it overlaps no other; lanes are few and counted from 0."""
    free: list[float] = []
    found = [0] * len(spans)
    for place in sorted(range(len(spans)), key=lambda i: (spans[i].begin, spans[i].end)):
        span = spans[place]
        lane = next((i for i, end in enumerate(free) if end <= span.begin), len(free))
        if lane == len(free):
            free.append(0.0)
        free[lane] = span.end
        found[place] = lane
    return found


def events(traces: Sequence[RankTrace]) -> Iterator[dict[str, Any]]:
    """Yield the events of all ranks; microseconds since the first rank came to the first step."""
    zero = min(trace.steps[0].came for trace in traces)
    late = late_rank(summarise(traces))
    plans = [planned(traces, position) for position in range(len(traces[0].steps))]
    for trace in traces:
        threads: dict[int, str] = {}
        spans: list[tuple[int, int, Span]] = []
        for position, step in enumerate(trace.steps):
            in_order, beside = plans[position]
            done = measured(trace, step)
            groups = {
                _PLANNED: in_order,
                _PLANNED_BESIDE: beside,
                _COMPUTING: [span for span in done if span.lane == "computing"],
                _WAITING: [span for span in done if span.lane == "waiting"],
                _COMMUNICATING: communications(trace, step),
            }
            for thread, group in groups.items():
                for lane, span in zip(lanes(group), group, strict=True):
                    spans.append((thread * _ROOM + lane, step.number, span))
                    threads[thread * _ROOM + lane] = _THREADS[thread] + (f" {lane + 1}" if lane else "")
        is_late = late is not None and late.rank == trace.rank
        name = f"rank {trace.rank} ({trace.host}){', late' if is_late else ''}"
        yield {"ph": "M", "name": "process_name", "pid": trace.rank, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": trace.rank, "args": {"sort_index": trace.rank}}
        for thread, text in sorted(threads.items()):
            whose = {"ph": "M", "pid": trace.rank, "tid": thread}
            yield {**whose, "name": "thread_name", "args": {"name": text}}
            yield {**whose, "name": "thread_sort_index", "args": {"sort_index": thread}}
        for thread, number, span in spans:
            event: dict[str, Any] = {
                "ph": "X",
                "name": f"wait: {span.name}" if span.lane == "waiting" else span.name,
                "cat": span.lane,
                "pid": trace.rank,
                "tid": thread,
                "ts": round(1e6 * (span.begin - zero), 3),
                "dur": round(1e6 * span.seconds, 3),
                "args": {"step": number, "instruction": span.index},
            }
            if span.lane == "waiting":
                event["cname"] = "terrible"
            yield event


def write_trace(traces: Sequence[RankTrace], path: Path) -> None:
    """Write the trace file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8") as file:
            json.dump({"traceEvents": list(events(traces)), "displayTimeUnit": "ms"}, file)
            file.write("\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); choose another with --perfetto") from None
