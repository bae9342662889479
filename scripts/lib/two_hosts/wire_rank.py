"""A rank that counts what a transport's collectives send over its host's link: python -m two_hosts.wire_rank TASK."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI

from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.choice import connect
from two_hosts.link import sent

__all__ = ["main"]

WORLD = MPI.COMM_WORLD
_SETTLE = 0.05  # seconds for what is still to be acknowledged


def main(arguments: Sequence[str]) -> None:
    task = json.loads(arguments[0])
    rows = [row for transport in task["transports"] for row in _rows(transport, task["bytes"], task["calls"])]
    if WORLD.rank == 0:
        print(json.dumps(rows), flush=True)


def _rows(transport: str, nbytes: int, calls: int) -> list[dict[str, Any]]:
    comm = connect(WORLD, NumpyOps(), transport)
    kind = np.dtype(np.float32)
    count = nbytes // kind.itemsize // comm.size
    full, part = comm.allocate(count * comm.size, kind), comm.allocate(count, kind)
    scratch = comm.allocate(comm.scratch_bytes(full.size, kind, kind), np.dtype(np.uint8))
    reduce = comm.bind_reduce_scatter(full, part, scratch)
    gather = comm.bind_all_gather(part, full)
    shape = {"transport": comm.transport, "ranks": comm.size, "ranks_per_host": comm.node.local_size}
    rows = []
    for name, collective in (("reduce_scatter", reduce), ("all_gather", gather)):
        full[:] = comm.rank + 1
        part[:] = comm.rank + 1
        collective.start().wait_inputs()
        expected: Any = np.repeat(np.arange(comm.size) + 1.0, count)
        if name == "reduce_scatter":
            expected = comm.size * (comm.size + 1) / 2
        right = bool(((part if name == "reduce_scatter" else full) == expected).all())
        each = _counted(lambda collective=collective: collective.start().wait_inputs(), calls)  # type: ignore[misc]
        right = WORLD.allreduce(right, MPI.LAND)
        rows.append({**shape, "op": name, "bytes": full.nbytes, "sent": each, "correct": right})
    comm.close()
    return rows


def _counted(call: Callable[[], None], calls: int) -> list[float]:
    """Return the bytes that each host sends in a call, by their numbers: medians, since TCP may send some again."""
    local = WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    each = []
    for _ in range(calls):
        WORLD.Barrier()
        time.sleep(_SETTLE)
        before = sent()
        WORLD.Barrier()
        call()
        WORLD.Barrier()
        time.sleep(_SETTLE)
        each.append(sent() - before)
    found = WORLD.allgather(float(median(each)) if local.rank == 0 else None)
    local.Free()
    return [one for one in found if one is not None]


if __name__ == "__main__":
    main(sys.argv[1:])
