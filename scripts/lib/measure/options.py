"""Arguments that the measuring programs share."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["full_shard_option"]


def full_shard_option(word: str) -> tuple[str, Any]:
    """Return name and value of ``name=value``; a value that is JSON counts as that, any other as a word.

    Raises:
        ValueError: there is no ``=``.
    """
    name, equals, value = word.partition("=")
    if not equals:
        raise ValueError
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
