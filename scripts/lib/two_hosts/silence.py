"""A communicator whose collectives can be made to carry nothing, so that computation is timed by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mpishard.array.dtypes import Array
from mpishard.comm.base import Communicator
from mpishard.comm.work import Collective, Tally, Work

__all__ = ["Switch"]


class _Done(Work):
    def _complete(self) -> float | None:
        return None

    def _inputs_free(self) -> None:
        return None


class Switch:
    """Makes a communicator's collectives carry nothing while :attr:`silent`; give it before anything is bound.

    They still fill their outputs with this rank's own numbers, lest what is computed from them become anything: NaN
    and subnormal numbers take longer. :attr:`seconds` says for how long.
    """

    def __init__(self, comm: Communicator) -> None:
        self.silent = False
        self.last: Work = _Done(Tally())  #: what was started last
        self.seconds = 0.0
        self._gather: Any = comm._bind_all_gather
        self._reduce: Any = comm._bind_reduce_scatter
        self._exchange = comm._exchange
        self._comm = comm
        comm.__dict__["_bind_all_gather"] = self._bind_all_gather
        comm.__dict__["_bind_reduce_scatter"] = self._bind_reduce_scatter
        comm.__dict__["_exchange"] = self._exchanged

    def _bind_all_gather(self, shard: Array, out: Array, tally: Tally, nbytes: int) -> Collective:
        def instead(add: bool) -> None:
            for rank in range(self._comm.size):
                out[rank * shard.size : (rank + 1) * shard.size] = shard

        return _Switched(self, self._gather(shard, out, tally, nbytes), instead)

    def _bind_reduce_scatter(self, full: Array, out: Array, *rest: Any) -> Collective:
        def instead(add: bool) -> None:
            out[:] = full[self._comm.rank * out.size : (self._comm.rank + 1) * out.size]

        return _Switched(self, self._reduce(full, out, *rest), instead)

    def _exchanged(self, record: bytes) -> list[bytes]:
        return [bytes(record)] * self._comm.size if self.silent else self._exchange(record)


class _Switched(Collective):
    def __init__(self, switch: Switch, inner: Collective, instead: Callable[[bool], None]) -> None:
        super().__init__(Tally(), 0)
        self._switch, self._inner, self._instead = switch, inner, instead

    def start(self, add: bool = False) -> Work:
        work = super().start(add) if self._switch.silent else self._inner.start(add)
        self._switch.last = work
        return work

    def _launch(self, add: bool) -> Work:
        begin = time.perf_counter()
        self._instead(add)
        self._switch.seconds += time.perf_counter() - begin
        return _Done(self._tally)
