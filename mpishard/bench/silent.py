"""A communicator whose collectives are over when they begin: what a step takes without communication.

[Note: what a step without communication is]
The rank's own step, on its own shards, in its own place among as many ranks: the same schedule, the same buffers, the
same instructions. A collective does its work once, the first time that it is started, from what this rank has, so that
no buffer holds what is no number; after that it is over at once and touches nothing. Exchanges answer with this rank's
own record. All ranks run such steps at the same time, so that cores and memory are shared as in a step. Its losses mean
nothing. What the transport does on the caller's thread (sums, rounding, copies) is communication, and is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpishard.array.dtypes import Array, DType
from mpishard.array.ops import Ops
from mpishard.comm.alone import AloneCommunicator
from mpishard.comm.base import Collective, Communicator, Tally, Work

__all__ = ["SilentCommunicator"]


class _Over(Work):
    """Over before it began."""

    def _complete(self) -> None:
        return None

    def _inputs_free(self) -> None:
        return None


class _Once(Collective):
    """Does what another one does at its first start, and nothing at any other."""

    def __init__(self, tally: Tally, nbytes: int, real: Collective) -> None:
        super().__init__(tally, nbytes)
        self._real: Collective | None = real

    def _launch(self, add: bool) -> Work:
        if self._real is not None:
            self._real.start(add).wait_inputs()
            self._real = None
        return _Over(self._tally)


class SilentCommunicator(AloneCommunicator):
    """A rank's place in a communicator, without the others.

    Args:
        like: the communicator whose place, size and scratch this one has.
        ops: operations on the arrays.
    """

    transport = "none"

    def __init__(self, like: Communicator, ops: Ops) -> None:
        rule = like.scratch_rule
        nodes = [rank // like.node.local_size for rank in range(like.size)]
        self._set_up(like.rank, nodes, ops, rule, ops)
        self.node = like.node
        self.bracket = like.bracket

    def _bind_all_gather(self, shard: Array, out: Array, tally: Tally, nbytes: int) -> Collective:
        return _Once(tally, nbytes, super()._bind_all_gather(shard, out, Tally(), nbytes))

    def _bind_reduce_scatter(
        self, full: Array, out: Array, scratch: Array | None, wire: DType, tally: Tally, nbytes: int
    ) -> Collective:
        return _Once(tally, nbytes, super()._bind_reduce_scatter(full, out, scratch, wire, Tally(), nbytes))

    def _split(self, groups: Sequence[Sequence[int]], own: Sequence[int]) -> Communicator:
        child = SilentCommunicator.__new__(SilentCommunicator)
        child._set_up(*self._part(own), self.ops, self._rule.of(len(own)), self._adds)
        return child
