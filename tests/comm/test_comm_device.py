"""Arrays of a device on the stand-in, in one process: the local transport, and NCCL between threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES, accumulator, dtype
from mpishard.array.ops import Ops
from mpishard.comm import LocalCommunicator, run_threads
from mpishard.comm.base import Communicator
from mpishard.errors import CommError, ConfigError
from mpishard.testing import communicator as suite
from mpishard.testing import rounds
from tests.standin import installed
from tests.standin.ordering import check
from tests.standin.trace import Trace

#: The stand-in's work runs as late as may be, so what is not waited for is not there.
LATE = ["needed", "others"]


def device_ops(number: int = 0) -> Ops:
    from mpishard.array.cupy_ops import CupyOps

    return CupyOps(number)


@pytest.fixture(params=LATE)
def late(request: pytest.FixtureRequest) -> Iterator[Any]:
    with installed(late=request.param, devices=4) as machine:
        yield machine
        gc.collect()  # what is given back belongs to this machine


def over_nccl(size: int, main: Callable[[Communicator], object], **options: Any) -> list[Any]:
    """Run ``main`` on ranks that are threads, each with a device."""
    from mpishard.comm.nccl import NcclCommunicator

    def body(control: Communicator) -> object:
        comm = NcclCommunicator(control, device_ops(control.rank), **options)
        try:
            return main(comm)
        finally:
            comm.close()

    return run_threads(size, body, deadline=60)


@pytest.mark.parametrize("name", suite.CHECKS)
def test_local(late: Any, name: str) -> None:
    suite.CHECKS[name](LocalCommunicator(device_ops()))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_nccl(late: Any, size: int) -> None:
    over_nccl(size, suite.check_communicator)


def test_everything_is_ordered() -> None:
    def main(comm: Communicator) -> None:
        for name in ("skewed_ranks", "several_in_flight", "all_reduce", "broadcast_is_read_before_it_returns"):
            suite.CHECKS[name](comm)

    trace = Trace()
    with installed(trace, devices=2, late="others"):
        over_nccl(2, main)
        gc.collect()
    assert check(trace) == []


def test_starts_make_no_event_and_take_no_memory(late: Any) -> None:
    def main(comm: Communicator) -> None:
        flights = rounds.pair(comm)

        def step(round_: int) -> None:
            for flight in flights:
                flight.fill(round_)
                flight.collective.start().wait_inputs()
                flight.check(round_)

        step(0)
        step(1)
        comm.barrier()
        handles, blocks = late._handle, len(late.memory.live())
        comm.barrier()
        for round_ in range(2, 6):
            step(round_)
        comm.barrier()
        assert late._handle == handles and len(late.memory.live()) <= blocks

    over_nccl(2, main)


def test_the_host_runs_ahead(late: Any) -> None:
    """Starting and waiting wait for nobody: the other rank comes only when this one has gone on."""
    gone_on = threading.Event()

    def main(comm: Communicator) -> None:
        gather = rounds.Gather(comm, 100, DTYPES["float32"])
        gather.fill(0)
        if comm.rank == 1:
            assert gone_on.wait(20)
        gather.collective.start().wait_inputs()
        gone_on.set()
        gather.check(0)

    over_nccl(2, main)


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("add", [False, True])
def test_sums_by_the_library(late: Any, name: str, add: bool) -> None:
    def main(comm: Communicator) -> None:
        assert "in no fixed order" in comm.describe()
        assert comm.scratch_bytes(600, dtype(name), dtype(name)) == -(-200 * dtype(name).itemsize // 64) * 64
        reduce = rounds.Reduce(comm, 200, dtype(name))
        for round_ in range(2):
            reduce.fill(round_)
            reduce.collective.start(add).wait_inputs()
            fulls = [reduce.values(rank, round_).astype(np.float64) for rank in range(comm.size)]
            terms = [full[comm.rank * 200 :][:200] for full in fulls] + [reduce.before(round_)] * add
            found = rounds.read(comm, reduce.out)
            assert found.dtype == accumulator(dtype(name))
            error = {"bfloat16": 2.0**-7, "float32": 2.0**-22, "float64": 2.0**-50}[name]
            bound = 3 * error * sum(np.abs(term).astype(np.float64) for term in terms)
            assert (np.abs(found - sum(term.astype(np.float64) for term in terms)) <= bound).all()

    over_nccl(3, main, sums="library")


def test_what_it_says_of_itself(late: Any) -> None:
    (line, _) = over_nccl(2, lambda comm: comm.describe(), why="a test")
    assert line.startswith("nccl, NCCL 2.") and line.endswith("ordered sums, records by threads, a test")


def test_unknown_sums_are_refused(late: Any) -> None:
    with pytest.raises(ConfigError, match="sums is 'fast'; choose one of ordered, library"):
        over_nccl(1, lambda comm: None, sums="fast")


def test_two_ranks_on_one_gpu_are_refused_by_nccl(late: Any) -> None:
    from mpishard.comm.nccl import NcclCommunicator

    with pytest.raises(ConfigError, match=r"NCCL does not start on rank \d .*one rank for each GPU") as caught:
        run_threads(2, lambda control: NcclCommunicator(control, device_ops(0)), deadline=20)
    assert "\n" not in str(caught.value)


def test_nccl_that_is_missing_on_one_rank_fails_on_all(late: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpishard.comm import nccl

    load, lock, said = nccl._load, threading.Lock(), []

    def load_or_not() -> Any:
        import cupy.cuda

        with lock:  # the module is one for all threads
            monkeypatch.setattr(cupy.cuda.nccl, "available", threading.current_thread().name != "rank 1")
            return load()

    monkeypatch.setattr(nccl, "_load", load_or_not)

    def main(control: Communicator) -> None:
        with pytest.raises(ConfigError) as caught:
            nccl.NcclCommunicator(control, device_ops(control.rank))
        said.append(str(caught.value))

    run_threads(2, main, deadline=20)
    assert said[0] == said[1] and "\n" not in said[0]
    assert "needs NCCL" in said[0] and "nvidia-nccl-cu12" in said[0] and "use transport mpi or staged" in said[0]


def test_an_error_of_nccl_reaches_who_waits(late: Any) -> None:
    def main(comm: Any) -> None:
        gather = rounds.Gather(comm, 10, DTYPES["float32"])
        gather.fill(0)
        work = gather.collective.start()
        broken = comm._nccl.NcclError(1)

        class Broken:
            def check_async_error(self) -> None:
                raise broken

        whole, comm._comm = comm._comm, Broken()
        with pytest.raises(CommError, match=r"all-gather number \d+ failed in NCCL: "):
            work.wait()
        comm._comm = whole
        comm.barrier()
        work.wait_inputs()
        gather.check(0)

    over_nccl(2, main)


def test_a_closed_communicator_says_so(late: Any) -> None:
    def main(comm: Communicator) -> None:
        gather = rounds.Gather(comm, 10, DTYPES["float32"])
        gather.fill(0)
        rounds.read(comm, gather.input)
        comm.close()
        with pytest.raises(CommError, match="the communicator is closed"):
            gather.collective.start()

    over_nccl(2, main)


def test_host_and_device_communicators_refuse_each_others_arrays(late: Any) -> None:
    from mpishard.array.numpy_ops import NumpyOps

    ops = device_ops()
    x = ops.empty(4, DTYPES["float32"])
    with pytest.raises(CommError, match="shard is in device memory; transport local was made for arrays in host"):
        LocalCommunicator(NumpyOps()).bind_all_gather(x, x)
    with pytest.raises(CommError, match="shard is in host memory; transport local was made for arrays in device"):
        LocalCommunicator(ops).bind_all_gather(np.zeros(4, np.float32), x)
