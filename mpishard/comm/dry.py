"""A communicator that talks to nobody: it accepts what one rank of a job would do. The memory plan runs on it.

Nothing is read or written, so buffers may be arrays without memory
(:class:`~mpishard.array.shape_ops.ShapeOps`). What is bound is validated as everywhere, calls and bytes are
counted, and every rank is taken to say what this one says.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from mpishard.array.dtypes import Array
from mpishard.array.ops import Ops
from mpishard.comm.base import Collective, Communicator, Node, Tally, Work

__all__ = ["DryCommunicator"]


class _DryWork(Work):
    """Over before it began."""

    def _complete(self) -> None:
        return None

    def _inputs_free(self) -> None:
        return None


class _DryCollective(Collective):
    def _launch(self, add: bool) -> Work:
        return _DryWork(self._tally)


class DryCommunicator(Communicator):
    """Rank ``rank`` of a job of ``size`` ranks that is not there; all on one node.

    Args:
        rank: the rank to be.
        size: the ranks to pretend.
        ops: operations on the arrays to come; :meth:`all_reduce` uses them.
        scratch: ``scratch_elements`` of the transport that this one stands for.
    """

    transport = "dry"

    def __init__(self, rank: int, size: int, ops: Ops, scratch: Callable[[int], int]) -> None:
        super().__init__(rank, size, Node(rank, size, 0, 1), ops)
        self._scratch = scratch

    def scratch_elements(self, count: int) -> int:
        """Elements of scratch that the transport stood for needs."""
        return self._scratch(count)

    def _bind_all_gather(self, shard: Array, out: Array, tally: Tally, nbytes: int) -> Collective:
        return _DryCollective(tally, nbytes)

    def _bind_reduce_scatter(
        self, full: Array, out: Array, scratch: Array | None, tally: Tally, nbytes: int
    ) -> Collective:
        return _DryCollective(tally, nbytes)

    def _exchange(self, record: bytes) -> list[bytes]:
        return [record] * self.size

    def _broadcast(self, array: Array, root: int) -> None:
        return None

    def _split(self, groups: Sequence[Sequence[int]], own: Sequence[int]) -> Communicator:
        return DryCommunicator(list(own).index(self.rank), len(own), self.ops, self._scratch)

    def abort(self, message: str, code: int = 1) -> None:
        """Print the message and end the process."""
        print(message, file=sys.stderr, flush=True)
        os._exit(code)
