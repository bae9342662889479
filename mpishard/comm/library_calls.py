"""The MPI library's own collectives, to be measured beside ours, and a barrier that is nothing but MPI's.

[Note: what they claim]
A sum of the library's is in whatever order it likes: it claims no bits, and nothing that trains calls it. Types of 16
bits are never handed to a reduction, which adds their bytes or ends the process.

Calls block, on the caller's thread, on a communicator of their own. MPI then has calls from two threads of a process,
never two at a time: so nothing of ours may be in flight meanwhile, which is what MPI_THREAD_SERIALIZED asks for too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from mpishard.array.dtypes import DTYPES, Array, DType
from mpishard.array.ops import Ops
from mpishard.comm.base import Communicator
from mpishard.comm.choice import connect
from mpishard.comm.mpi import WIRE, library
from mpishard.errors import ConfigError

__all__ = ["LIBRARY_OPS", "LibraryCalls"]

#: what the library can be asked for, and the call that is made
LIBRARY_OPS = {
    "all_gather": "MPI_Allgather in place",
    "reduce_scatter": "MPI_Reduce_scatter_block",
    "all_reduce": "MPI_Allreduce",
}
_SUMMED = {DTYPES["float32"]: MPI.FLOAT, DTYPES["float64"]: MPI.DOUBLE}


class LibraryCalls:
    """All processes of the job, on a communicator of their own. Making and closing it is collective.

    MPI must have started.
    """

    def __init__(self) -> None:
        self._mpi = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._mpi.Get_rank(), self._mpi.Get_size()
        #: name and version of the MPI library
        self.name = library()

    def connect(
        self, ops: Ops, transport: str, algorithm: str = "auto", *, share_device: bool = False
    ) -> Communicator:
        """Return one more communicator of all processes; ``algorithm`` is how its reduce-scatters go. Collective.

        Raises:
            ConfigError: on all ranks; see :func:`mpishard.comm.choice.connect`.
        """
        return connect(MPI.COMM_WORLD, ops, transport, share_device=share_device, algorithm=algorithm)

    def can(self, op: str, kind: DType) -> bool:
        """Return whether the library may be asked for ``op`` (of LIBRARY_OPS) on elements of ``kind``."""
        return op == "all_gather" or kind in _SUMMED

    def bind(self, op: str, source: Array, out: Array) -> Callable[[], None]:
        """Return what runs one collective to its end.

        Args:
            op: ``all_gather``, in place, where ``source`` is this rank's slice of ``out``; ``reduce_scatter``, where
                ``source`` is ``size`` times as long; ``all_reduce``, where they are of one length.

        Raises:
            ConfigError: the elements are of a type that the library must not sum, or there is no such op.
        """
        if op not in LIBRARY_OPS:
            raise ConfigError(f"operation {op!r} is not known; choose one of {', '.join(LIBRARY_OPS)}")
        if not self.can(op, out.dtype):
            raise ConfigError(f"{out.dtype} is never handed to a reduction of the MPI library; use float32 or float64")
        comm = self._mpi
        if op == "all_gather":
            everyone = [out.view(f"u{out.itemsize}"), source.size, WIRE[out.itemsize]]
            return lambda: comm.Allgather(MPI.IN_PLACE, everyone)
        kind = _SUMMED[out.dtype]
        # counts are of one rank's block, for a reduce-scatter too
        send, receive = [source, out.size, kind], [out, out.size, kind]
        if op == "reduce_scatter":
            return lambda: comm.Reduce_scatter_block(send, receive, MPI.SUM)
        return lambda: comm.Allreduce(send, receive, MPI.SUM)

    def barrier(self) -> None:
        """Return when every rank has come here; sooner after another than by an exchange of records."""
        self._mpi.Barrier()

    def largest(self, values: Array) -> Array:
        """Return the largest of the ranks' ``values`` (n,), fp64, element by element."""
        found = np.empty_like(values)
        self._mpi.Allreduce([values, values.size, MPI.DOUBLE], [found, found.size, MPI.DOUBLE], MPI.MAX)
        return found

    def close(self) -> None:
        """Free the communicator; the calls of :meth:`bind` are void then."""
        self._mpi.Free()
