"""Kinds of devices, and their memory as their makers state it, in bytes of powers of ten."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from mpishard.errors import ConfigError

__all__ = ["DEVICES", "chosen"]

#: name -> bytes. What a driver keeps for itself is not taken off. An MI250X is two dies, each a device of its own.
DEVICES: dict[str, int] = {
    "A100-40GB": 40 * 10**9,
    "A100-80GB": 80 * 10**9,
    "H100-80GB": 80 * 10**9,
    "H200-141GB": 141 * 10**9,
    "GH200-96GB": 96 * 10**9,
    "MI250X-64GB": 64 * 10**9,
}


def chosen(names: Sequence[str] = ()) -> dict[str, int]:
    """Return the devices of these names, all without any; upper and lower case are alike.

    Raises:
        ConfigError: there is no such device.
    """
    known = {name.lower(): name for name in DEVICES}
    found = {}
    for name in names:
        if name.strip().lower() not in known:
            near = difflib.get_close_matches(name.strip().lower(), known, n=1)
            hint = f", did you mean {known[near[0]]}?" if near else ""
            raise ConfigError(
                f"there is no device {name!r}{hint}; there are {', '.join(DEVICES)}; "
                "give any other by its memory, as in --device-memory 24GB"
            )
        found[known[name.strip().lower()]] = DEVICES[known[name.strip().lower()]]
    return found or dict(DEVICES)
