"""What a run prints: a line now and then, and tables at the end. Rank 0 alone prints."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from mpishard.shard.results import StepResult

__all__ = ["compared_table", "console", "curve_table", "duration", "memory_table", "power", "progress_line", "size"]


def console(launched: bool) -> Console:
    """Return a console for standard output; wide enough for the tables where it is no terminal.

    Some launchers give their ranks terminals of their own, whose codes would end up in a log: ``launched`` says so.
    """
    terminal = sys.stdout.isatty() and not launched
    return Console(file=sys.stdout, width=None if terminal else 110, force_terminal=terminal, highlight=False)


def size(count: float) -> str:
    """Return bytes in a readable unit (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """Return a time as hours, minutes and seconds, as far as needed."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def power(scale: float) -> str:
    """Return a power of two: in figures while they are few."""
    exponent = math.frexp(scale)[1] - 1
    return f"{scale:.0f}" if 0 <= exponent <= 30 else f"2**{exponent}"


def progress_line(
    result: StepResult,
    steps: int,
    rate: float,
    held: int,
    left: float,
    scale: float | None = None,
    hidden: float | None = None,
) -> str:
    """Return the line that tells how the run goes.

    Args:
        rate: tokens a second.
        held: bytes that this rank holds.
        left: seconds.
        scale: loss scale of the next step, where the loss is scaled.
        hidden: share of the step's communication that was hidden, where there was some.
    """
    width = len(str(steps))
    now = "" if scale is None else f" (loss scale now {power(scale)})"
    skipped = "" if result.updated else f"  update skipped: the gradient is not finite{now}"
    scaled = "" if scale is None else f"scale {power(result.loss_scale)}  "
    shared = "" if hidden is None else f"  {100 * hidden:.0f} % hidden"
    return (
        f"step {result.step + 1:{width}}/{steps}  loss {result.loss:7.4f}  norm {result.grad_norm:8.3f}  "
        f"lr {result.lr:.2e}  {scaled}{rate:8.0f} tokens/s{shared}  {size(held)} held  {duration(left)} left{skipped}"
    )


def curve_table(points: Sequence[tuple[int, float, float | None]]) -> Table:
    """Return the loss curve: (step, mean training loss since the point before, held-out loss or None)."""
    table = Table(title="Loss, nats a token", title_justify="left")
    table.add_column("step", justify="right")
    table.add_column("training", justify="right")
    table.add_column("held-out", justify="right")
    table.add_column("", min_width=30)
    highest = max((loss for _, loss, _ in points if math.isfinite(loss)), default=0.0)
    for step, loss, heldout in points:
        bar = "█" * round(30 * loss / highest) if math.isfinite(loss) and highest > 0 else ""
        table.add_row(str(step), f"{loss:.4f}", "" if heldout is None else f"{heldout:.4f}", bar)
    return table


def memory_table(ranks: Sequence[Mapping[str, int]], whole: Mapping[str, int], strategy: str) -> Table:
    """Return bytes by category: each rank's (the first few), and what a rank holds where nothing is sharded."""
    many = f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''}"
    table = Table(title=f"Memory by category ({strategy}, {many})", title_justify="left")
    table.add_column("category")
    shown = ranks[:4]
    for rank, _ in enumerate(shown):
        table.add_column(f"rank {rank}", justify="right")
    if len(ranks) > len(shown):
        table.add_column(f"most of {len(ranks)}", justify="right")
    table.add_column("unsharded", justify="right")
    table.add_column("ratio", justify="right")
    rows = [(name, [held[name] for held in ranks], whole[name]) for name in whole if whole[name] or ranks[0][name]]
    rows.append(("total", [sum(held.values()) for held in ranks], sum(whole.values())))
    for name, held, unsharded in rows:
        if name == "total":
            table.add_section()
        cells = [size(count) for count in held[: len(shown)]]
        if len(ranks) > len(shown):
            cells.append(size(max(held)))
        ratio = f"{max(held) / unsharded:.2f}" if unsharded else "-"
        table.add_row(name, *cells, size(unsharded) if unsharded else "-", ratio)
    return table


def compared_table(planned: Mapping[str, int], held: Mapping[str, int], whose: str) -> Table:
    """Return bytes by category, as planned and as held."""
    table = Table(title=f"Memory by category ({whose})", title_justify="left")
    table.add_column("category")
    table.add_column("planned", justify="right")
    table.add_column("held", justify="right")
    table.add_column("", justify="left")
    rows = [(name, planned[name], held[name]) for name in held if held[name] or planned[name]]
    rows.append(("total", sum(planned.values()), sum(held.values())))
    for name, plan, found in rows:
        if name == "total":
            table.add_section()
        table.add_row(name, size(plan), size(found), "as planned" if plan == found else f"{found - plan:+,} bytes")
    return table
