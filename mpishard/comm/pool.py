"""One gathered copy for all ranks of a host: each writes its own part of memory that all of them read.

[Note: when a part may be written]
``out`` may still be read by a peer, as something that was gathered into it before. Ranks run one list, so when this
rank starts a gather it has said ``released()`` of all that lay there; and a peer that has said it as often as this rank
had then, has so too. Until every peer has, the part waits: it is written at the start if they all have, and else by
the thread that waits for the arrival. Who waits holds up nobody that is behind: whatever those need of this rank it
started, and so wrote or waited for, before.

[Note: what is counted]
As of any all-gather: the bytes that a rank's peers get from it. They are not moved once more for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mpishard.array.dtypes import Array
from mpishard.array.ops import Ops
from mpishard.comm.board import Board
from mpishard.comm.work import Collective, Tally, Work

__all__ = ["Pool", "PooledGather"]


class Pool(NamedTuple):
    """Memory of all ranks of a host.

    Attributes:
        bytes: the same memory on each of them.
        bind: ``bind(shard, out)`` binds ``out[r*k:(r+1)*k] = rank r's shard``, where ``out`` is a part of the bytes, of
            shard's type or one that fp32 can be rounded to. Collective; CommError on all ranks, when buffers do not fit
            or ranks bind different things. Ranks say ``released()`` once for each start, all in the same order, and
            ``shard`` is free after ``wait()``.
    """

    bytes: Array
    bind: Callable[[Array, Array], Collective]


class _PooledWork(Work):
    def __init__(self, tally: Tally, board: Board, what: int, write: Callable[[], None]) -> None:
        super().__init__(tally)
        self._board, self._write, self._written, self._let_go = board, write, False, False
        self._before = board.releases
        self._number = board.begin(what)
        if board.all_released(self._before, wait=False):
            self._give()

    def _give(self) -> None:
        self._write()
        self._board.arrive(self._number)
        self._written = True

    def _complete(self) -> None:
        if not self._written:
            self._board.all_released(self._before)
            self._give()
        self._board.all_arrived(self._number)
        self._board.end(self._number)

    def released(self) -> None:
        """Say that this rank no longer reads ``out``. Never blocks; again is free."""
        if not self._let_go:
            self._let_go = True
            self._board.release()

    def _inputs_free(self) -> None:
        """Nobody reads a shard but its rank, which has written its part."""


class PooledGather(Collective):
    """An all-gather into a pool.

    Args:
        shard: this rank's, rounded to the type of ``part`` where that is narrower.
        part: this rank's part of what all read.
    """

    def __init__(self, tally: Tally, nbytes: int, board: Board, what: int, ops: Ops, shard: Array, part: Array) -> None:
        super().__init__(tally, nbytes)
        self._board, self._what = board, what
        self._write = lambda: ops.copy(shard, part)

    def _launch(self, add: bool) -> Work:
        return _PooledWork(self._tally, self._board, self._what, self._write)
