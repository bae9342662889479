"""Tables of memory in MiB, as the measuring programs print them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from measure.process import MIB, Rank

__all__ = ["Peak", "outside", "parts", "rows"]


class Peak:
    """The figures of one rank, in bytes: at the start, at the peak since then, and their difference."""

    def __init__(self, rank: Rank) -> None:
        start, end = rank.mark("start"), rank.mark("end")
        self.start, self.whole = start.held.proportional, rank.peak("end")
        self.above = self.whole - self.start
        #: the same of resident sizes, in which shared pages count whole
        self.resident = end.held.most_resident - start.held.resident
        self.plan: Mapping[str, int] = end.more.get("memory", {})
        self.grown = {kind: size - start.kinds[kind] for kind, size in end.kinds.items()}

    def figures(self) -> dict[str, Any]:
        """Return all of it, for a file."""
        return vars(self)


def rows(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """Return a table: the first column to the left, the others to the right; floats with three places."""
    cells = [list(head)] + [[f"{x:.3f}" if isinstance(x, float) else str(x) for x in line] for line in lines]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(w) if not i else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))).rstrip()
        for line in cells
    )


def parts(held: Mapping[str, int]) -> str:
    """Return bytes by category in one line, in MiB, without what is nothing."""
    return ", ".join(f"{name} {size / MIB:.1f}" for name, size in held.items() if round(size / MIB, 1))


def outside(peak: Peak) -> str:
    """Return in one line what a rank holds above its start that is not in its plan, by kind of mapping."""
    total = sum(peak.plan.values())
    grown = dict(peak.grown)
    grown["anonymous"] -= total
    return f"{(peak.above - total) / MIB:.1f} ({parts(grown)})"
