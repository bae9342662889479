"""JSON that is read in one way only: a key that stands twice, of which readers take one or the other, is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["parse_json", "shown"]


def parse_json(text: str | bytes, what: str, refuse: Callable[[str], NoReturn]) -> Any:
    """Return what a JSON text (bytes in UTF-8) says.

    Args:
        what: names the text in what ``refuse`` gets, such as ``its header``.
        refuse: called with the problem where it is no JSON, is nested too deep, or holds a key twice; raises.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            refuse(f"{what} has {shown(twice)} twice")
        return found

    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        refuse(f"{what} is no JSON")


def shown(text: str) -> str:
    """Return a text from a file so that a message of one line can hold it."""
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 80 else f"{text[:77]}..."
