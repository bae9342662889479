"""Contributions that travel in a narrower type than they are kept in."""

from __future__ import annotations

from mpishard.array.dtypes import Array
from mpishard.array.ops import Ops
from mpishard.comm.work import Collective, Work

__all__ = ["Rounded"]


class Rounded(Collective):
    """A reduce-scatter whose input is rounded whole when it starts, into ``copy``, from where it travels.

    Args:
        inner: the reduce-scatter of ``copy``.
        full: what is rounded, on the stream of ``ops``.
    """

    def __init__(self, inner: Collective, ops: Ops, full: Array, copy: Array) -> None:
        super().__init__(inner._tally, inner._nbytes)
        self._inner, self._ops, self._full, self._copy = inner, ops, full, copy

    def _launch(self, add: bool) -> Work:
        self._ops.copy(self._full, self._copy)
        return self._inner._launch(add)
