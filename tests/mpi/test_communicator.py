import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm import Communicator, world
from mpishard.errors import CommError, ConfigError
from mpishard.testing import communicator as suite
from mpishard.testing import rounds

pytestmark = pytest.mark.mpi

#: As by default, and every call in slices, or in pieces, which then number several per block.
WAYS = [(threaded, chunk) for threaded in (True, False) for chunk in (2**28, 200)]


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: f"{'thread' if way[0] else 'inline'}-{way[1]}")
def comm(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    from mpi4py import MPI

    from mpishard.comm.mpi import MpiCommunicator

    threaded, chunk = request.param
    made = MpiCommunicator(MPI.COMM_WORLD, NumpyOps(), chunk_bytes=chunk, threaded=threaded)
    yield made
    made.close()


@pytest.mark.parametrize("name", suite.CHECKS)
def test_contract(comm: Communicator, name: str) -> None:
    suite.CHECKS[name](comm)


class Recorder:
    """Stands before an mpi4py communicator and notes the calls that hand over arrays, with the most bytes of each."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            arrays = [arg[0] for arg in args if isinstance(arg, list) and isinstance(arg[0], np.ndarray)]
            if arrays:
                self.calls[name] = max(self.calls.get(name, 0), *(array.nbytes for array in arrays), 0)
            return getattr(self.comm, name)(*args)

        return call


def test_calls_above_the_limit_go_in_slices_from_point_to_point(comm: Communicator) -> None:
    owner: Any = comm
    flights = rounds.pair(comm)  # which makes the communicator for pieces
    real, apart, limit = owner._mpi, owner._apart, owner.chunk_bytes
    recorder, pieces = Recorder(real), Recorder(apart)
    owner._mpi, owner._apart = recorder, pieces
    try:
        for flight in flights:
            flight.collective.start().wait_inputs()
        comm.broadcast(np.zeros(301, np.float32))
    finally:
        owner._mpi, owner._apart = real, apart
    if comm.size == 1:
        assert set(recorder.calls) == {"Ibcast"}
    elif limit == 200:
        assert recorder.calls == {"Isend": 200, "Irecv": 200, "Ibcast": 200}
        assert set(pieces.calls) == {"Ialltoallv"}
        assert owner.scratch_rule.cut(203 * comm.size, DTYPES["bfloat16"], DTYPES["bfloat16"]).width * 2 <= limit
    else:
        assert set(recorder.calls) == {"Iallgather", "Ialltoall", "Ibcast"} and not pieces.calls


@pytest.mark.parametrize("wire", [None, "bfloat16"])
@pytest.mark.parametrize("threaded", [True, False])
def test_a_large_reduction_takes_a_bounded_scratch(threaded: bool, wire: str | None) -> None:
    """As many pieces as the defaults make of it; the sums are those of a reduction in one piece."""
    from mpi4py import MPI

    from mpishard.comm import scratch
    from mpishard.comm.mpi import MpiCommunicator

    made = MpiCommunicator(MPI.COMM_WORLD, NumpyOps(), threaded=threaded)
    kind = DTYPES["float32"]
    sent = kind if wire is None else DTYPES[wire]
    count = 3 * scratch.SLOT_BYTES // sent.itemsize // made.size + 5
    assert made.scratch_bytes(100 * count * made.size, kind, sent) <= 2 * scratch.SLOT_BYTES
    if made.size > 1:
        assert made.scratch_rule.cut(count * made.size, kind, sent).pieces > 3
    rng = np.random.default_rng(made.rank)
    full = made.allocate(count * made.size, kind)
    out = made.allocate(count, kind)
    bound = made.bind_reduce_scatter(full, out, rounds.scratch_for(made, full, sent), sent)
    for round_ in range(2):
        full[:] = rng.integers(-(2**24), 2**24, full.size, dtype=np.int32) * np.float32(2.0 ** (round_ + 3 * made.rank))
        out.fill(0.1)
        bound.start(add=True).wait_inputs()
        # Blocks are exchanged by another way, and summed at once.
        parts = np.empty_like(full)
        made._mpi.Alltoall([full, count, MPI.FLOAT], [parts, count, MPI.FLOAT])
        total = np.full(count, np.float32(0.1))
        for part in parts.reshape(made.size, count):
            total += part.astype(sent).astype(kind)
        rounds.same(out, total, f"round {round_}")
    made.close()


def test_pieces_go_on_while_the_program_computes() -> None:
    """The thread sums pieces and sends the next ones, though nobody waits; other calls come between."""
    from mpi4py import MPI

    from mpishard.comm.mpi import MpiCommunicator

    made = MpiCommunicator(MPI.COMM_WORLD, NumpyOps(), threaded=True, chunk_bytes=256)
    reduce = rounds.Reduce(made, 2000, DTYPES["float32"])
    reduce.fill(0)
    work = reduce.collective.start()
    for round_ in range(20):  # on each rank at other moments, as seen from the pieces
        assert made.exchange(bytes([round_])) == [bytes([round_])] * made.size
    if made.size > 1:
        flight: Any = work._flight  # type: ignore[attr-defined]
        assert flight.done.wait(60) and not flight.awaited
        reduce.check(0)
    work.wait_inputs()
    reduce.check(0)
    made.close()


@pytest.mark.parametrize("comm", [way for way in WAYS if way[1] == 200], ids=str, indirect=True)
def test_a_failure_in_a_piece_reaches_who_waits_and_leaves_the_line(comm: Communicator) -> None:
    if comm.size == 1:
        pytest.skip("one rank sends nothing")
    reduce, after = (rounds.Reduce(comm, 1000, DTYPES["float32"], seed=seed) for seed in range(2))
    reduce.fill(0)
    make = reduce.collective._make  # type: ignore[attr-defined]

    def broken(add: bool) -> Any:
        series = make(add)
        land = series._land

        def cut_first(piece: int) -> None:  # on all ranks, so that what they have posted is the same
            land(piece)
            cut()

        series._land = cut_first
        return series

    reduce.collective._make = broken  # type: ignore[attr-defined]
    work = reduce.collective.start()
    after.fill(1)
    later = after.collective.start()
    with pytest.raises(CommError, match=r"reduce-scatter number \d+ failed in MPI: .*the cable is cut"):
        work.wait()
    later.wait_inputs()
    after.check(1)


def test_starting_does_not_wait_for_late_ranks(comm: Communicator) -> None:
    gather = rounds.Gather(comm, 10_000, DTYPES["float64"])
    gather.fill(0)
    comm.barrier()
    if comm.rank == 0:
        time.sleep(0.5)
    begin = time.perf_counter()
    work = gather.collective.start()
    assert time.perf_counter() - begin < 0.3
    work.wait_inputs()
    gather.check(0)


def test_many_collectives_in_flight(comm: Communicator) -> None:
    gathers = [rounds.Gather(comm, 50 + i, DTYPES["float32"], seed=i) for i in range(20)]
    for gather in gathers:
        gather.fill(0)
    works = [gather.collective.start() for gather in gathers]
    for work, gather in zip(works[::-1], gathers[::-1], strict=True):
        work.wait()
        gather.check(0)


def test_the_programs_own_messages_do_not_meet_ours(comm: Communicator) -> None:
    from mpi4py import MPI

    gather = rounds.Gather(comm, 1000, DTYPES["float32"])
    mine = np.full(3, comm.rank)
    for round_ in range(20):
        gather.fill(round_)
        gather.collective.start().wait_inputs()
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, mine, op=MPI.MAX)
        assert (mine == comm.size - 1).all()
        gather.check(round_)


def cut() -> list[object]:
    raise RuntimeError("the cable is cut")


@pytest.mark.parametrize(("post", "message"), [(cut, "the cable is cut"), (lambda: [None], "Request")])
def test_a_failure_in_mpi_reaches_who_waits(comm: Communicator, post: Callable[[], object], message: str) -> None:
    """Whether it is in posting or in testing."""
    gather = rounds.Gather(comm, 3, DTYPES["float32"])
    gather.collective._post = post  # type: ignore[attr-defined]
    work = gather.collective.start()
    for _ in range(2):
        with pytest.raises(CommError, match=rf"all-gather number \d+ failed in MPI: .*{message}"):
            work.wait()
    comm.barrier()


def test_what_was_started_first_is_posted_first(comm: Communicator) -> None:
    """Also where the thread finds several at once, which two collectives of one shape would not survive."""
    from mpishard.comm.pump import Flight

    gathers = [rounds.Gather(comm, 9, DTYPES["float32"], seed=seed) for seed in range(3)]
    for gather in gathers:
        gather.fill(0)
    if comm.rank == 0:
        comm._pump.submit(Flight("nap", lambda: [time.sleep(0.1)][:0]))  # type: ignore
    works = []
    for gather in gathers:
        works.append(gather.collective.start())
        time.sleep(0.02 if comm.rank else 0)  # the thread of the others finds one at a time
    for work, gather in zip(works, gathers, strict=True):
        work.wait_inputs()
        gather.check(0)


def test_an_exchange_costs_less_than_a_millisecond(comm: Communicator) -> None:
    comm.barrier()
    seconds = []
    for _ in range(100):
        begin = time.perf_counter()
        comm.exchange(bytes(256))
        seconds.append(time.perf_counter() - begin)
    limit = 1e-3 if comm.size <= 2 else 1e-2  # ranks may outnumber cores
    assert np.median(seconds) < limit, f"an exchange takes {np.median(seconds) * 1e6:.0f} us"


def test_waiting_leaves_the_core_to_others(comm: Communicator) -> None:
    comm.barrier()
    begin = time.process_time()
    if comm.rank == 0:
        time.sleep(0.5)
    comm.barrier()
    assert time.process_time() - begin < 0.25


def test_the_thread_ends_with_the_last_communicator() -> None:
    from mpi4py import MPI

    from mpishard.comm.mpi import MpiCommunicator

    before = threading.active_count()
    parent = MpiCommunicator(MPI.COMM_WORLD, NumpyOps(), threaded=True)
    child = parent.split([range(parent.size)])
    assert threading.active_count() == before + 1  # they share one
    parent.close()
    child.barrier()
    child.close()
    assert threading.active_count() == before
    with pytest.raises(CommError, match="closed"):
        child.barrier()


def test_nothing_is_polled_while_nothing_is_in_flight() -> None:
    from mpi4py import MPI

    from mpishard.comm import mpi as module

    made = module.MpiCommunicator(MPI.COMM_WORLD, NumpyOps(), threaded=True)
    made.barrier()
    tests = itertools.count()
    look = made._pump._test
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, made._pump, "_test", look)
        made._pump._test = lambda: bool(next(tests)) and look()  # type: ignore[method-assign]
        time.sleep(0.05)
    assert next(tests) <= 1  # one ring of the bell may have been left
    made.close()


def test_an_intercommunicator_is_refused() -> None:
    from mpi4py import MPI

    from mpishard.comm.mpi import MpiCommunicator

    if MPI.COMM_WORLD.Get_size() < 2:
        pytest.skip("one rank makes no intercommunicator")
    rank = MPI.COMM_WORLD.Get_rank()
    half = MPI.COMM_WORLD.Split(min(rank, 1), rank)
    both = half.Create_intercomm(0, MPI.COMM_WORLD, 1 if rank == 0 else 0)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="intercommunicator"):
        MpiCommunicator(both, NumpyOps())
    both.Free()
    half.Free()


def test_the_world_is_the_launchers() -> None:
    from mpi4py import MPI

    made = world(NumpyOps())
    assert (made.rank, made.size) == (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())
    assert made.transport == ("node" if made.size > 1 else "local")
    made.close()
    made = world(NumpyOps(), "mpi")
    assert made.transport == "mpi"
    suite.CHECKS["reduce_scatter"](made)
    made.close()
