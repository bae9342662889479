"""One rank alone: collectives are copies. It is what one process without ``mpirun`` uses."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mpishard.array.dtypes import Array, DType, address
from mpishard.array.ops import Ops
from mpishard.comm.base import Collective, Communicator, Node, Tally, Work
from mpishard.comm.pieces import Pieces

__all__ = ["LocalCommunicator"]


class _Done(Work):
    """Finished when it was made."""

    def _complete(self) -> None:
        return None

    def _inputs_free(self) -> None:
        return None


class _Gather(Collective):
    def __init__(self, ops: Ops, shard: Array, out: Array, tally: Tally) -> None:
        super().__init__(tally, 0)
        self._ops, self._shard, self._out = ops, shard, out
        self._in_place = address(shard) == address(out)

    def _launch(self, add: bool) -> Work:
        work = _Done(self._tally)
        if not self._in_place:
            self._ops.copy(self._shard, self._out)
        return work


class _Reduce(Collective):
    def __init__(self, ops: Ops, pieces: Pieces, tally: Tally) -> None:
        super().__init__(tally, 0)
        self._ops, self._pieces = ops, pieces

    def _launch(self, add: bool) -> Work:
        work = _Done(self._tally)
        for piece in range(self._pieces.cut.pieces):
            self._pieces.add_up(self._ops, piece, add)
        return work


class LocalCommunicator(Communicator):
    """The communicator of a job of one rank."""

    transport = "local"

    def __init__(self, ops: Ops) -> None:
        super().__init__(0, 1, Node(0, 1, 0, 1), ops)

    def _bind_all_gather(self, shard: Array, out: Array, tally: Tally, nbytes: int) -> Collective:
        return _Gather(self.ops, shard, out, tally)

    def _bind_reduce_scatter(
        self, full: Array, out: Array, scratch: Array | None, wire: DType, tally: Tally, nbytes: int
    ) -> Collective:
        cut = self.scratch_rule.cut(full.size, full.dtype, wire)
        return _Reduce(self.ops, Pieces(0, full, out, scratch, wire, cut, self.bracket), tally)

    def _exchange(self, record: bytes) -> list[bytes]:
        return [record]

    def _broadcast(self, array: Array, root: int) -> None:
        return None

    def _split(self, groups: Sequence[Sequence[int]], own: Sequence[int]) -> Communicator:
        return LocalCommunicator(self.ops)

    def abort(self, message: str, code: int = 1) -> None:
        """Print the message and end the process."""
        print(message, file=sys.stderr, flush=True)
        os._exit(code)
