"""What is said of every rank of a job that stands still: where it is, since when, and whom the others wait for."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mpishard.comm.record import Snapshot, State, kernel_identity, process_stopped, read_record, record_path

__all__ = ["EXIT_STALLED", "Standing", "late", "read_standings", "report", "stack_path", "write_stack"]

#: The exit code of a rank that ends because no rank made progress.
EXIT_STALLED = 4
#: ranks that a report tells of one by one, the late ones first
_SHOWN = 32
#: frames of a stack that are told, innermost first
_FRAMES = 10


@dataclass(frozen=True)
class Standing:
    """A rank of a job that stands still.

    Attributes:
        snapshot: its record; None where it cannot be read.
        stopped: its process is stopped (SIGSTOP, a debugger), as far as that can be seen from here.
        stack: its main thread's Python stack, innermost first; empty where it did not answer.
        seconds: in its last operation.
    """

    rank: int
    snapshot: Snapshot | None
    stopped: bool
    stack: str
    seconds: float

    @property
    def noted(self) -> int:
        """Operations that it has begun."""
        return self.snapshot.noted if self.snapshot is not None else 0

    @property
    def time(self) -> str:
        """How long it has been there: ``for 7 s``; one that cannot say was not looked at from the beginning."""
        return f"for {'at least ' if self.stopped or not self.stack else ''}{self.seconds:.0f} s"

    @property
    def place(self) -> str:
        """Step and operation: ``in step 4, in Await(h.1)``."""
        if self.snapshot is None:
            return "without a record"
        step = f"in step {self.snapshot.step}" if self.snapshot.step >= 0 else "before the first step"
        names = self.snapshot.operations
        return f"{step}, in {names[-1][1]}" if names else f"{step}, in no operation yet"


def stack_path(folder: Path, rank: int) -> Path:
    """Return where a rank that is asked leaves its Python stacks."""
    return folder / f"stack-{rank:05d}"


def write_stack(folder: Path, rank: int) -> None:
    """Write this process's Python stacks: the main thread's in a line, then those of all threads. For any thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    with contextlib.suppress(OSError), open(stack_path(folder, rank), "w", encoding="utf-8") as file:
        file.write(_in_a_line(frame) + "\n\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def _in_a_line(frame: FrameType | None) -> str:
    told: list[str] = []
    while frame is not None and len(told) < _FRAMES:
        code = frame.f_code
        told.append(f"{code.co_name} ({'/'.join(Path(code.co_filename).parts[-2:])}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(told)


def read_standings(folder: Path, size: int, quiet: Sequence[float]) -> list[Standing]:
    """Return how every rank stands, from its record and its stack.

    Args:
        quiet: seconds for which each rank's record has not changed, as seen from here.
    """
    found = []
    here = kernel_identity()
    for rank in range(size):
        snapshot, stack = None, ""
        with contextlib.suppress(OSError):
            snapshot = read_record(record_path(folder, rank))
        with contextlib.suppress(OSError, UnicodeDecodeError):
            stack = stack_path(folder, rank).read_text(encoding="utf-8").partition("\n")[0]
        near = snapshot is not None and snapshot.identity == here and snapshot.state is State.RUNNING
        stopped = snapshot is not None and near and process_stopped(snapshot.pid)
        seconds = (snapshot.inside if snapshot is not None else 0.0) + quiet[rank]
        found.append(Standing(rank, snapshot, stopped, stack, seconds))
    return found


def late(standings: Sequence[Standing]) -> tuple[list[int], str]:
    """Return the ranks that the others wait for, and how that is known; none where all are at the same place.

    They are those that are stopped, else those that do not answer, else those that have begun the fewest operations.
    """
    if stopped := [each.rank for each in standings if each.stopped]:
        return stopped, "its process is stopped"
    silent = [each.rank for each in standings if not each.stack]
    if silent and len(silent) < len(standings):
        return silent, "it does not answer"
    furthest = max(each.noted for each in standings)
    least = min(each.noted for each in standings)
    if least < furthest:
        behind = [each.rank for each in standings if each.noted == least]
        many = furthest - least
        return behind, f"it is {many} operation{'s' if many > 1 else ''} behind the furthest"
    return [], ""


def report(standings: Sequence[Standing], stall: float, folder: Path) -> list[str]:
    """Return the lines that are printed when no rank has made progress for ``stall`` seconds."""
    ranks, why = late(standings)
    if ranks:
        one = standings[ranks[0]]
        others = f" (so are {len(ranks) - 1} more)" if len(ranks) > 1 else ""
        cause = f"rank {one.rank} is late{others}: {one.place}, {one.time}; {why}"
        look = f"look at rank {one.rank} first"
    else:
        cause = f"all ranks are {standings[0].place}: what they wait for does not come"
        look = "look at the network and the stacks"
    lines = [f"mpishard: no rank has made progress for {stall:g} s; {cause}"]
    order = sorted(standings, key=lambda each: (each.rank not in ranks, each.rank))
    for each in order[:_SHOWN]:
        known = each.snapshot
        where = f" (host {known.host}, pid {known.pid})" if known is not None else ""
        state = "stopped " if each.stopped else ""
        lines.append(f"  rank {each.rank}{where}: {state}{each.place}, {each.time}")
        if known is not None and len(known.operations) > 1:
            lines.append(f"    before it: {' '.join(name for _, name in known.operations[:-1])}")
        lines.append(f"    stack: {each.stack or 'it does not answer'}")
    if len(order) > _SHOWN:
        lines.append(f"  and {len(order) - _SHOWN} ranks more")
    lines.append(
        f"mpishard: the ranks end with exit code {EXIT_STALLED}; {look}, then resume from the last checkpoint; "
        f"comm.stall sets the time, 0 for ever; all threads' stacks are in {os.fspath(folder)}"
    )
    return lines
