"""The memory of processes as Linux counts it.

The proportional set size (PSS) of a process is its private memory and its share of what it maps together with others:
a page that four processes map counts as a quarter in each. So the sum over a job's ranks is what the job holds, shared
memory of MPI included; a resident set size would count that once for each rank.

[Note: how a peak is found]
The kernel finds a PSS by walking the page tables: 18 ms for a gigabyte of small pages, in which the process may not
map memory. A sampler that does this often disturbs what it measures, and one that does it seldom misses peaks that last
some milliseconds. But the kernel keeps the largest *resident* size itself (VmHWM) and misses nothing, and what the two
sizes differ by, the share of others, hardly moves: libraries, and the shared memory of a transport. So a peak here is
the largest resident size less the share of others, which a process reads of itself when it stands still.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["MIB", "Mark", "Marks", "Rank", "Reading", "by_kind", "follow", "forget_peak", "read_marks", "reading"]

MIB = 2**20


@dataclass(frozen=True)
class Reading:
    """Bytes of a process: proportional and resident now, resident at most; 0 where it has ended."""

    proportional: int
    resident: int
    most_resident: int

    @property
    def others(self) -> int:
        """Resident bytes that are other processes' share."""
        return max(0, self.resident - self.proportional)


def reading(pid: int | str = "self") -> Reading:
    """Return what a process holds."""
    shares = _fields(pid, "smaps_rollup")
    status = _fields(pid, "status")
    return Reading(shares.get("Pss", 0), status.get("VmRSS", 0), status.get("VmHWM", 0))


def _fields(pid: int | str, name: str) -> dict[str, int]:
    """Return the fields in kB of one of a process's files, in bytes; none where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/{name}").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


def forget_peak() -> None:
    """Make this process's largest resident size that of now, where the system lets it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def by_kind(pid: int | str = "self") -> dict[str, int]:
    """Return proportional bytes by kind of mapping: anonymous, heap, stack, shared, files."""
    found = dict.fromkeys(("anonymous", "heap", "stack", "shared", "files"), 0)
    kind = "anonymous"
    for line in Path(f"/proc/{pid}/smaps").read_text(errors="replace").splitlines():
        words = line.split()
        if words[0] == "Pss:":
            found[kind] += int(words[1]) * 1024
        elif not words[0].endswith(":"):
            kind = _kind(words[5] if len(words) > 5 else "", words[1])
    return found


def _kind(path: str, rights: str) -> str:
    if path in ("[heap]", "[stack]"):
        return path[1:-1]
    if rights.endswith("s") or path.startswith(("/dev/shm/", "/memfd:", "/SYSV")):
        return "shared"
    return "files" if path.startswith("/") else "anonymous"


@dataclass(frozen=True)
class Mark:
    """A point that a rank reached, and what it held there and at most until then."""

    name: str
    held: Reading
    kinds: dict[str, int]
    more: dict[str, Any]


class Marks:
    """Writes a rank's marks: ``marks("start")``. Nothing else may go on in the process at that time."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank-{rank}"

    def __call__(self, name: str, **more: Any) -> None:
        kinds = by_kind()
        line = {"name": name, "held": vars(reading()), "kinds": kinds, "more": more}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


@dataclass
class Rank:
    """The marks of one rank."""

    marks: list[Mark] = field(default_factory=list)

    def mark(self, name: str) -> Mark:
        return next(mark for mark in self.marks if mark.name == name)

    def peak(self, name: str) -> int:
        """Return the largest proportional size until a mark, since the peak was forgotten."""
        held = self.mark(name).held
        return held.most_resident - held.others


def read_marks(folder: Path) -> list[Rank]:
    """Return what the ranks of a job left in a folder, by rank."""
    paths = sorted(folder.glob("rank-*"), key=lambda path: int(path.name.partition("-")[2]))
    ranks = []
    for path in paths:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        ranks.append(Rank([Mark(**{**line, "held": Reading(**line["held"])}) for line in lines]))
    return ranks


def follow(process: subprocess.Popen[Any], interval: float = 0.2) -> tuple[int, int]:
    """Wait for a process that leaves no marks; return its largest resident and largest proportional bytes."""
    most = others = 0
    while process.poll() is None:
        before, found = _fields(process.pid, "status"), reading(process.pid)
        most = max(most, found.most_resident)
        if before.get("VmRSS") == found.resident and found.proportional:  # it stood still
            others = found.others
        time.sleep(interval)
    return most, most - others
