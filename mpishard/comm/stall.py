"""When a whole job makes no progress: the rule, and one rank's part in finding it.

[Note: progress]
A rank makes progress when it notes a new operation (:meth:`mpishard.comm.record.RankRecord.note`). Its *stillness* is
the number of seconds since, counted in its watching thread's own ticks and not by the clock: nobody has stood still
because the whole job was suspended. A tick counts a tenth while the rank is *at work*: it is in an operation that
waits for nobody, and its main thread has used a processor for a fiftieth of it, or sits in the kernel for a disk. So
one long computation, the first batch of a slow file system or a large checkpoint may take ten times as long.

A job is *stalled* when every rank's stillness has come to ``stall`` seconds. So ranks that wait for one that evaluates,
saves or computes wait as long as that one moves. A rank whose record does not change, because its process is stopped
or its machine is away, counts as standing still once it was looked at in vain for most of the second half of the time.

[Note: who looks]
Each rank publishes its stillness in its record, and reads others' records once half the time is over: those of its own
node, and of the first rank of each other node, which publishes the least stillness of its node. Records of other nodes
go through a file system, so they are read less often.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpishard.comm.record import RankRecord, State, read_record, record_path

__all__ = ["AT_WORK", "Stall", "main_thread"]

#: what a tick counts in which a rank is at work
AT_WORK = 0.1
#: share of a tick that the main thread must have used a processor for that; little, since ranks may outnumber cores
_USED = 0.02
#: looks at other nodes in the time after which a job is stalled, and seconds between two looks at most
_LOOKS, _SELDOM = 20, 5.0
#: share of that time for which a record must not have changed; it is looked at for half of the time
_FROZEN = 0.4


@dataclass
class _Look:
    """What was seen of another rank's record."""

    beats: int = -1
    noted: int = -1
    #: seconds without a change
    quiet: float = 0.0


class Stall:
    """Counts this rank's stillness, and finds out whether all ranks stand still.

    Args:
        folder: where the records lie.
        record: this rank's.
        mates: the other ranks of its node.
        leaders: the first rank of each other node.
        seconds: after which a job is stalled.
        waits: names of operations, without what stands in brackets, in which a rank waits for others.
    """

    def __init__(
        self,
        folder: Path,
        record: RankRecord,
        mates: Sequence[int],
        leaders: Sequence[int],
        *,
        seconds: float,
        waits: Collection[str] = (),
    ) -> None:
        self.folder, self.record, self.seconds = folder, record, seconds
        self._waits = frozenset(waits)
        self._looks = {rank: _Look() for rank in (*mates, *leaders)}
        self._mates, self._leaders = tuple(mates), tuple(leaders)
        self._noted = -1
        self._used = 0.0
        self._unseen = 0.0
        self._stands_elsewhere = not leaders
        #: seconds in the last operation, and without progress
        self.inside = self.still = 0.0

    def tick(self, seconds: float) -> bool:
        """Count a tick of so many seconds; return whether the job is stalled.

        Raises:
            OSError: a record cannot be read.
        """
        self._count(seconds)
        node = self.still
        if self.still >= self.seconds / 2:
            for rank in self._mates:
                node = min(node, self._stillness(rank, seconds, inside=True))
        self.record.stand(self.inside, self.still, node)
        if node < self.seconds / 2:
            self._unseen, self._stands_elsewhere = 0.0, not self._leaders
            return False
        self._look_elsewhere(seconds)
        return node >= self.seconds and self._stands_elsewhere

    def _count(self, seconds: float) -> None:
        noted, operation = self.record.noted, self.record.operation
        used, disk = main_thread()
        works = disk or used - self._used >= _USED * seconds
        self._used = used
        if noted != self._noted:
            self._noted, self.inside, self.still = noted, 0.0, 0.0
            return
        self.inside += seconds
        waits = operation.decode(errors="replace").partition("(")[0] in self._waits
        self.still += seconds * (AT_WORK if works and not waits else 1.0)

    def _look_elsewhere(self, seconds: float) -> None:
        """Look at other nodes, now and then."""
        self._unseen += seconds
        if self._leaders and self._unseen >= min(_SELDOM, self.seconds / _LOOKS):
            passed, self._unseen = self._unseen, 0.0
            least = min(self._stillness(rank, passed, inside=False) for rank in self._leaders)
            self._stands_elsewhere = least >= self.seconds

    def _stillness(self, rank: int, passed: float, *, inside: bool) -> float:
        """Return how long a rank, or its node, has stood still, as it says itself or as seen from here."""
        found, look = read_record(record_path(self.folder, rank)), self._looks[rank]
        if found is None or found.state is not State.RUNNING:
            return self.seconds  # who has ended moves nobody
        said = found.still if inside else found.node_still
        if (found.beats, found.noted) != (look.beats, look.noted):
            look.beats, look.noted, look.quiet = found.beats, found.noted, 0.0
            return said
        look.quiet += passed
        return self.seconds if look.quiet >= _FROZEN * self.seconds else said

    def quiet(self, rank: int) -> float:
        """Return for how many seconds a rank's record has not changed, as far as this rank has looked."""
        look = self._looks.get(rank)
        return look.quiet if look is not None else 0.0


def main_thread() -> tuple[float, bool]:
    """Return the processor time of this process's main thread, in seconds, and whether it waits for a disk."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        path = f"/proc/self/task/{threading.main_thread().native_id}/stat"
        with open(path, "rb", buffering=0) as file:
            fields = (file.read(1024) or b"").rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] == b"D"
    return 0.0, False
