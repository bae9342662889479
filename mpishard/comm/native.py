"""The reduce-scatter ``native``: MPI_Ireduce_scatter_block, summed by the MPI library in an order of its own.

It is there to be compared with, and used when asked for. Nothing is promised of its bits, from one library, number of
ranks or size to another. MPI has no 16-bit floating type that all libraries know, so only fp32 and fp64 are summed.
"""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI

from mpishard.array.dtypes import DTYPES, Array, DType
from mpishard.array.ops import Ops
from mpishard.comm.pump import Flight, Post

__all__ = ["Native", "native_problem"]

_KINDS = {DTYPES["float32"]: MPI.FLOAT, DTYPES["float64"]: MPI.DOUBLE}


def native_problem(kind: DType, wire: DType) -> str:
    """Say why the library does not sum such inputs; empty where it does."""
    for one in (kind, wire):
        if one not in _KINDS:
            return (
                f"contributions travel as {one}, and MPI's own sums are of float32 and float64; reduce in fp32 "
                "(precision.reduce), or use another algorithm"
            )
    return ""


class Native:
    """A bound reduce-scatter.

    Args:
        ops: operations of the thread that calls MPI.
        full, out, scratch: the validated buffers; ``scratch`` holds as much as ``out``.
    """

    def __init__(self, comm: MPI.Intracomm, ops: Ops, full: Array, out: Array, scratch: Array) -> None:
        self._comm, self._ops, self._full, self._out = comm, ops, full, out
        self._sum = scratch[: out.nbytes].view(out.dtype)

    def flight(self, name: str, add: bool) -> Flight:
        """Return what does it once."""
        into, kind = self._sum if add else self._out, _KINDS[self._full.dtype]
        send, receive = [self._full, into.size, kind], [into, into.size, kind]  # counts are of a block

        def post() -> list[MPI.Request]:
            return [self._comm.Ireduce_scatter_block(send, receive, MPI.SUM)]

        def then() -> None:
            if add:
                self._ops.ordered_sum([self._sum], self._out, True)

        return _Sum(name, post, then)


class _Sum(Flight):
    """A call of MPI's, and what is done with its result where MPI is called."""

    def __init__(self, name: str, post: Post, then: Callable[[], None]) -> None:
        super().__init__(name, post)
        self._then = then

    def end(self, error: BaseException | None = None) -> None:
        """Add the result to what stands in ``out``, and wake who waits."""
        if error is None:
            self._then()
        super().end(error)
