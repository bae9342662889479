"""How fast ranks reach each other, and whether communication goes on while a rank computes. All is collective."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from mpishard.array.dtypes import DTYPES
from mpishard.comm.base import Communicator
from mpishard.comm.diagnose import ping
from mpishard.doctor.facts import everybody

__all__ = ["PAIR_BYTES", "Peers", "Progress", "hidden_share", "measure_peers", "measure_progress", "pairs"]

#: bytes of a message between two ranks
PAIR_BYTES = (64 << 10, 1 << 20, 16 << 20)
_LATENCY_BYTES = 8
_MOST_PAIRS = 28  # all of eight ranks
_SHARD_BYTES = 4 << 20  # of each rank, in the measurement of progress
_WIDTH = 256  # of the matrices that it computes with
_ROUNDS = 7
_VARIES = 0.9


@dataclass(frozen=True)
class Peers:
    """Two ranks: half a round trip of 8 bytes in seconds, and bytes a second by the size of the message.

    ``mpi`` is MPI's own messages in host memory; ``transport`` an all-gather between the two by the transport that
    training would use, in its memory, each sending that many bytes; empty where that is MPI in host memory, too.
    """

    ranks: tuple[int, int]
    same_node: bool
    latency: float
    mpi: dict[int, float]
    transport: dict[int, float]

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints of it."""
        return asdict(self) | {"ranks": list(self.ranks)}


@dataclass(frozen=True)
class Progress:
    """Seconds of an all-gather alone, of the computation alone, and of both at once: medians, the slowest rank's."""

    nbytes: int
    communication: float
    compute: float
    together: float

    @property
    def hidden(self) -> float | None:
        """The share of the shorter one that went on behind the longer one; None where times vary too much to tell."""
        return hidden_share(self.communication, self.compute, self.together)

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints of it."""
        return {**asdict(self), "hidden": self.hidden}


def hidden_share(communication: float, compute: float, together: float) -> float | None:
    """Return the share hidden, 0 to 1, by the formula of Intel's IMB-NBC benchmarks.

    None where both at once took clearly less than the longer one alone, which only varying times do.
    """
    shorter, longer = sorted((communication, compute))
    if together < _VARIES * longer:
        return None
    return max(0.0, min(1.0, (communication + compute - together) / shorter)) if shorter > 0 else 0.0


def pairs(nodes: Sequence[int], most: int = _MOST_PAIRS) -> list[tuple[int, int]]:
    """Return which ranks to measure: all pairs where they are few.

    Else each rank with the next one on its node, and the first rank of the first node with that of each other, as far
    as ``most`` goes.

    Args:
        nodes: the node of each rank.
    """
    every = list(combinations(range(len(nodes)), 2))
    if len(every) <= most:
        return every
    ranks = range(len(nodes))
    leaders = [nodes.index(node) for node in dict.fromkeys(nodes)]
    across = [(leaders[0], leader) for leader in leaders[1:]]
    inside = [
        (rank, after)
        for rank in ranks
        if (after := next((other for other in ranks[rank + 1 :] if nodes[other] == nodes[rank]), None)) is not None
    ]
    half = max(most // 2, most - len(across))
    return sorted([*inside[:half], *across[: most - len(inside[:half])]])


def measure_peers(host: Communicator, comm: Communicator) -> list[Peers]:
    """Measure pairs in turn, while the other ranks wait.

    Args:
        host: carries MPI's messages in host memory.
        comm: what training would use.
    """
    nodes = [int(node) for node in everybody(host, host.node.index)]
    found = []
    for one, other in pairs(nodes):
        latency = ping(host, one, other, _LATENCY_BYTES)
        mpi = {nbytes: ping(host, one, other, nbytes) for nbytes in PAIR_BYTES}
        transport = _by_transport(comm, one, other) if comm.on_device or comm.transport != "mpi" else {}
        seconds = everybody(host, [latency, list(mpi.items()), list(transport.items())])[one]
        found.append(
            Peers(
                (one, other),
                nodes[one] == nodes[other],
                seconds[0],
                {nbytes: nbytes / taken for nbytes, taken in seconds[1]},
                {nbytes: nbytes / taken for nbytes, taken in seconds[2]},
            )
        )
    return found


def _by_transport(comm: Communicator, one: int, other: int) -> dict[int, float]:
    """Return seconds of an all-gather between two ranks, by the bytes that each sends."""
    rest = [rank for rank in range(comm.size) if rank not in (one, other)]
    pair = comm.split([group for group in ([one, other], rest) if group])
    found = {}
    if comm.rank in (one, other):
        for nbytes in PAIR_BYTES:
            gather = _gather(pair, nbytes)
            found[nbytes] = _median(pair, lambda gather=gather: gather())  # type: ignore[misc]
    pair.close()
    return found


def _gather(comm: Communicator, nbytes: int) -> Callable[[], None]:
    kind = DTYPES["uint8"]
    full, shard = comm.allocate(nbytes * comm.size, kind), comm.allocate(nbytes, kind)
    comm.ops.fill(shard.view(DTYPES["float32"]), 1.0)
    bound = comm.bind_all_gather(shard, full)

    def run() -> None:
        bound.start().wait_inputs()
        comm.ops.fetch(full[:1])

    return run


def _median(comm: Communicator, run: Callable[[], object]) -> float:
    """Return the median of several runs' times, after two that do not count; of the slowest rank each."""
    times = []
    for _ in range(_ROUNDS + 2):
        comm.barrier()
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    slowest = [max(each) for each in zip(*everybody(comm, times[2:]), strict=True)]
    return float(statistics.median(slowest))


def measure_progress(comm: Communicator) -> Progress:
    """Measure an all-gather beside matrix products, which take about as long."""
    ops, kind = comm.ops, DTYPES["float32"]
    full, shard = comm.allocate(_SHARD_BYTES // 4 * comm.size, kind), comm.allocate(_SHARD_BYTES // 4, kind)
    ops.fill(shard, 1.0)
    bound = comm.bind_all_gather(shard, full)
    a, b, c = (ops.empty(_WIDTH * _WIDTH, kind) for _ in range(3))
    for array in (a, b):
        ops.fill(array, 0.5)
    left, right, product = (array.reshape(_WIDTH, _WIDTH) for array in (a, b, c))

    def compute(times: int) -> None:
        for _ in range(times):
            ops.matmul(left, right, product)
        ops.fetch(c[:1])

    def both(times: int) -> None:
        work = bound.start()
        compute(times)
        work.wait_inputs()
        ops.fetch(full[:1])

    def alone() -> None:
        bound.start().wait_inputs()
        ops.fetch(full[:1])

    communication = _median(comm, alone)
    times = max(1, round(10 * communication / _median(comm, lambda: compute(10))))
    return Progress(
        _SHARD_BYTES * comm.size,
        communication,
        _median(comm, lambda: compute(times)),
        _median(comm, lambda: both(times)),
    )
