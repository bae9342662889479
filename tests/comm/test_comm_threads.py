from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES
from mpishard.comm import Communicator, run_threads
from mpishard.errors import CommError, ConfigError
from mpishard.testing.rounds import Gather, pair

F4 = DTYPES["float32"]


class OwnError(Exception):
    pass


def test_results_come_in_rank_order() -> None:
    def main(comm: Communicator) -> tuple[int, int, str]:
        time.sleep(0.01 * (comm.size - comm.rank))
        return comm.rank, comm.size, comm.transport

    assert run_threads(3, main) == [(rank, 3, "threads") for rank in range(3)]


def test_every_rank_has_operations_of_its_own() -> None:
    assert len(set(map(id, run_threads(3, lambda comm: comm.ops)))) == 3


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        run_threads(0, lambda comm: None)


@pytest.mark.parametrize("where", ["wait", "wait_inputs", "exchange", "broadcast", "split"])
def test_the_first_failure_wakes_all_and_is_raised(where: str) -> None:
    woken: list[int] = []

    def main(comm: Communicator) -> None:
        gather = Gather(comm, 5, F4)
        gather.fill(0)
        if comm.rank == 1:
            if where == "wait_inputs":
                gather.collective.start()
            time.sleep(0.05)
            raise OwnError("rank 1 is broken")
        try:
            if where.startswith("wait"):
                getattr(gather.collective.start(), where)()
            elif where == "exchange":
                comm.exchange(b"1")
            elif where == "broadcast":
                comm.broadcast(gather.out, 1)
            else:
                comm.split([[0, 1, 2]])
        except CommError as error:
            assert "rank 1 of the run failed with OwnError" in str(error)
            woken.append(comm.rank)
            raise

    begin = time.perf_counter()
    with pytest.raises(OwnError, match="rank 1 is broken"):
        run_threads(3, main)
    assert sorted(woken) == [0, 2]
    assert time.perf_counter() - begin < 5


def test_a_deadline_names_those_who_did_not_start() -> None:
    release = threading.Event()

    def main(comm: Communicator) -> None:
        gather = Gather(comm, 5, F4)
        if comm.rank in (1, 3):
            release.wait(5)
        try:
            gather.collective.start().wait()
        finally:
            release.set()

    with pytest.raises(CommError, match=r"all-gather number 0 did not end in 0.3 s: rank 1, 3 has not started it"):
        run_threads(4, main, deadline=0.3)


def test_a_deadline_names_those_who_did_not_read() -> None:
    release = threading.Event()

    def main(comm: Communicator) -> None:
        work = Gather(comm, 5, F4).collective.start()
        if comm.rank == 1:
            release.wait(5)
        try:
            work.wait_inputs()
        finally:
            release.set()

    with pytest.raises(CommError, match=r"did not end in 0.3 s: rank 1 has not read it"):
        run_threads(2, main, deadline=0.3)


def test_a_rank_that_returned_early_is_named_at_once() -> None:
    def main(comm: Communicator) -> None:
        if comm.rank != 1:
            comm.barrier()

    begin = time.perf_counter()
    with pytest.raises(CommError, match="an exchange cannot end: rank 1 returned and has not started it"):
        run_threads(3, main)
    assert time.perf_counter() - begin < 5


def test_ranks_that_start_different_collectives_are_named() -> None:
    def main(comm: Communicator) -> None:
        gather, reduce = pair(comm)
        first, second = (gather, reduce) if comm.rank == 0 else (reduce, gather)
        first.collective.start()
        second.collective.start().wait()

    with pytest.raises(CommError, match=r"start different collectives: rank . starts (all|reduce)"):
        run_threads(2, main)


def test_a_failure_in_a_part_ends_the_whole() -> None:
    def main(comm: Communicator) -> None:
        part = comm.split([[0, 1], [2, 3]])
        if comm.rank == 3:
            raise OwnError
        part.barrier()
        comm.barrier()

    with pytest.raises(OwnError):
        run_threads(4, main)


def test_abort_ends_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    def main(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.abort("out of paper")
        comm.barrier()

    with pytest.raises(CommError, match="rank 1 aborted the run: out of paper"):
        run_threads(2, main)
    assert capsys.readouterr().err == "out of paper\n"


def test_start_never_waits_for_peers() -> None:
    def main(comm: Communicator) -> None:
        gather = Gather(comm, 5, F4)
        gather.fill(0)
        if comm.rank == 0:
            time.sleep(0.3)
        begin = time.perf_counter()
        work = gather.collective.start()
        assert time.perf_counter() - begin < 0.2
        work.wait_inputs()

    run_threads(2, main)


def test_peers_read_where_the_data_lies() -> None:
    """No scratch, and a peer that writes before wait_inputs() is seen: that is what the moment is for."""

    def main(comm: Communicator) -> float:
        assert comm.scratch_bytes(1000, F4, F4) == 0
        shard, out = np.full(4, comm.rank, np.float32), np.empty(8, np.float32)
        collective = comm.bind_all_gather(shard, out)
        work = collective.start()
        comm.barrier()
        if comm.rank == 1:
            shard[:] = 9
        comm.barrier()
        work.wait_inputs()
        return float(out[4])

    assert run_threads(2, main) == [9.0, 9.0]


def test_nothing_is_kept_of_collectives_that_are_over() -> None:
    def main(comm: Communicator) -> int:
        for _ in range(10):
            Gather(comm, 5, F4).collective.start().wait_inputs()
            comm.broadcast(np.zeros(3, np.float32))
        comm.barrier()
        time.sleep(0.05)
        return len(comm._group._meetings)  # type: ignore[attr-defined]

    assert run_threads(3, main) == [0, 0, 0]
