"""The algorithms of a reduce-scatter over plain MPI: the ordered ones by the contract, the others by their sums."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES, Array, DType, accumulator
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm import Communicator, segments, tuning, world
from mpishard.comm.choice import connect
from mpishard.comm.together import on_rank_zero
from mpishard.errors import CommError, ConfigError
from mpishard.testing import communicator as suite
from mpishard.testing import rounds

pytestmark = pytest.mark.mpi

F2, F4, F8 = DTYPES["bfloat16"], DTYPES["float32"], DTYPES["float64"]
#: Algorithm, whether a thread calls MPI, and the most bytes of a message; with few, each block is many segments.
ORDERED = [("pairwise", True, 200), ("pairwise", False, 2**28), ("auto", True, 200)]


@contextmanager
def made(algorithm: str, threaded: bool | None = None, chunk: int = 2**28) -> Iterator[Any]:
    from mpi4py import MPI

    from mpishard.comm.mpi import MpiCommunicator

    comm = MpiCommunicator(MPI.COMM_WORLD, NumpyOps(), chunk_bytes=chunk, threaded=threaded, algorithm=algorithm)
    if algorithm == "auto":  # small ones one way, large ones the other
        rows = {100: {"alltoall": 1.0, "pairwise": 2.0}, 2000: {"alltoall": 2.0, "pairwise": 1.0}}
        comm.tuning = tuning.Tuning("", 0, 0, rows)
    yield comm
    comm.close()


@pytest.fixture(scope="module", params=ORDERED, ids=lambda way: "-".join(map(str, way)))
def comm(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    with made(*request.param) as one:
        yield one


@pytest.mark.parametrize("name", suite.CHECKS)
def test_contract(comm: Communicator, name: str) -> None:
    suite.CHECKS[name](comm)


@pytest.mark.parametrize(
    ("algorithm", "wire"),
    [("pairwise", None), ("pairwise", F2), ("ring", None), ("ring", F2), ("native", None)],
    ids=["pairwise", "pairwise-narrow", "ring", "ring-narrow", "native"],
)
def test_a_large_reduction_takes_a_bounded_scratch(algorithm: str, wire: DType | None) -> None:
    """Several segments of the default size; whole numbers, so that any order gives the same sum."""
    with made(algorithm) as one:
        sent = wire or F4
        each = 3 * segments.SEGMENT_BYTES // sent.itemsize + 5
        if algorithm != "native" and one.size > 1:
            assert one.scratch_bytes(100 * each * one.size, F4, sent) <= 11 * segments.SEGMENT_BYTES
        full, out = one.allocate(each * one.size, F4), one.allocate(each, F4)
        bound = one.bind_reduce_scatter(full, out, rounds.scratch_for(one, full, sent), wire)
        numbers = np.arange(one.rank * each, (one.rank + 1) * each) % 61
        for round_ in range(2):
            full[:] = np.arange(full.size) % 61 + one.rank + round_
            out.fill(0.5)
            bound.start(add=True).wait_inputs()
            ranks = sum(rank + round_ for rank in range(one.size))
            rounds.same(out, (numbers * one.size + ranks + 0.5).astype(np.float32), f"round {round_}")


@pytest.mark.parametrize("name", ["alltoall", "pairwise", "auto"])
def test_sums_of_bf16_are_those_of_fp64_to_the_rounding_of_fp32(name: str) -> None:
    with made(name) as one:
        each = 4099
        fulls = [rounds.data(each * one.size, F2, rank) for rank in range(one.size)]
        full, out = rounds.put(one, fulls[one.rank]), rounds.room(one, each, F4)
        one.bind_reduce_scatter(full, out, rounds.scratch_for(one, full)).start().wait_inputs()
        near(out, fulls, one.rank, None, F2)


def near(out: Array, fulls: list[Array], rank: int, before: Array | None, wire: DType) -> None:
    """Compare with a sum in fp64: each addition may be wrong by half a unit in the last place of what is added up."""
    terms = [full[rank * out.size : (rank + 1) * out.size].astype(wire).astype(np.float64) for full in fulls]
    terms += [] if before is None else [before.astype(np.float64)]
    exact, most = sum(terms), sum(map(abs, terms))
    unit = float(np.finfo(out.dtype).eps) / (1 if out.dtype == F8 else 2)  # what it is compared with is rounded, too
    wrong = np.abs(out.astype(np.float64) - exact) > max(len(terms) - 1, 1) * unit * most * (1 + 2 * len(terms) * unit)
    assert not wrong.any(), f"{wrong.sum()} of {out.size} are wrong, first {np.flatnonzero(wrong)[:1]}"


class Loose(rounds.Reduce):
    """A reduce-scatter whose sums are in no stated order."""

    def check(self, round_: int, add: bool = False) -> None:
        fulls = [self.values(rank, round_) for rank in range(self.comm.size)]
        near(self.out, fulls, self.comm.rank, self.before(round_) if add else None, self.wire)
        rounds.same(self.input, fulls[self.comm.rank], "the input of the reduce-scatter")


LOOSE = [
    ("ring", True, 2**28),
    ("ring", True, 200),
    ("ring", False, 200),
    ("native", True, 2**28),
    ("native", False, 9),
]


@pytest.fixture(scope="module", params=LOOSE, ids=lambda way: "-".join(map(str, way)))
def loose(request: pytest.FixtureRequest) -> Iterator[Any]:
    with made(*request.param) as one:
        yield one


def kinds(comm: Any) -> list[tuple[DType, DType | None]]:
    wide: list[tuple[DType, DType | None]] = [(F4, None), (F8, None)]
    narrow = [(F2, None), (DTYPES["float16"], None), (F4, F2), (F4, DTYPES["float16"])]
    return wide if comm.algorithm == "native" and comm.size > 1 else wide + narrow


def test_sums_in_another_order(loose: Any) -> None:
    for (kind, wire), count, add in itertools.product(kinds(loose), (0, 1, 7, 1000, 5003), (False, True)):
        reduce = Loose(loose, count, kind, wire=wire)
        for round_ in range(2):
            reduce.fill(round_)
            reduce.collective.start(add).wait_inputs()
            reduce.check(round_, add)


def test_several_in_flight_on_skewed_ranks(loose: Any) -> None:
    flights: list[Any] = [Loose(loose, count, F4, seed=count) for count in (5003, 7, 2500)]
    flights.insert(1, rounds.Gather(loose, 301, F4))
    naps = np.random.default_rng(loose.rank).choice([0.0, 0.0, 0.001, 0.01], (6, len(flights)))
    for round_, nap in enumerate(naps):
        works = []
        for flight, seconds in zip(flights, nap, strict=True):
            flight.fill(round_)
            time.sleep(seconds)
            works.append(flight.collective.start(add=isinstance(flight, Loose)))
        for i in range(len(flights))[:: 1 if loose.rank % 2 == 0 else -1]:
            works[i].wait()
            flights[i].check(round_, add=True)
        for work in works:
            work.wait_inputs()


def test_a_child_has_its_parents_algorithm(loose: Any) -> None:
    child = loose.split([list(range(loose.size))[::-1]])
    assert child.algorithm == loose.algorithm
    reduce = Loose(child, 100, F4)
    reduce.fill(0)
    reduce.collective.start().wait_inputs()
    reduce.check(0)
    child.close()


def test_a_scratch_of_the_stated_size_is_enough(loose: Any) -> None:
    for (kind, wire), count in itertools.product(kinds(loose), (1, 7, 5003)):
        full, out = rounds.put(loose, np.ones(count * loose.size, kind)), rounds.room(loose, count, accumulator(kind))
        need = loose.scratch_bytes(full.size, kind, wire or kind)
        around = rounds.room(loose, need + 128, DTYPES["uint8"])
        bound = loose.bind_reduce_scatter(full, out, around[64 : 64 + need], wire)
        bound.start().wait_inputs()
        bound.start(add=True).wait_inputs()
        rounds.same(out, np.full(count, 2 * loose.size, out.dtype), f"a sum of ones, {kind} as {wire or kind}")
        beside = np.concatenate([around[:64], around[64 + need :]])
        rounds.same(beside, np.full(128, 0xA5, np.uint8), f"bytes beside a scratch of {need}")


@pytest.mark.parametrize("chunk", [2**28, 200])
def test_the_ring_begins_with_the_next_rank_and_ends_with_its_own(chunk: int) -> None:
    """So its bits are the same at every run, whoever is late."""
    with made("ring", chunk=chunk) as one:
        reduce, size = rounds.Reduce(one, 5003, F4), one.size
        mine = slice(one.rank * 5003, (one.rank + 1) * 5003)
        for round_, late in enumerate([*range(size), 0]):
            reduce.fill(0)
            one.barrier()
            time.sleep(0.02 * (one.rank == late))
            reduce.collective.start(add=True).wait_inputs()
            terms = [reduce.values((one.rank + far) % size, 0)[mine] for far in range(1, size + 1)]
            total = terms[0].copy()
            for term in terms[1:]:
                total += term
            rounds.same(reduce.out, reduce.before(0) + total, f"round {round_}")
        assert one.tallies["reduce_scatter"].bytes == (size + 1) * 5003 * 4 * (size - 1)


# --- what is refused


def test_what_an_algorithm_cannot_do_is_told_on_all_ranks() -> None:
    with made("native") as one:
        if one.size == 1:
            pytest.skip("one rank sums by itself")
        with pytest.raises(CommError, match=r"on rank 0, contributions travel as bfloat16, and MPI's own sums are of"):
            rounds.Reduce(one, 3, F2)
        with pytest.raises(CommError, match=r"contributions travel as float16, and MPI's own sums are of"):
            rounds.Reduce(one, 3, F4, wire=DTYPES["float16"])
    with made("ring") as one:
        one.bracket = one.size
        with pytest.raises(CommError, match=r"sums are by brackets of \d ranks and algorithm ring has its own order"):
            rounds.Reduce(one, 3, F4)


def test_an_unknown_algorithm_and_one_that_does_not_fit_are_refused() -> None:
    from mpi4py import MPI

    with pytest.raises(
        ConfigError, match="algorithm 'star' is not known; choose one of auto, alltoall, pairwise, ring"
    ):
        world(NumpyOps(), "mpi", algorithm="star")
    with pytest.raises(ConfigError, match="algorithm 'star' is not known"):
        connect(MPI.COMM_WORLD, NumpyOps(), "mpi", algorithm="star")
    with pytest.raises(
        ConfigError, match="algorithm 'ring' is for arrays in host memory that transport 'mpi' carries, "
    ):
        connect(MPI.COMM_WORLD, NumpyOps(), "node", algorithm="ring")
    if MPI.COMM_WORLD.Get_size() > 1:
        asked = "pairwise" if MPI.COMM_WORLD.Get_rank() == 1 else "ring"
        with pytest.raises(ConfigError, match="rank 1 asks for transport mpi with algorithm pairwise, rank 0 for"):
            connect(MPI.COMM_WORLD, NumpyOps(), "mpi", algorithm=asked)


def test_it_is_named_where_it_is_not_the_usual_one() -> None:
    with made("ring") as one:
        assert one.describe().endswith(", reduce-scatter ring")
    with made("alltoall") as one:
        assert "reduce-scatter" not in one.describe()


# --- the choice


def test_a_choice_is_measured_once_and_alike_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    monkeypatch.setattr(tuning, "SIZES", (2**14, 2**17, 2**50))
    monkeypatch.setattr(tuning, "BUDGET", 60.0)  # which is much for the first two, and nothing for the last
    comm = connect(MPI.COMM_WORLD, NumpyOps(), "mpi", algorithm="auto")
    file = tmp_path / tuning.FILE  # of this rank: rank 0 alone reads and writes
    before = comm.tallies["reduce_scatter"].calls
    tuning.tune(comm, file)
    tuning.keep(comm, file)
    found: tuning.Tuning | None = comm.tuning  # type: ignore[attr-defined]
    assert comm.tallies["reduce_scatter"].calls == before
    assert file.exists() == (comm.rank == 0 and comm.size > 1)
    if comm.size == 1:
        assert found is None
        comm.close()
        return
    assert found is not None and list(found.rows) == [2**14, 2**17]
    same = comm.exchange(json.dumps(found.dump()).encode().ljust(2000))
    assert len(set(same)) == 1
    monkeypatch.setattr(tuning, "measured", lambda comm: pytest.fail("measured again"))
    again = connect(MPI.COMM_WORLD, NumpyOps(), "mpi", algorithm="auto")
    tuning.tune(again, file)
    assert again.tuning == found  # type: ignore[attr-defined]
    again.close()
    other = comm.split([list(range(comm.size - 1)), [comm.size - 1]])  # of other ranks: measured anew
    monkeypatch.setattr(tuning, "measured", lambda comm: tuning.Tuning("anew", 0, 0, {}))
    tuning.tune(other, file)
    assert other.size == 1 or other.tuning.library == "anew"  # type: ignore[attr-defined]
    other.close()
    comm.close()


def test_what_is_no_table_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "measured", lambda comm: tuning.Tuning("anew", 0, 0, {}))
    with made("auto") as one:
        for text in ("", "{", "[]", "é", '{"library": "x", "ranks": 2, "nodes": 1, "rows": [{}]}', "x" * 10_000):
            on_rank_zero(one, lambda text=text: (tmp_path / tuning.FILE).write_text(text, encoding="latin-1"))
            one.tuning = None
            tuning.tune(one, tmp_path / tuning.FILE)
            assert one.size == 1 or one.tuning.library == "anew"


def test_without_a_directory_it_is_measured_at_the_first_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    monkeypatch.setattr(tuning, "SIZES", (2**14,))
    comm: Any = connect(MPI.COMM_WORLD, NumpyOps(), "mpi", algorithm="auto")
    reduce = rounds.Reduce(comm, 1000, F4)
    assert (comm.tuning is None) == (comm.size == 1)
    reduce.fill(0)
    reduce.collective.start().wait_inputs()
    reduce.check(0)
    comm.close()
