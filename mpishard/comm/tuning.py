"""Which ordered reduce-scatter is the faster at a size: measured once per job, by all ranks, and kept for the next.

Both give the same bits, so the choice is one of time alone. All ranks choose from one table, of the slowest rank's
seconds, so they choose alike. A run that is resumed on the same library, ranks and nodes finds the table in its
directory. Measuring is short: sizes grow until BUDGET seconds would be exceeded, and larger ones follow the last.
"""

from __future__ import annotations

import json
import math
import statistics
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mpishard.array.dtypes import DTYPES
from mpishard.comm.together import on_rank_zero

if TYPE_CHECKING:
    from mpishard.comm.base import Communicator
    from mpishard.comm.mpi import MpiCommunicator

__all__ = ["BUDGET", "FILE", "SIZES", "Tuning", "keep", "measured", "tune"]

#: the table's name in a run directory
FILE = "tuning.json"
#: bytes of the inputs that are measured, in fp32
SIZES = (64 * 2**10, 2**20, 12 * 2**20)
#: seconds that a measurement may take, in all
BUDGET = 0.5
_CANDIDATES = ("alltoall", "pairwise")
_SAMPLES = 5
_RECORD = 4096


@dataclass(frozen=True)
class Tuning:
    """What was measured, and where.

    Args:
        library: the MPI library and its version.
        rows: bytes of an input -> seconds of each algorithm, the slowest rank's.
    """

    library: str
    ranks: int
    nodes: int
    rows: Mapping[int, Mapping[str, float]]

    def choose(self, nbytes: int) -> str:
        """Return the faster algorithm for inputs of ``nbytes``: at the measured size that is nearest by ratio."""
        if not self.rows:
            return _CANDIDATES[0]
        near = min(self.rows, key=lambda size: abs(math.log(size / max(1, nbytes))))
        return min(_CANDIDATES, key=lambda name: self.rows[near][name])

    def fits(self, other: Tuning) -> bool:
        """Return whether both were measured in one setting."""
        return (self.library, self.ranks, self.nodes) == (other.library, other.ranks, other.nodes)

    def dump(self) -> str:
        """Return it as JSON."""
        rows = [
            {"bytes": size, "seconds": dict(times), "choice": self.choose(size)} for size, times in self.rows.items()
        ]
        return json.dumps({"library": self.library, "ranks": self.ranks, "nodes": self.nodes, "rows": rows}, indent=1)

    @classmethod
    def load(cls, text: str) -> Tuning | None:
        """Return what :meth:`dump` was called on; None for any other text."""
        try:
            found = json.loads(text)
            rows = {
                int(row["bytes"]): {name: float(row["seconds"][name]) for name in _CANDIDATES} for row in found["rows"]
            }
            made = cls(str(found["library"]), int(found["ranks"]), int(found["nodes"]), rows)
        except (ValueError, KeyError, TypeError):
            return None
        good = all(size > 0 and all(0 < s < math.inf for s in times.values()) for size, times in rows.items())
        return made if good else None


def _setting(comm: Communicator) -> Tuning:
    from mpishard.comm.mpi import library

    return Tuning(library(), comm.size, comm.node.count, {})


def measured(comm: MpiCommunicator) -> Tuning:
    """Measure the ordered algorithms between the ranks of a communicator. Collective."""
    rows: dict[int, dict[str, float]] = {}
    child = cast("MpiCommunicator", comm.split([range(comm.size)]))  # which counts for itself
    spent = 0.0
    for size in SIZES:
        expected = spent and 1.5 * max(rows[max(rows)].values()) * size / max(rows) * len(_CANDIDATES) * (_SAMPLES + 1)
        if spent + expected > BUDGET:
            break
        seconds = {}
        for name in _CANDIDATES:
            child.algorithm = name
            slowest = _samples(child, size)
            seconds[name] = statistics.median(slowest[1:])
            spent += sum(slowest)
        rows[size] = seconds
    child.close()
    return Tuning(**{**vars(_setting(comm)), "rows": rows})


def _samples(comm: MpiCommunicator, size: int) -> list[float]:
    """Return the seconds of some reduce-scatters in a row, of the slowest rank each; the first sets things up."""
    kind = DTYPES["float32"]
    each = max(1, size // kind.itemsize // comm.size)
    full, out = comm.ops.empty(each * comm.size, kind), comm.ops.empty(each, kind)
    comm.ops.fill(full, 0.0)
    scratch = comm.ops.empty(comm.scratch_bytes(full.size, kind, kind), DTYPES["uint8"])
    bound = comm.bind_reduce_scatter(full, out, scratch)
    own = []
    for _ in range(_SAMPLES + 1):
        comm.barrier()
        begin = time.perf_counter()
        bound.start().wait_inputs()
        own.append(time.perf_counter() - begin)
    form = struct.Struct(f"<{len(own)}d")
    every = [form.unpack(record) for record in comm.exchange(form.pack(*own), "times of reduce-scatters")]
    return [max(times) for times in zip(*every, strict=True)]


def tune(comm: Communicator, path: Path) -> None:
    """Give a communicator whose algorithm is ``auto`` its table: the one in ``path`` if it fits, or measured now.

    Collective; on a communicator without a choice it does nothing.
    """
    if getattr(comm, "algorithm", "") != "auto" or comm.size == 1:
        return
    owner = cast("MpiCommunicator", comm)
    text = ""
    if comm.rank == 0:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            text = ""
    record = text.encode()
    record = record if len(record) <= _RECORD else b""
    told = comm.exchange(record.ljust(_RECORD), "the table of measured reduce-scatters")[0].decode().strip()
    kept = Tuning.load(told)
    owner.tuning = kept if kept is not None and kept.fits(_setting(comm)) else measured(owner)


def keep(comm: Communicator, path: Path) -> None:
    """Write a communicator's table, if it has one. Collective.

    Raises:
        ConfigError: on all ranks, when it cannot be written.
    """
    tuning: Tuning | None = getattr(comm, "tuning", None)
    if tuning is not None:
        text = tuning.dump() + "\n"
        on_rank_zero(comm, lambda: path.write_text(text, encoding="utf-8"))
