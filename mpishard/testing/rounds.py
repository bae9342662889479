"""Rounds of collectives whose result every rank can work out: ranks draw each other's data from seeds.

All comparisons are of bits. Arrays of a transport may be on a device: they are written and read through its
operations alone.
"""

from __future__ import annotations

import numpy as np

from mpishard.array.dtypes import DTYPES, Array, DType, accumulator, name_of
from mpishard.comm.base import Collective, Communicator
from mpishard.testing.contract import ContractError

__all__ = ["Gather", "Reduce", "data", "ordered", "pair", "put", "read", "room", "same", "scratch_for", "write"]


def data(count: int, dtype: DType, *seed: int) -> Array:
    """Draw numbers of very different size, so that another order of sums has other bits; any bits for integers."""
    rng = np.random.default_rng([count, *seed])
    if "float" in name_of(dtype):
        return (rng.standard_normal(count) * 10.0 ** rng.uniform(-3, 3, count)).astype(dtype)
    return rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8).view(dtype)


def same(found: Array, expected: Array, what: str) -> None:
    """Compare bits."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise ContractError(f"{what}: {found} is not like {expected}")
    wrong = np.flatnonzero(found.view(np.uint8) != expected.view(np.uint8)) // max(1, found.itemsize)
    if wrong.size:
        i = int(wrong[0])
        raise ContractError(f"{what}: {wrong.size} bytes differ, first element {i}: {found[i]!r} not {expected[i]!r}")


def ordered(
    fulls: list[Array], start: int, count: int, before: Array | None, wire: DType | None = None, bracket: int = 1
) -> Array:
    """Return what a reduce-scatter must give: the ranks' blocks, one after another, in fp32 (fp64 for fp64).

    Each is rounded to ``wire`` first, and every ``bracket`` of them are summed by themselves.
    """
    kind = accumulator(fulls[0].dtype)
    wide = [full[start : start + count].astype(wire or full.dtype).astype(kind) for full in fulls]
    total = before
    for first in range(0, len(wide), bracket):
        part = wide[first].copy()
        for other in wide[first + 1 : first + bracket]:
            part += other
        total = part if total is None else total + part
    assert total is not None  # there is a rank
    return total


def scratch_for(comm: Communicator, full: Array, wire: DType | None = None) -> Array:
    """Return the scratch of a reduce-scatter, of the size that the transport states."""
    return room(comm, comm.scratch_bytes(full.size, full.dtype, wire or full.dtype), DTYPES["uint8"])


def room(comm: Communicator, count: int, dtype: DType) -> Array:
    """Return an array of the transport, filled with what no check sends."""
    array = comm.allocate(count, dtype)
    write(comm, array, _rubbish(array, 0xA5))
    return array


def put(comm: Communicator, values: Array) -> Array:
    """Return an array of the transport that holds ``values``."""
    array = room(comm, values.size, values.dtype)
    write(comm, array, values)
    return array


def write(comm: Communicator, array: Array, values: Array) -> None:
    """Write values from host memory into an array of the transport."""
    host = comm.ops.host_like(array)
    host[...] = values
    comm.ops.upload(host, array)


def read(comm: Communicator, array: Array) -> Array:
    """Return the values of an array of the transport in host memory."""
    return comm.ops.fetch(array)


def _rubbish(array: Array, byte: int) -> Array:
    return np.full(array.nbytes, byte, np.uint8).view(array.dtype)


class Gather:
    """A bound all-gather of ``count`` elements per rank, with its buffers."""

    def __init__(self, comm: Communicator, count: int, dtype: DType, in_place: bool = False, seed: int = 0) -> None:
        self.comm, self.count, self.dtype, self.seed = comm, count, dtype, seed
        self.out = room(comm, count * comm.size, dtype)
        own = self.out[comm.rank * count : (comm.rank + 1) * count]
        self.input = own if in_place else room(comm, count, dtype)
        self.collective: Collective = comm.bind_all_gather(self.input, self.out)

    def values(self, rank: int, round_: int) -> Array:
        """Return what a rank gives in a round."""
        return data(self.input.size, self.dtype, self.seed, round_, rank)

    def fill(self, round_: int) -> None:
        """Write this rank's input of a round, and rubbish into the output."""
        write(self.comm, self.out, _rubbish(self.out, 0x5A))
        write(self.comm, self.input, self.values(self.comm.rank, round_))

    def check(self, round_: int, add: bool = False) -> None:
        """Compare the result of a round."""
        everyone = [self.values(rank, round_) for rank in range(self.comm.size)]
        what = f"all-gather of {self.dtype} x {self.count}, round {round_}"
        same(read(self.comm, self.out), np.concatenate(everyone), what)


class Reduce(Gather):
    """The same for a reduce-scatter of ``count`` elements per rank, which travel as ``wire``."""

    def __init__(self, comm: Communicator, count: int, dtype: DType, seed: int = 0, wire: DType | None = None) -> None:
        self.comm, self.count, self.dtype, self.seed = comm, count, dtype, seed
        self.wire, self.bracket = wire or dtype, comm.bracket
        self.input = room(comm, count * comm.size, dtype)
        self.out = room(comm, count, accumulator(dtype))
        self.scratch = scratch_for(comm, self.input, wire)
        self.collective: Collective = comm.bind_reduce_scatter(self.input, self.out, self.scratch, wire)

    def before(self, round_: int) -> Array:
        """Return what stands in the output before a round."""
        return data(self.count, self.out.dtype, self.seed, round_, self.comm.rank, 1)

    def fill(self, round_: int) -> None:
        """Write this rank's input of a round, and what it is added to."""
        write(self.comm, self.out, self.before(round_))
        write(self.comm, self.input, self.values(self.comm.rank, round_))

    def check(self, round_: int, add: bool = False) -> None:
        """Compare the result of a round, added or written."""
        fulls = [self.values(rank, round_) for rank in range(self.comm.size)]
        before = self.before(round_) if add else None
        start = self.comm.rank * self.count
        expected = ordered(fulls, start, self.count, before, self.wire, self.bracket)
        how = f" as {self.wire}" if self.wire != self.dtype else ""
        how += f" by {self.bracket}" if self.bracket > 1 else ""
        what = f"reduce-scatter of {self.dtype}{how} x {self.count}, add={add}, round {round_}"
        same(read(self.comm, self.out), expected, what)
        same(read(self.comm, self.input), fulls[self.comm.rank], "the input of the reduce-scatter")


def pair(comm: Communicator) -> tuple[Gather, Reduce]:
    """Return one of each, of odd sizes."""
    return Gather(comm, 301, DTYPES["float32"], seed=1), Reduce(comm, 203, DTYPES["bfloat16"], seed=2)
