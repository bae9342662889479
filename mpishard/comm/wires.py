"""What MPI sees of arrays: whole numbers of the element's width, so that nothing is converted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from mpi4py import MPI

from mpishard.array.dtypes import Array

__all__ = ["WIRE", "Peers", "wire_view"]

#: bytes of an element -> what MPI calls a whole number of them
WIRE = {1: MPI.UINT8_T, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T}


def wire_view(array: Array) -> Array:
    """View an array as whole numbers of its width."""
    return cast("Array", array.view(f"u{array.itemsize}"))


@dataclass(frozen=True)
class Peers:
    """Messages from point to point between ranks of a communicator.

    Args:
        tag: called where MPI is called, equally often on every rank: keeps collectives in flight apart.
    """

    comm: MPI.Intracomm
    rank: int
    size: int
    tag: Callable[[], int]

    def send(self, array: Array, rank: int, tag: int) -> MPI.Request:
        """Begin to send a 1-D array."""
        return self.comm.Isend([wire_view(array), array.size, WIRE[array.itemsize]], rank, tag)

    def receive(self, array: Array, rank: int, tag: int) -> MPI.Request:
        """Begin to receive into a 1-D array."""
        return self.comm.Irecv([wire_view(array), array.size, WIRE[array.itemsize]], rank, tag)
