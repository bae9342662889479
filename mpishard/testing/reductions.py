"""What a reduce-scatter promises: the order of sums, brackets, types that travel, and the scratch it was given.

These are checks of :data:`mpishard.testing.communicator.CHECKS`, which says how checks are called.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from mpishard.array.dtypes import DTYPES, Array, DType
from mpishard.comm.base import Communicator
from mpishard.errors import CommError, ConfigError
from mpishard.testing.contract import refused, require
from mpishard.testing.rounds import Gather, Reduce, put, read, room, same, scratch_for, write

__all__ = ["CHECKS", "FLOATS", "SIZES", "floats"]

#: name -> check
CHECKS: dict[str, Callable[[Communicator], None]] = {}
#: types that can be summed, where the operations compute with them
FLOATS = ("float16", "bfloat16", "float32", "float64")
#: elements of a shard
SIZES = (0, 1, 7, 1000)

_NARROW = ("bfloat16", "float16")
_MANY = 5003  # elements that are several pieces of a transport that is told to use small ones


def floats(comm: Communicator) -> list[str]:
    """Return the types that a communicator's operations sum."""

    def known(name: str) -> bool:
        try:
            comm.ops.prepare(DTYPES[name])
        except ConfigError:
            return False
        return True

    return [name for name in FLOATS if known(name)]


def _check(function: Callable[[Communicator], None]) -> Callable[[Communicator], None]:
    CHECKS[function.__name__.lstrip("_")] = function
    return function


def _travels(comm: Communicator) -> list[tuple[DType, DType | None]]:
    """Return kinds of inputs with the type in which they travel; None for their own."""
    kinds: list[tuple[DType, DType | None]] = [(DTYPES[name], None) for name in floats(comm)]
    return kinds + [(DTYPES["float32"], DTYPES[name]) for name in _NARROW if name in floats(comm)]


def _twice(reduce: Reduce, add: bool) -> None:
    for round_ in range(2):  # the second finds what the first left behind
        reduce.fill(round_)
        reduce.collective.start(add).wait_inputs()
        reduce.check(round_, add)


@_check
def _reduce_scatter(comm: Communicator) -> None:
    for name, count, add in itertools.product(floats(comm), SIZES, [False, True]):
        _twice(Reduce(comm, count, DTYPES[name]), add)


@_check
def _contributions_are_rounded_once(comm: Communicator) -> None:
    """To the type that travels: on one rank, and this rank's own, too."""
    for (kind, wire), count, add in itertools.product(_travels(comm), SIZES, [False, True]):
        if wire is not None:
            _twice(Reduce(comm, count, kind, wire=wire), add)


@_check
def _what_is_too_large_travels_as_infinite(comm: Communicator) -> None:
    if "float16" in floats(comm):
        full = put(comm, np.full(4 * comm.size, 1e6, np.float32))
        out, half = room(comm, 4, DTYPES["float32"]), DTYPES["float16"]
        scratch = scratch_for(comm, full, half)
        comm.bind_reduce_scatter(full, out, scratch, half).start().wait_inputs()
        same(read(comm, out), np.full(4, np.inf, np.float32), "numbers that float16 does not hold")


@_check
def _sums_in_brackets(comm: Communicator) -> None:
    """Of every divisor of the number of ranks that the transport can: their sums are the terms of the sum."""
    usual = comm.bracket
    divisors = all(comm.size % bracket == 0 for bracket in comm.brackets)
    require(divisors and usual in comm.brackets, f"bracket is {usual}, of {comm.brackets} on {comm.size} ranks")
    try:
        for bracket in comm.brackets:
            comm.bracket = bracket
            for (kind, wire), count in itertools.product(_travels(comm), SIZES):
                reduce = Reduce(comm, count, kind, wire=wire)
                for add in (False, True):
                    _twice(reduce, add)
    finally:
        comm.bracket = usual


@_check
def _negative_zero_is_written(comm: Communicator) -> None:
    full, out = room(comm, comm.size, DTYPES["float32"]), room(comm, 1, DTYPES["float32"])
    write(comm, full, np.full(comm.size, -0.0, np.float32))
    scratch = scratch_for(comm, full)
    comm.bind_reduce_scatter(full, out, scratch).start().wait_inputs()
    same(read(comm, out), np.array([-0.0], np.float32), "a sum of negative zeros, of which the first is written")


@_check
def _scratch_of_the_stated_size_is_enough(comm: Communicator) -> None:
    """Nothing beside it is written, and what it holds before does not matter."""
    for (kind, wire), count in itertools.product(_travels(comm), (1, 7, _MANY)):
        full, out = room(comm, count * comm.size, kind), room(comm, count, DTYPES["float64"])
        out = out if kind == DTYPES["float64"] else out.view(DTYPES["float32"])[:count]
        write(comm, full, np.ones(full.size, kind))
        need = comm.scratch_bytes(full.size, kind, wire or kind)
        around = room(comm, need + 128, DTYPES["uint8"])
        comm.bind_reduce_scatter(full, out, around[64 : 64 + need], wire).start().wait_inputs()
        same(read(comm, out), np.full(count, comm.size, out.dtype), f"a sum of ones, {kind} as {wire or kind}")
        found = read(comm, around)
        beside = np.concatenate([found[:64], found[64 + need :]])
        same(beside, np.full(128, 0xA5, np.uint8), f"bytes beside a scratch of {need}")


@_check
def _reductions_of_skewed_ranks(comm: Communicator) -> None:
    """Of several pieces, and of one beside them; in flight together, and waited for in another order on odd ranks."""
    wide = DTYPES["float32"]
    narrow = DTYPES["bfloat16"] if "bfloat16" in floats(comm) else None
    flights = [
        Reduce(comm, _MANY, wide, seed=1),
        Gather(comm, 301, wide, seed=2),
        Reduce(comm, _MANY // 2, wide, seed=3, wire=narrow),
        Reduce(comm, 3, wide, seed=4),
    ]
    naps = np.random.default_rng(comm.rank).choice([0.0, 0.0, 0.001, 0.01], (4, len(flights)))
    for round_, nap in enumerate(naps):
        works = []
        for flight, seconds in zip(flights, nap, strict=True):
            flight.fill(round_)
            time.sleep(seconds)
            works.append(flight.collective.start(add=isinstance(flight, Reduce)))
        for i in range(len(flights))[:: 1 if comm.rank % 2 == 0 else -1]:
            works[i].wait()
            flights[i].check(round_, add=True)
        for work in works:
            work.wait_inputs()


@_check
def _one_ranks_mistake_in_a_reduction_is_everybodys(comm: Communicator) -> None:
    n, f4, f8, u1 = comm.size, DTYPES["float32"], DTYPES["float64"], DTYPES["uint8"]
    half = DTYPES["bfloat16"] if "bfloat16" in floats(comm) else f4
    kept: list[Array] = []  # a device may still be at work on what was written last
    usual = comm.bracket

    def new(count: int, dtype: DType = f4) -> Array:
        kept.append(room(comm, count, dtype))
        return kept[-1]

    def bind(wire: DType | None = None, kind: DType = f4, scratch: Array | None = None, bracket: int = usual) -> None:
        full = new(4 * n, kind)
        spare = scratch
        if spare is None and (need := comm.scratch_bytes(4 * n, kind, wire or kind)):
            spare = new(need, u1)
        comm.bracket = bracket
        try:
            comm.bind_reduce_scatter(full, new(4, f8 if kind == f8 else f4), spare, wire)
        finally:
            comm.bracket = usual

    def without() -> None:
        comm.bind_reduce_scatter(new(4 * n), new(4), None, half)

    mistakes: list[tuple[Callable[[], None], Callable[[], None], str]] = [
        (bind, lambda: bind(kind=f8, wire=half, scratch=new(1024, u1)), "alone"),
        (bind, lambda: bind(wire=f8, scratch=new(1024, u1)), "can travel as bfloat16 or float16"),
        (bind, lambda: bind(bracket=n + 1), f"must divide the number of ranks, {n}"),
        (bind, lambda: bind(bracket=0), f"must divide the number of ranks, {n}"),
    ]
    need = comm.scratch_bytes(4 * n, f4, half)
    narrow: Callable[[], None] = lambda: bind(half)  # noqa: E731
    if need:
        mistakes += [
            (narrow, without, f"there is no scratch; {need} bytes"),
            (narrow, lambda: bind(half, scratch=new(need - 1, u1)), f"holds {need - 1} bytes; {need} are needed"),
            (narrow, lambda: bind(half, scratch=new(need, f4)), "scratch is float32; it must be uint8"),
            (narrow, lambda: bind(half, scratch=new(need + 64, u1)[4:]), "4 bytes behind a multiple of 64"),
        ]
    for other in (k for k in range(1, n + 1) if n % k == 0):
        if other not in comm.brackets:
            mistakes.append((bind, partial(bind, bracket=other), f"bracket is {other}; "))
    differences: list[tuple[Callable[[], None], Callable[[], None]]] = []
    if n != usual and n in comm.brackets:
        differences.append((bind, lambda: bind(bracket=n)))
    if half != f4:
        differences.append((bind, narrow))
    for bad in {0, n - 1}:
        for right, wrong, message in mistakes:
            with refused(CommError, f"on rank {bad}, .*{message}"):
                (wrong if comm.rank == bad else right)()
        for right, wrong in differences if n > 1 else []:
            with refused(CommError, f"rank {bad or 1} binds"):
                (wrong if comm.rank == bad else right)()
    bind()
    read(comm, kept[-1])
