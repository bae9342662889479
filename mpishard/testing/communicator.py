"""What every communicator promises, as checks that are run on every rank of it.

A check is called with one rank's communicator, on all its ranks at once, and raises ContractError where a promise is
broken. A transport of one's own passes when :func:`check_communicator` returns on every rank, on 1, 2, 3 and 4 ranks.
The promises are described in :mod:`mpishard.comm.base`. Arrays are the transport's own, written and read through its
operations, so they may be on a device.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np

from mpishard.array.dtypes import DTYPES, Array, DType
from mpishard.comm.base import Communicator
from mpishard.comm.frames import FRAME_BYTES
from mpishard.errors import CommError, ConfigError
from mpishard.testing.contract import ContractError, refused, require
from mpishard.testing.reductions import CHECKS as REDUCTIONS
from mpishard.testing.reductions import FLOATS, SIZES, floats
from mpishard.testing.rounds import Gather, data, ordered, pair, put, read, room, same, scratch_for, write

__all__ = ["CHECKS", "FLOATS", "Check", "check_communicator"]

Check: TypeAlias = Callable[[Communicator], None]
#: name -> check
CHECKS: dict[str, Check] = {}

_Bind: TypeAlias = Callable[[], object]


def check_communicator(comm: Communicator) -> None:
    """Run all checks of :data:`CHECKS` on this rank. Collective.

    Raises:
        ContractError: a promise is broken; the message begins with the name of the check.
    """
    for name, check in CHECKS.items():
        try:
            check(comm)
        except ContractError as error:  # noqa: PERF203
            raise ContractError(f"{name}: {error}") from error


def _check(function: Check) -> Check:
    CHECKS[function.__name__.lstrip("_")] = function
    return function


@_check
def _all_gather(comm: Communicator) -> None:
    for dtype, count, in_place in itertools.product(DTYPES.values(), SIZES, [False, True]):
        gather = Gather(comm, count, dtype, in_place)
        for round_ in range(2):  # twice in a row: the second finds what the first left behind
            gather.fill(round_)
            gather.collective.start().wait_inputs()
            gather.check(round_)
            if not in_place:
                same(read(comm, gather.input), gather.values(comm.rank, round_), "the input of the all-gather")


CHECKS.update(REDUCTIONS)


@_check
def _results_stay_inside_out(comm: Communicator) -> None:
    whole = room(comm, 5 * comm.size + 32, DTYPES["float32"])
    shard = put(comm, data(5, DTYPES["float32"], comm.rank))
    comm.bind_all_gather(shard, whole[16:-16]).start().wait_inputs()
    found = read(comm, whole)
    guards = np.concatenate([found[:16], found[-16:]])
    same(guards.view(np.uint8), np.full(128, 0xA5, np.uint8), "the elements beside out")


@_check
def _broadcast(comm: Communicator) -> None:
    for root, dtype, count in itertools.product(range(comm.size), DTYPES.values(), SIZES):
        array = put(comm, data(count, dtype, comm.rank))
        comm.broadcast(array, root)
        same(read(comm, array), data(count, dtype, root), f"broadcast of {dtype} x {count} from {root}")


@_check
def _broadcast_is_read_before_it_returns(comm: Communicator) -> None:
    for round_ in range(3):
        array = put(comm, data(5000, DTYPES["float64"], round_, comm.rank))
        if comm.rank != 0:
            time.sleep(0.01 * comm.rank)
        comm.broadcast(array, 0)
        if comm.rank == 0:
            write(comm, array, np.full(5000, np.nan))
            read(comm, array)  # a device has done it before the array is given back
        else:
            expected = data(5000, DTYPES["float64"], round_, 0)
            same(read(comm, array), expected, "a broadcast whose root overwrites its array")


@_check
def _all_reduce(comm: Communicator) -> None:
    for name, count in itertools.product(["float32", "float64"], SIZES):
        arrays = [data(count, DTYPES[name], rank) for rank in range(comm.size)]
        for _ in range(2):
            array = put(comm, arrays[comm.rank])
            comm.all_reduce(array)
            expected = ordered(arrays, 0, count, None, bracket=comm.bracket)
            same(read(comm, array), expected, f"all_reduce of {name} x {count}")


@_check
def _exchange(comm: Communicator) -> None:
    for length in (1, 0, 256, 5):
        records = [bytes([rank, length % 256]) * length for rank in range(comm.size)]
        found = comm.exchange(records[comm.rank])
        require(found == records, f"records of {2 * length} bytes: {found}")
    comm.barrier()


@_check
def _ranks_at_different_exchanges(comm: Communicator) -> None:
    """What is at odds is named on every rank, and the next exchange is in order again."""
    if comm.size == 1:
        return
    last = comm.size - 1
    for mine, told in (
        ((b"", "step 5" if comm.rank == last else "step 4"), f"rank {last} is at step 5, rank 0 at step 4; "),
        ((bytes(8 + 300 * (comm.rank == last)), "news"), f"news: rank {last} has a record of 308 bytes, rank 0 one of"),
    ):
        try:
            comm.exchange(*mine)
        except CommError as error:
            require(str(error).startswith(told), f"ranks at different exchanges are told {error}")
        else:
            require(False, "ranks at different exchanges are told nothing")
        comm.barrier()


@_check
def _barrier_waits_for_all(comm: Communicator) -> None:
    comm.barrier()
    begin = time.perf_counter()
    if comm.rank == comm.size - 1:
        time.sleep(0.2)
    comm.barrier()
    require(time.perf_counter() - begin > 0.05, "a barrier ended before the last rank had come")


@_check
def _skewed_ranks(comm: Communicator) -> None:
    gather, reduce = pair(comm)
    naps = np.random.default_rng(comm.rank).choice([0.0, 0.0, 0.001, 0.01], (12, 2))
    for round_, (first, second) in enumerate(naps):
        gather.fill(round_)
        reduce.fill(round_)
        time.sleep(first)
        one = gather.collective.start()
        two = reduce.collective.start(add=True)
        time.sleep(second)
        one.wait_inputs()
        two.wait_inputs()
        gather.check(round_)
        reduce.check(round_, add=True)


@_check
def _several_in_flight(comm: Communicator) -> None:
    """Waited for in every order, and in another one on odd ranks."""
    gather, reduce = pair(comm)
    third = Gather(comm, 17, DTYPES["uint16"], in_place=True, seed=3)
    flights = [gather, reduce, third]
    for round_, order in enumerate(itertools.permutations(range(3))):
        for flight in flights:
            flight.fill(round_)
        works = [flight.collective.start() for flight in flights]
        for i in order if comm.rank % 2 == 0 else order[::-1]:
            works[i].wait()
            flights[i].check(round_)
        for work in works:
            work.wait_inputs()


@_check
def _input_is_free_only_after_wait_inputs(comm: Communicator) -> None:
    """Each rank in turn is late to read; the others overwrite their inputs as early as they may."""
    gather, reduce = pair(comm)
    for late in range(comm.size):
        for flight in (gather, reduce):
            flight.fill(late)
            comm.barrier()
            work = flight.collective.start()
            if comm.rank == late:
                time.sleep(0.03)
                work.wait()
                flight.check(late)
            else:
                work.wait_inputs()
                write(comm, flight.input, np.full(flight.input.size, 0x7E7E, np.uint16).astype(flight.dtype))
            work.wait_inputs()


@_check
def _out_is_free_after_released(comm: Communicator) -> None:
    """Each rank in turn is late to read; the others overwrite what they gathered as early as they may."""
    gather, _ = pair(comm)
    for late in range(comm.size):
        gather.fill(late)
        comm.barrier()
        work = gather.collective.start()
        if comm.rank == late:
            time.sleep(0.03)
        work.wait()
        gather.check(late)
        work.released()
        write(comm, gather.out, np.zeros_like(read(comm, gather.out)))
        work.wait_inputs()
        read(comm, gather.out)  # a device is done before the buffers are given back


@_check
def _started_twice(comm: Communicator) -> None:
    gather, _ = pair(comm)
    gather.fill(0)
    work = gather.collective.start()
    with refused(CommError, "started again before"):
        gather.collective.start()
    for _ in range(2):  # waiting again is free
        work.wait()
        work.wait_inputs()
        work.released()
    gather.check(0)
    gather.fill(1)
    gather.collective.start().wait_inputs()
    gather.check(1)


@_check
def _one_ranks_mistake_is_everybodys(comm: Communicator) -> None:
    f2, f4, i8, i4 = DTYPES["bfloat16"], DTYPES["float32"], DTYPES["int64"], np.dtype(np.int32)
    n = comm.size
    own = slice(comm.rank * 4, comm.rank * 4 + 4)
    wide = room(comm, 8 * n, f4)

    gather = comm.bind_all_gather

    def reduce(full: Array, out: Array, scratch: Array | None = None) -> None:
        spare = scratch_for(comm, full) if scratch is None else scratch
        kept.append(spare)
        comm.bind_reduce_scatter(full, out, spare)

    kept: list[Array] = []  # a device may still be at work on what was written last

    def new(count: int, dtype: DType = f4) -> Array:
        kept.append(room(comm, count, dtype))
        return kept[-1]

    good_gather: _Bind = lambda: gather(new(4), new(4 * n))  # noqa: E731
    good_reduce: _Bind = lambda: reduce(new(4 * n), new(4))  # noqa: E731
    mistakes: list[tuple[_Bind, _Bind, str]] = [
        (good_gather, lambda: gather(new(4), new(4 * n + 1)), "out holds"),
        (good_gather, lambda: gather(new(4, f2), new(4 * n)), "must be of one type"),
        (good_gather, lambda: gather(new(8)[::2], new(4 * n)), "1-D contiguous"),
        (good_gather, lambda: gather(new(4).reshape(2, 2), new(4 * n)), "1-D contiguous"),
        (good_gather, lambda: gather(new(4).view(i4), new(4 * n).view(i4)), "not in the table"),
        (good_gather, lambda: gather(wide[own.start + 1 : own.stop + 1], wide[: 4 * n]), "overlaps out"),
        (good_reduce, lambda: reduce(new(4 * n), new(5)), "full holds"),
        (good_reduce, lambda: reduce(new(4 * n, f2), new(4, f2)), "out must be float32"),
        (good_reduce, lambda: reduce(new(4 * n, i8), new(4, i8)), "cannot be summed"),
        (good_reduce, lambda: reduce(wide[: 4 * n], wide[own]), "never in place"),
        (lambda: comm.broadcast(new(3)), lambda: comm.broadcast(new(3), comm.size), "is not one of"),
        (lambda: comm.broadcast(new(4)), lambda: comm.broadcast(new(8)[::2]), "1-D contiguous"),
        (lambda: comm.all_reduce(new(4)), lambda: comm.all_reduce(new(4, f2)), "is needed"),
    ]
    if comm.on_device:
        host = np.zeros(4 * n, f4)
        mistakes.append((good_gather, lambda: gather(new(4), host), "in host memory"))
        for name in set(FLOATS) - set(floats(comm)):
            unknown = new(4 * n, DTYPES[name])
            mistakes.append((good_reduce, partial(reduce, unknown, new(4)), "cannot be computed with on a GPU"))
    if need := comm.scratch_bytes(4 * n, f4, f4):
        spare = wide.view(DTYPES["uint8"])
        if need <= spare.nbytes:
            mistakes.append((good_reduce, lambda: reduce(new(4 * n), wide[:4], spare), "overlap"))
    # What is right by itself, but is not what the others bind.
    differences: list[tuple[_Bind, _Bind]] = [
        (good_gather, lambda: gather(new(5), new(5 * n))),
        (good_gather, lambda: gather(new(4, f2), new(4 * n, f2))),
        (good_gather, lambda: gather(wide[own], wide[: 4 * n])),
        (good_gather, good_reduce),
        (good_reduce, lambda: reduce(new(4 * n, f2), new(4))),
        (lambda: comm.broadcast(new(3), 0), lambda: comm.broadcast(new(3), comm.size - 1)),
        (lambda: comm.all_reduce(new(3)), lambda: comm.all_reduce(new(4))),
    ]
    for bad in {0, n - 1}:
        for right, wrong, message in mistakes:
            with refused(CommError, f"on rank {bad}, .*{message}"):
                (wrong if comm.rank == bad else right)()
        for right, wrong in differences if n > 1 else []:
            with refused(CommError, f"rank {bad or 1} binds"):
                (wrong if comm.rank == bad else right)()
    _skewed_ranks(comm)  # all is well again


@_check
def _split(comm: Communicator) -> None:
    everyone = list(range(comm.size))
    backwards = comm.split([everyone[::-1]])
    found = (backwards.rank, backwards.size)
    require(found == (comm.size - 1 - comm.rank, comm.size), f"all ranks backwards: rank and size are {found}")
    records = backwards.exchange(bytes([comm.rank]))
    require(records == [bytes([rank]) for rank in everyone[::-1]], f"all ranks backwards exchange {records}")
    parts = [group for group in (everyone[::2], everyone[1::2]) if group]
    part = comm.split(parts)
    own = everyone[comm.rank % 2 :: 2]
    place = (part.rank, part.size)
    require(place == (own.index(comm.rank), len(own)), f"a group of ranks {own}: rank and size are {place}")
    known = (comm.transport, *comm.children)
    require(part.transport in known, f"a group of {comm.transport} is {part.transport}; it can be {known}")
    records = part.exchange(bytes([comm.rank]))
    require(records == [bytes([rank]) for rank in own], f"a group of ranks {own} exchanges {records}")
    for child in (part, backwards, comm):
        _several_in_flight(child)
    grandchild = part.split([[rank] for rank in range(part.size)])
    CHECKS["reduce_scatter"](grandchild)
    apart = part.tallies["reduce_scatter"] is not comm.tallies["reduce_scatter"]
    require(apart, "a group counts in its parent's tallies")
    for child in (grandchild, part, backwards):
        child.close()
        child.close()
    comm.barrier()


@_check
def _wrong_groups_are_refused(comm: Communicator) -> None:
    everyone = list(range(comm.size))
    for groups in ([everyone, [0]], [everyone[1:]], [[*everyone, comm.size]]):
        with refused(ConfigError, "exactly once"):
            comm.split(groups)
    if comm.size > 1:
        with refused(CommError, r"split differently: rank 1"):
            comm.split([everyone if comm.rank == 0 else everyone[::-1]])


@_check
def _node(comm: Communicator) -> None:
    node = comm.node
    inside = 0 <= node.local_rank < node.local_size <= comm.size and 0 <= node.index < node.count <= comm.size
    require(inside, f"a rank of {comm.size} is at {node}")
    places = comm.exchange(bytes([node.index, node.local_rank]))
    require(len(set(places)) == comm.size, f"two ranks in one place: {places}")


@_check
def _tallies(comm: Communicator) -> None:
    gather, reduce = pair(comm)
    others = comm.size - 1
    before = {kind: (tally.calls, tally.bytes) for kind, tally in comm.tallies.items()}
    for round_ in range(2):
        gather.fill(round_)
        reduce.fill(round_)
        works = [gather.collective.start(), reduce.collective.start()]
        for work in works:
            work.wait_inputs()
    comm.exchange(b"12345")
    found = {kind: (t.calls - before[kind][0], t.bytes - before[kind][1]) for kind, t in comm.tallies.items()}
    expected = {
        "all_gather": (2, 2 * 301 * 4 * others),
        "reduce_scatter": (2, 2 * 203 * 2 * others),
        "exchange": (1, FRAME_BYTES * others),
        "broadcast": (0, 0),
    }
    require(found == expected, f"calls and bytes are {found}, not {expected}")
    array = room(comm, 10, DTYPES["float64"])
    comm.broadcast(array)
    read(comm, array)
    tally = comm.tallies["broadcast"]
    sent = tally.calls - before["broadcast"][0], tally.bytes - before["broadcast"][1]
    require(sent == (1, 80 if comm.rank == 0 else 0), f"a broadcast of 80 bytes counts as {sent}")
    require(all(t.busy >= 0 and t.waited >= 0 for t in comm.tallies.values()), "seconds below zero")


@_check
def _waiting_is_measured(comm: Communicator) -> None:
    gather, _ = pair(comm)
    comm.barrier()
    tally = comm.tallies["all_gather"]
    waited, busy = tally.waited, tally.busy
    if comm.rank == 0:
        time.sleep(0.05)
    gather.collective.start().wait_inputs()
    read(comm, gather.out)  # a device counts what it has come to
    tally = comm.tallies["all_gather"]
    seen = comm.rank == 0 or (tally.waited - waited > 0.03 and tally.busy - busy > 0.03)
    require(seen, "waiting 0.05 s for a late rank does not show in the tallies")
