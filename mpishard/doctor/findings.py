"""One thing that the doctor has to say."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """A problem, with its remedy, or a note, which needs none.

    ``name`` is for programs and does not change; ``ranks`` are those that it was found on, all where empty.
    """

    name: str
    text: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def line(self) -> str:
        """Found and remedy in one line."""
        return "; ".join(filter(None, (self.text, self.remedy)))

    def as_json(self) -> dict[str, object]:
        """Return what ``--json`` prints of it."""
        return {"name": self.name, "text": self.text, "remedy": self.remedy, "ranks": list(self.ranks)}


def problem(name: str, line: str, ranks: tuple[int, ...] = ()) -> Finding:
    """Return a finding of a line such as ``what was found; what to do``."""
    text, _, remedy = line.partition("; ")
    return Finding(name, text, remedy, ranks)


def note(name: str, text: str) -> Finding:
    """Return a finding that needs no remedy."""
    return Finding(name, text)
