"""A communicator that talks to nobody: it accepts what one rank of a job would do. The memory plan runs on it.

Nothing is read or written, so buffers may be arrays without memory
(:class:`~mpishard.array.shape_ops.ShapeOps`). What is bound is validated as everywhere, calls and bytes are
counted, and every rank is taken to say what this one says.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from mpishard.array.dtypes import Array, DType
from mpishard.array.ops import Ops
from mpishard.comm.base import Collective, Communicator, Node, Tally, Work
from mpishard.comm.scratch import Scratch
from mpishard.errors import ConfigError

__all__ = ["DryCommunicator", "Pretended", "node_among"]


def node_among(nodes: Sequence[int], rank: int) -> Node:
    """Return where a rank runs, given each rank's node; nodes are numbered by their lowest rank."""
    order = list(dict.fromkeys(nodes))
    return Node(
        list(nodes[:rank]).count(nodes[rank]), list(nodes).count(nodes[rank]), order.index(nodes[rank]), len(order)
    )


class Pretended(Communicator):
    """What communicators without peers share: every rank is taken to say what this one says.

    Args:
        rank: the rank to be.
        nodes: each rank's node.
        ops: operations on the arrays to come.
    """

    def __init__(self, rank: int, nodes: Sequence[int], ops: Ops) -> None:
        super().__init__(rank, len(nodes), node_among(nodes, rank), ops)
        self._nodes = tuple(nodes)
        self.shares_gathered = False  # with nobody

    def _exchange(self, record: bytes) -> list[bytes]:
        return [record] * self.size

    def _broadcast(self, array: Array, root: int) -> None:
        return None

    def _part(self, own: Sequence[int]) -> tuple[int, list[int]]:
        """Return this rank's number in a group of ranks, and the group's nodes."""
        return list(own).index(self.rank), [self._nodes[rank] for rank in own]

    def abort(self, message: str, code: int = 1) -> None:
        """Print the message and end the process."""
        print(message, file=sys.stderr, flush=True)
        os._exit(code)


class _DryWork(Work):
    """Over before it began."""

    def _complete(self) -> None:
        return None

    def _inputs_free(self) -> None:
        return None


class _DryCollective(Collective):
    def _launch(self, add: bool) -> Work:
        return _DryWork(self._tally)


class DryCommunicator(Pretended):
    """Rank ``rank`` of a job of ``size`` ranks that is not there.

    Args:
        rank: the rank to be.
        size: the ranks to pretend.
        ops: operations on the arrays to come; :meth:`all_reduce` uses them.
        scratch: bytes of scratch of the transport that this one stands for:
            :meth:`Communicator.scratch_rule` of one that is there, or
            :func:`~mpishard.comm.scratch.transport_scratch`. What is no
            :class:`~mpishard.comm.scratch.Scratch` tells them for groups split from this one, too.
        local_size: ranks of a node, numbered node by node; all are on one by default.
    """

    transport = "dry"

    def __init__(
        self,
        rank: int,
        size: int,
        ops: Ops,
        scratch: Callable[[int, DType, DType], int],
        local_size: int | None = None,
    ) -> None:
        self._set_up(rank, [one // (local_size or size) for one in range(size)], ops, scratch)

    def _set_up(self, rank: int, nodes: Sequence[int], ops: Ops, scratch: Callable[[int, DType, DType], int]) -> None:
        super().__init__(rank, nodes, ops)
        self._scratch = scratch

    @property
    def scratch_rule(self) -> Scratch:
        """What the transport stood for answers."""
        if not isinstance(self._scratch, Scratch):
            raise ConfigError("the scratch of this dry communicator is a function; give it a Scratch to have its rule")
        return self._scratch

    def scratch_bytes(self, count: int, kind: DType, wire: DType) -> int:
        """Bytes of scratch that the transport stood for needs."""
        return self._scratch(count, kind, wire)

    @property
    def _in_pieces(self) -> bool:
        return True  # nothing is copied, so nothing whole

    def _bind_all_gather(self, shard: Array, out: Array, tally: Tally, nbytes: int) -> Collective:
        return _DryCollective(tally, nbytes)

    def _bind_reduce_scatter(
        self, full: Array, out: Array, scratch: Array | None, wire: DType, tally: Tally, nbytes: int
    ) -> Collective:
        return _DryCollective(tally, nbytes)

    def _split(self, groups: Sequence[Sequence[int]], own: Sequence[int]) -> Communicator:
        scratch = self._scratch.of(len(own)) if isinstance(self._scratch, Scratch) else self._scratch
        child = DryCommunicator.__new__(DryCommunicator)
        child._set_up(*self._part(own), self.ops, scratch)
        return child
