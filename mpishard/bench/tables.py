"""Measurements for people: a table of each operation and type, and the lines through their sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from mpishard.bench.rows import Row
from mpishard.bench.sizes import readable
from mpishard.bench.statistics import Summary
from mpishard.bench.steps import KINDS, StepRow

__all__ = ["collective_table", "duration", "fit_table", "step_table", "times"]


def duration(seconds: float) -> str:
    """Return a time with three digits: ``12.3 us``, ``4.56 ms``, ``1.20 s``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale or unit == "us":
            value = seconds / scale
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    raise AssertionError


def times(value: float | None) -> str:
    """Return how many times as fast, or ``-``."""
    return "-" if value is None else f"{value:.2f}x"


def collective_table(rows: Sequence[Row], baseline: str) -> Table:
    """Return the table of one operation and type, sizes one below the other; wrong results say so."""
    first = rows[0]
    title = f"{first.op} {first.dtype}, {first.ranks} ranks; times as fast as {baseline}, as a copy, as a sum"
    table = Table(title=title, title_justify="left", pad_edge=False)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("variant", no_wrap=True)
    for name in ("median", "p10", "p90", "algbw GB/s", "busbw GB/s", "baseline", "copy", "sum"):
        table.add_column(name, justify="right", no_wrap=name not in ("algbw GB/s", "busbw GB/s"))
    table.add_column("", no_wrap=True)
    size = None
    for row in rows:
        if size not in (None, row.bytes):
            table.add_section()
        table.add_row(
            "" if size == row.bytes else readable(row.bytes),
            row.name,
            *(duration(value) for value in (row.seconds, row.p10, row.p90)),
            *(f"{value:.3g}" for value in (row.algbw_GBps, row.busbw_GBps)),
            *(times(value) for value in (row.vs_baseline, row.vs_copy, row.vs_add)),
            "" if row.correct else "WRONG",
        )
        size = row.bytes
    return table


def fit_table(fits: Sequence[Mapping[str, Any]]) -> Table:
    """Return the latency and the bandwidth of each operation, variant and type."""
    table = Table(title="t = alpha + bytes / bandwidth", title_justify="left", pad_edge=False)
    for name in ("operation", "type", "variant"):
        table.add_column(name, no_wrap=True)
    for name in ("alpha", "GB/s", "off by at most"):
        table.add_column(name, justify="right")
    for line in fits:
        variant = line["transport"] if line["algorithm"] == "auto" else f"{line['transport']}:{line['algorithm']}"
        bandwidth = "-" if line["GBps"] is None else f"{line['GBps']:.3g}"
        table.add_row(
            line["op"], line["dtype"], variant, duration(line["alpha"]), bandwidth, f"{100 * line['worst']:.0f} %"
        )
    return table


def step_table(rows: Sequence[StepRow], without: Summary, ranks: int) -> Table:
    """Return a step on each transport, and the one without communication."""
    title = f"one training step, {ranks} ranks, {without.samples} of each; collectives: in flight / standing still"
    table = Table(title=title, title_justify="left", pad_edge=False)
    table.add_column("transport", no_wrap=True)
    for name in ("step", "p90", "alone", "hidden"):
        table.add_column(name, justify="right", no_wrap=True)
    for kind in KINDS:
        table.add_column(kind.replace("_", " "), justify="right")
    table.add_column("bits")
    for row in rows:
        shown = "-" if row.hidden is None else f"{100 * row.hidden:.0f} %"
        table.add_row(
            row.transport if row.algorithm == "auto" else f"{row.transport}:{row.algorithm}",
            *(duration(value) for value in (row.seconds, row.p90, row.alone)),
            shown,
            *(f"{duration(row.busy[kind])} / {duration(row.waited[kind])}" for kind in KINDS),
            ("the first" if row is rows[0] else "the same") if row.same_bits else "OTHERS",
        )
    table.add_section()
    table.add_row("none", *(duration(value) for value in (without.seconds, without.p90)))
    return table
