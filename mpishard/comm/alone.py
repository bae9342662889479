"""One rank of a large job by itself, with its memory and its work but without its peers.

It answers collectives from what this rank has, as if every rank had sent the same: an all-gather fills every rank's
place, a reduce-scatter sums as many blocks as there are ranks, through the scratch of the transport that it stands
for. So a rank of a job of 1024 takes all its memory and runs its step on one machine; its numbers mean nothing. Where
ranks share what they gather, it counts its part of that, and holds what its peers would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mpishard.array.dtypes import DTYPES, Array, DType, overlap
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.ops import Ops
from mpishard.comm.base import Collective, Communicator, Tally, Work
from mpishard.comm.dry import Pretended
from mpishard.comm.partials import Partials
from mpishard.comm.pieces import Pieces
from mpishard.comm.pool import Pool
from mpishard.comm.scratch import Scratch

__all__ = ["AloneCommunicator"]


class _Done(Work):
    """Finished when it was started, at ``arrived`` (perf_counter)."""

    arrived = 0.0

    def _complete(self) -> float:
        return self.arrived

    def _inputs_free(self) -> None:
        return None


class _AloneCollective(Collective):
    def __init__(self, tally: Tally, nbytes: int, run: Callable[[bool], None]) -> None:
        super().__init__(tally, nbytes)
        self._run = run

    def _launch(self, add: bool) -> Work:
        work = _Done(self._tally)
        self._run(add)
        work.arrived = time.perf_counter()
        return work


class AloneCommunicator(Pretended):
    """Rank ``rank`` of a job of ``size`` ranks, of which it is the only one that is there.

    Args:
        rank: the rank to be.
        size: the ranks to pretend.
        ops: operations on host arrays, or on a device's.
        transport: whose scratch to use, and how.
        local_size: ranks of a node, numbered node by node; all are on one by default.
        algorithm: of reduce-scatters over ``mpi``, whose scratch to use.

    Raises:
        ConfigError: there is no such transport, or algorithm.
    """

    transport = "alone"

    def __init__(
        self,
        rank: int,
        size: int,
        ops: Ops,
        transport: str = "mpi",
        local_size: int | None = None,
        algorithm: str = "alltoall",
    ) -> None:
        on_device = getattr(ops, "stream", None) is not None
        nodes = [one // (local_size or size) for one in range(size)]
        own = transport in ("mpi", "hierarchical") and not on_device  # these transports' thread has its own
        adds = NumpyOps() if own else ops
        inside = (local_size or size) if transport == "hierarchical" else 0
        rule = Scratch(transport, size, on_device, algorithm=algorithm, local_size=inside)
        self._set_up(rank, nodes, ops, rule, adds)
        if adds is not ops:
            self.own_bytes = adds.own_bytes

    def _set_up(self, rank: int, nodes: Sequence[int], ops: Ops, rule: Scratch, adds: Ops) -> None:
        super().__init__(rank, nodes, ops)
        self._rule, self._adds = rule, adds
        self.shares_gathered = True

    @property
    def scratch_rule(self) -> Scratch:
        """What the transport stood for answers."""
        return self._rule

    def _bind_all_gather(self, shard: Array, out: Array, tally: Tally, nbytes: int) -> Collective:
        places = [out[rank * shard.size : (rank + 1) * shard.size] for rank in range(self.size)]
        if overlap(shard, out):
            del places[self.rank]

        def run(add: bool) -> None:
            for place in places:
                self.ops.copy(shard, place)

        return _AloneCollective(tally, nbytes, run)

    def pool(self, nbytes: int) -> Pool:
        """Return memory of all sharers; this process holds the parts of those that are not there, too."""
        if self.sharers == 1:
            return super().pool(nbytes)
        return Pool(self.ops.empty(nbytes, DTYPES["uint8"]), self._bind_pooled)

    def _bind_pooled(self, shard: Array, out: Array) -> Collective:
        places = out.reshape(self.size, shard.size)

        def run(add: bool) -> None:
            for place in places:
                self.ops.copy(shard, place)

        return _AloneCollective(self._tallies["all_gather"], shard.size * out.itemsize * (self.size - 1), run)

    def _bind_reduce_scatter(
        self, full: Array, out: Array, scratch: Array | None, wire: DType, tally: Tally, nbytes: int
    ) -> Collective:
        if self._rule.nodes > 1 and out.size:
            return _AloneCollective(tally, nbytes, self._by_node(full, out, scratch, wire))
        whole = self._rule.transport in ("node", "hierarchical") and wire == full.dtype  # read as they lie
        rows = self.size > 1 and self._rule.algorithm not in ("auto", "alltoall")  # of segments, fewer than ranks
        if self._in_pieces and not (whole or rows):
            return _AloneCollective(tally, nbytes, self._piecewise(full, out, scratch, wire))
        return _AloneCollective(tally, nbytes, self._through(full, out, scratch, wire))

    def _piecewise(self, full: Array, out: Array, scratch: Array | None, wire: DType) -> Callable[[bool], None]:
        cut = self._rule.cut(full.size, full.dtype, wire)
        pieces = Pieces(self.rank, full, out, scratch, wire, cut, self.bracket)

        def run(add: bool) -> None:
            for piece in range(cut.pieces if out.size else 0):
                pieces.pack(self._adds, piece)
                if self.size > 1:
                    own = pieces.own(self.ops, piece)
                    for row in pieces.rows(piece):
                        self.ops.copy(own, row)
                pieces.add_up(self._adds, piece, add)

        return run

    def _by_node(self, full: Array, out: Array, scratch: Array | None, wire: DType) -> Callable[[bool], None]:
        """Sum as ``hierarchical`` does: inside the node first."""
        assert scratch is not None
        ranks, cut = self._rule.local_size, self._rule.cut(full.size, full.dtype, wire)
        partials = Partials(*divmod(self.rank, ranks), [full] * ranks, out, scratch, wire, cut)

        def run(add: bool) -> None:
            for piece in range(cut.pieces):
                partials.pack(self._adds, piece)
                self._adds.copy(partials.leaving(piece), partials.arriving(piece))
                partials.add_up(self._adds, piece, add)

        return run

    def _through(self, full: Array, out: Array, scratch: Array | None, wire: DType) -> Callable[[bool], None]:
        """Sum as much of the blocks at a time as the scratch takes; where there is none, as they lie."""
        own, bracket = full[self.rank * out.size : (self.rank + 1) * out.size], self.bracket
        width = 0 if scratch is None else min(out.size, scratch.size // (self.size * wire.itemsize))

        def run(add: bool) -> None:
            if not width:
                self._adds.ordered_sum([own] * self.size, out, add, bracket)
            for start in range(0, out.size if width else 0, width or 1):
                mine = own[start : start + width]
                assert scratch is not None
                nbytes = self.size * mine.size * wire.itemsize
                rows = scratch[:nbytes].view(wire).reshape(self.size, mine.size)
                for row in rows:
                    self._adds.copy(mine, row)
                self._adds.ordered_sum(list(rows), out[start : start + width], add, bracket)

        return run

    def _split(self, groups: Sequence[Sequence[int]], own: Sequence[int]) -> Communicator:
        child = AloneCommunicator.__new__(AloneCommunicator)
        child._set_up(*self._part(own), self.ops, self._rule.of(len(own)), self._adds)
        return child
