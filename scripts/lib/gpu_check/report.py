"""What a part found: problems, tables, figures and notes; and how that is shown as text and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from numbers import Integral
from typing import Any

__all__ = ["FORMAT", "Report", "Skip", "Table", "Task", "markdown", "shown"]

#: Of the JSON files; a change that older ones cannot be rendered after makes it larger.
FORMAT = 1


class Skip(Exception):  # noqa: N818 - it is no error
    """A part cannot run here; the reason is half a sentence."""


@dataclass
class Table:
    """``note`` stands below the rows and says what was measured or bounded."""

    title: str
    columns: list[str]
    rows: list[list[Any]] = field(default_factory=list)
    note: str = ""

    def row(self, *cells: Any) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for the columns {', '.join(self.columns)}")
        self.rows.append(list(cells))


@dataclass
class Report:
    """``figures`` are what other parts and programs read; all of it goes to the JSON file as it is."""

    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def table(self, title: str, *columns: str, note: str = "") -> Table:
        self.tables.append(Table(title, list(columns), note=note))
        return self.tables[-1]

    def require(self, right: bool, problem: str) -> None:
        if not right:
            self.problems.append(problem)

    def as_dict(self) -> dict[str, Any]:
        return _plain(asdict(self))


def _plain(value: Any) -> Any:
    """JSON has no NaN and no NumPy numbers."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if math.isfinite(value) else str(float(value))


@dataclass(frozen=True)
class Task:
    """What a part is given.

    Attributes:
        device: index of the GPU.
        small: tiny sizes, whose figures mean nothing: to run the code where there is no GPU.
        seconds: what is left for the part.
        known: the figures of the parts that ran before, by part.
        python: how a further process of this program is started.
    """

    device: int = 0
    small: bool = False
    seconds: float = 600.0
    known: dict[str, dict[str, Any]] = field(default_factory=dict)
    python: tuple[str, ...] = ()

    def size(self, full: Any, small: Any) -> Any:
        return small if self.small else full


# --- how it is shown


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[Any]], markdown: bool) -> list[str]:
    texts = [[_text(cell) for cell in row] for row in rows]
    right = [all(_is_number(row[i]) or row[i] is None for row in rows) and bool(rows) for i in range(len(columns))]
    widths = [max(len(columns[i]), *(len(row[i]) for row in texts), 3) for i in range(len(columns))]
    lines = []
    for line in [list(columns), *texts]:
        cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right)]
        lines.append(f"| {' | '.join(cells)} |" if markdown else "  " + "  ".join(cells).rstrip())
    if markdown:
        marks = ["-" * (w - 1) + ":" if r else "-" * w for w, r in zip(widths, right)]
        lines.insert(1, f"| {' | '.join(marks)} |")
    return lines


def shown(part: dict[str, Any]) -> str:
    """A part's result as lines for the screen."""
    head = f"{part['name']}: {part['status']} ({part['seconds']:.1f} s)"
    lines = [head + (f": {part['why']}" if part.get("why") else "")]
    for table in part.get("tables", []):
        lines += ["", f"  {table['title']}", *_aligned(table["columns"], table["rows"], False)]
        lines += [f"  {table['note']}"] if table["note"] else []
    for note in part.get("notes", []):
        lines += ["", f"  {note}"]
    lines += [f"  problem: {problem}" for problem in part.get("problems", [])]
    if part.get("traceback"):
        lines += [f"  | {line}" for line in part["traceback"].splitlines()]
    return "\n".join(lines) + "\n"


def markdown(result: dict[str, Any]) -> str:
    """A whole result as a Markdown page."""
    machine = next((p.get("figures", {}) for p in result["parts"] if p["name"] == "machine"), {})
    lines = [f"# {machine.get('GPU', 'A GPU')}, {result['date'][:10]}", ""]
    facts = {key: result.get(key) for key in ("date", "mpishard", "commit", "command")}
    lines += _aligned(["what", "found"], list((facts | machine).items()), True)
    if result.get("small"):
        lines += ["", "Run with tiny sizes: the figures mean nothing."]
    rows = [[p["name"], p["status"], p["seconds"], p.get("why", "")] for p in result["parts"]]
    lines += ["", "## Parts", "", *_aligned(["part", "result", "seconds", "why"], rows, True)]
    for part in result["parts"]:
        told = part.get("tables") or part.get("notes") or part.get("problems")
        if part["name"] == "machine" or not told:
            continue
        lines += ["", f"## {part['name']}"]
        for table in part.get("tables", []):
            lines += ["", f"{table['title']}:", "", *_aligned(table["columns"], table["rows"], True)]
            lines += ["", table["note"]] if table["note"] else []
        for note in part.get("notes", []):
            lines += ["", note]
        for problem in part.get("problems", []):
            lines += ["", f"Problem: {problem}"]
    return "\n".join(lines) + "\n"
