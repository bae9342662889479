"""The link of a host: its rate, and the bytes that went over it. Also for ranks, which run inside their hosts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from two_hosts.units import burst

__all__ = ["INTERFACE", "LinkError", "call", "delay_words", "rate_words", "sent", "set_rate"]

#: every host's name of its end of the link
INTERFACE = "eth0"
_SBIN = "/usr/sbin:/sbin"
_QUEUE = "4mb"  # bytes that may wait for a limited link; the sender's TCP keeps less there


class LinkError(Exception):
    """The system refused something; the message is one line."""


def call(words: Sequence[str]) -> None:
    """Run a program of the system.

    Raises:
        LinkError: it is not there, or failed.
    """
    program = shutil.which(words[0]) or shutil.which(words[0], path=_SBIN)
    if program is None:
        raise LinkError(f"there is no program {words[0]}")
    done = subprocess.run([program, *words[1:]], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise LinkError(f"{' '.join(words[:5])}: {said[-1]}")


def rate_words(interface: str, rate: int) -> list[str]:
    """Return the command that lets an interface send ``rate`` bits a second (a token bucket)."""
    shape = ["tbf", "rate", f"{rate}bit", "burst", str(burst(rate)), "limit", _QUEUE]
    return ["tc", "qdisc", "replace", "dev", interface, "root", *shape]


def delay_words(interface: str, microseconds: int) -> list[str]:
    """Return the command that makes whatever an interface sends late."""
    shape = ["netem", "delay", f"{microseconds}us", "limit", "100000"]
    return ["tc", "qdisc", "replace", "dev", interface, "root", *shape]


def set_rate(rate: int | None) -> None:
    """Give the host that this process runs in another rate, in bits a second; None for no limit.

    Raises:
        LinkError: the system refuses.
    """
    if rate is not None:
        call(rate_words(INTERFACE, rate))
    elif "qdisc tbf" in _queues():
        call(["tc", "qdisc", "del", "dev", INTERFACE, "root"])


def _queues() -> str:
    program = shutil.which("tc") or shutil.which("tc", path=_SBIN) or "tc"
    return subprocess.run([program, "qdisc", "show", "dev", INTERFACE], capture_output=True, text=True).stdout


def sent(process: int | str = "self") -> int:
    """Return the bytes that the host of a process has sent over its link so far, headers included."""
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[8])
    raise LinkError(f"there is no interface {INTERFACE}; this process runs in no host that two_hosts made")
