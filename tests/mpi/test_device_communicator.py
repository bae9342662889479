"""The transports for arrays on a device, over real MPI on the stand-in, whose device memory MPI can read."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.ops import Ops
from mpishard.comm.base import Communicator
from mpishard.errors import CommError, ConfigError
from mpishard.testing import communicator as suite
from mpishard.testing import rounds
from tests.standin import installed

pytestmark = pytest.mark.mpi

#: transport, bytes of a call or a piece (None by default), with a thread or inline, what the stand-in does first
WAYS = [
    ("mpi", None, True, "others"),
    ("mpi", 96, False, "needed"),
    ("staged", None, False, "needed"),
    ("staged", 1000, True, "others"),
    ("nccl", None, True, "others"),
]


def make(transport: str, ops: Ops, **options: Any) -> Any:
    from mpi4py import MPI

    from mpishard.comm.mpi import MpiCommunicator
    from mpishard.comm.mpi_device import DeviceMpiCommunicator
    from mpishard.comm.nccl import NcclCommunicator
    from mpishard.comm.staged import StagedCommunicator

    if transport == "nccl":
        return NcclCommunicator(MpiCommunicator(MPI.COMM_WORLD, NumpyOps()), ops)
    kind = {"mpi": DeviceMpiCommunicator, "staged": StagedCommunicator}[transport]
    return kind(MPI.COMM_WORLD, ops, **options)


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: "-".join(map(str, way)))
def comm(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    from mpi4py import MPI

    transport, chunk, threaded, late = request.param
    options = {"threaded": threaded} | ({"chunk_bytes": chunk} if chunk else {})
    with installed(devices=8, late=late):
        from mpishard.array.cupy_ops import CupyOps

        made = make(transport, CupyOps(MPI.COMM_WORLD.rank), **options)
        yield made
        made.close()
        gc.collect()  # what is given back belongs to this machine


@pytest.mark.parametrize("name", suite.CHECKS)
def test_contract(comm: Communicator, name: str) -> None:
    suite.CHECKS[name](comm)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_the_bits_of_the_host(comm: Communicator, name: str) -> None:
    """Pieces are cut across ranks' blocks, so that none changes a bit."""
    from mpi4py import MPI

    from mpishard.comm.mpi import MpiCommunicator

    host = MpiCommunicator(MPI.COMM_WORLD, NumpyOps())
    found = []
    for one in (host, comm):
        reduce = rounds.Reduce(one, 5001, DTYPES[name], seed=5)
        reduce.fill(0)
        reduce.collective.start(add=True).wait_inputs()
        gather = one.bind_all_gather(reduce.out, whole := rounds.room(one, 5001 * one.size, DTYPES["float32"]))
        gather.start().wait_inputs()
        found.append(rounds.read(one, whole).copy())
    rounds.same(found[1], found[0], "sums that were gathered, on the device and on the host")
    host.close()


def test_no_memory_and_no_event_is_taken_by_a_start(comm: Communicator) -> None:
    from tests.standin.machine import here

    flights = rounds.pair(comm)

    def step(round_: int) -> None:
        for flight in flights:
            flight.fill(round_)
            flight.collective.start().wait_inputs()
            flight.check(round_)

    step(0)
    step(1)
    handles, blocks = here()._handle, len(here().memory.live())
    for round_ in range(2, 5):
        step(round_)
    assert here()._handle == handles
    assert len(here().memory.live()) <= blocks  # what earlier tests left may be given back meanwhile


def test_scratch(comm: Communicator) -> None:
    """Staged, a piece is enough, however much is reduced; what is rounded lies before it, whole."""
    wide, narrow, count = DTYPES["float32"], DTYPES["bfloat16"], 64 * 10**7
    need = comm.scratch_bytes(count, wide, wide)
    if comm.size == 1:
        assert need == 0
    elif comm.transport == "staged":
        assert need <= max(comm.chunk_bytes, 64 * comm.size)  # type: ignore[attr-defined]
    else:
        assert need == 4 * count
    assert comm.scratch_bytes(count, wide, narrow) == 2 * count + comm.scratch_bytes(count, narrow, narrow)


class Recorder:
    """Stands before an mpi4py communicator and notes what calls hand over: their names, and how memory is named."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.calls: dict[str, set[str]] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            from mpi4py import MPI

            from mpishard.comm.mpi_device import Wire

            kinds = {"in place" for arg in args if arg is MPI.IN_PLACE}
            kinds |= {"device" if isinstance(arg[0], Wire) else "host" for arg in args if isinstance(arg, list)}
            self.calls.setdefault(name, set()).update(kinds)
            return getattr(self.comm, name)(*args)

        return call


def test_what_mpi_is_asked_for(comm: Communicator) -> None:
    """No nonblocking collective and no reduction of device memory; in place is the all-gather alone."""
    owner: Any = comm if comm.transport != "nccl" else comm._control  # type: ignore[attr-defined]
    real = owner._mpi
    recorder = owner._mpi = Recorder(real)
    try:
        for flight in (*rounds.pair(comm), rounds.Gather(comm, 17, DTYPES["uint16"], in_place=True)):
            flight.fill(0)
            flight.collective.start().wait_inputs()
            flight.check(0)
        array = rounds.put(comm, np.arange(301.0))
        comm.broadcast(array)
        rounds.read(comm, array)
    finally:
        owner._mpi = real
    calls = {name: kinds for name, kinds in recorder.calls.items() if name != "Iallgather"}
    assert recorder.calls["Iallgather"] == {"host"}  # records
    if comm.transport == "nccl":
        assert calls == {}
    elif comm.size == 1:
        assert set(calls) <= {"Bcast"}
    elif comm.transport == "staged":
        assert calls == {"Allgather": {"host"}, "Alltoall": {"host"}, "Bcast": {"host"}}
    elif owner.chunk_bytes == 96:
        expected = {"Isend": {"device"}, "Irecv": {"device"}, "Bcast": {"device"}, "Allgather": {"in place", "device"}}
        assert calls == expected
    else:
        expected = {"Allgather": {"in place", "device"}, "Alltoall": {"device"}, "Bcast": {"device"}}
        assert calls == expected


def test_records_keep_their_place_among_what_was_started(comm: Communicator) -> None:
    """Also where ranks wait at different times: MPI matches collectives by their order."""
    gather = rounds.Gather(comm, 64, DTYPES["float32"])
    for round_ in range(3):
        gather.fill(round_)
        work = gather.collective.start()
        if comm.rank % 2 == 0:
            work.wait()
        assert comm.exchange(bytes([round_, comm.rank])) == [bytes([round_, rank]) for rank in range(comm.size)]
        work.wait_inputs()
        gather.check(round_)


def test_without_a_thread_blocking_calls_wait_for_who_waits_and_keep_their_order() -> None:
    from mpishard.comm.pump import Flight, Pump

    pump, order = Pump(threaded=False), []

    def flight(name: str, blocking: bool) -> Flight:
        return Flight(name, lambda: [order.append(name)][:0], blocking=blocking)  # type: ignore[func-returns-value]

    first, second, third = flight("first", False), flight("second", True), flight("third", False)
    pump.submit(first)
    pump.submit(second)
    pump.submit(third)
    assert order == ["first"] and pump.busy()
    pump.finish(third)
    assert order == ["first", "second", "third"] and second.done.is_set() and not pump.busy()
    pump.finish(second)


def test_what_was_bound_on_the_host_is_refused(comm: Communicator) -> None:
    with pytest.raises(CommError, match=f"shard is in host memory; transport {comm.transport} was made for arrays in"):
        comm.bind_all_gather(np.zeros(4, np.float32), np.zeros(4 * comm.size, np.float32))


# NCCL has no thread.
@pytest.mark.parametrize("comm", [way for way in WAYS if way[0] != "nccl"], ids=str, indirect=True)
def test_a_failure_in_the_thread_reaches_who_waits(comm: Communicator) -> None:
    gather = rounds.Gather(comm, 3, DTYPES["float32"])
    gather.fill(0)

    def cut() -> None:
        raise RuntimeError("the cable is cut")

    marks = gather.collective._sets[0]  # type: ignore[attr-defined]
    marks.finish = cut
    work = gather.collective.start()
    for _ in range(2):
        with pytest.raises(CommError, match=r"all-gather number \d+ failed in MPI: the cable is cut"):
            work.wait()
    rounds.read(comm, gather.out)
    comm.barrier()


@pytest.fixture
def device() -> Iterator[Ops]:
    from mpi4py import MPI

    with installed(devices=8, late="needed"):
        from mpishard.array.cupy_ops import CupyOps

        yield CupyOps(MPI.COMM_WORLD.rank)
        gc.collect()


@pytest.mark.parametrize(("told", "transport"), [("1", "mpi"), ("0", "staged"), ("", "staged")])
def test_a_programs_communicator_gets_the_transport_that_fits(
    device: Ops, monkeypatch: pytest.MonkeyPatch, told: str, transport: str
) -> None:
    from mpi4py import MPI

    from mpishard.comm.launch import communicator

    monkeypatch.setenv("MPISHARD_GPU_AWARE", told)
    made = communicator(MPI.COMM_WORLD, device)
    assert made.transport == (transport if made.size > 1 else "local")
    if told == "" and made.size > 1:  # the wheels of both MPIs take none
        assert made.describe().endswith("says that it does not take GPU memory")
    suite.CHECKS["several_in_flight"](made)
    made.close()


def test_mpi_on_a_device_is_refused_where_mpi_does_not_take_its_memory(
    device: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpi4py import MPI

    from mpishard.comm.launch import communicator

    monkeypatch.delenv("MPISHARD_GPU_AWARE", raising=False)
    with pytest.raises(ConfigError, match=r"transport 'mpi' hands GPU memory to MPI, and .*use transport staged"):
        communicator(MPI.COMM_WORLD, device, "mpi")
    # One rank that says no is a no of all.
    monkeypatch.setenv("MPISHARD_GPU_AWARE", str(int(MPI.COMM_WORLD.rank != MPI.COMM_WORLD.size - 1)))
    made = communicator(MPI.COMM_WORLD, device)
    assert made.transport == ("staged" if made.size > 1 else "local")
    made.close()


def test_one_rank_without_a_gpu_fails_on_all(device: Ops) -> None:
    from mpi4py import MPI

    from mpishard.comm.choice import connect

    if MPI.COMM_WORLD.size == 1:
        pytest.skip("one rank is of one mind")
    last = MPI.COMM_WORLD.size - 1

    def some(local_rank: int | None) -> Ops:
        if MPI.COMM_WORLD.rank == last:
            raise ConfigError("no GPU is visible")
        return device

    with pytest.raises(ConfigError, match=f"rank {last}: no GPU is visible"):
        connect(MPI.COMM_WORLD, some)
    mixed = NumpyOps() if last == MPI.COMM_WORLD.rank else device
    with pytest.raises(ConfigError, match=f"rank 0 computes on a GPU .* and rank {last} on the CPU"):
        connect(MPI.COMM_WORLD, mixed)


def test_ranks_that_share_a_gpu() -> None:
    from mpi4py import MPI

    from mpishard.comm.launch import communicator

    if MPI.COMM_WORLD.size == 1:
        pytest.skip("one rank shares nothing")
    with installed(devices=1, late="needed"):
        from mpishard.array.cupy_ops import CupyOps

        ops = CupyOps(0)
        with pytest.raises(ConfigError, match=r"ranks 0.* and \d use one GPU"):
            communicator(MPI.COMM_WORLD, ops)
        with pytest.raises(ConfigError, match="NCCL takes one rank for each GPU"):
            communicator(MPI.COMM_WORLD, ops, "nccl", share_device=True)
        made = communicator(MPI.COMM_WORLD, ops, "staged", share_device=True)
        suite.CHECKS["several_in_flight"](made)
        made.close()
        gc.collect()


@pytest.mark.parametrize("transport", ["staged", "nccl"])
def test_arrays_in_host_memory_have_no_use_for_these(transport: str) -> None:
    from mpi4py import MPI

    from mpishard.comm.launch import communicator

    with pytest.raises(ConfigError, match=f"transport '{transport}' carries arrays of a GPU"):
        communicator(MPI.COMM_WORLD, NumpyOps(), transport)
