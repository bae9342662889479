"""Scratch of the algorithms of plain MPI, and the choice between them, without ranks."""

from __future__ import annotations

import json

import pytest

from mpishard.array.dtypes import DTYPES
from mpishard.comm.scratch import Scratch, transport_scratch
from mpishard.comm.segments import ALGORITHMS, ALIGNMENT, ORDERED, ROWS, SEGMENT_BYTES, pairwise_segments, ring_segments
from mpishard.comm.tuning import Tuning
from mpishard.errors import ConfigError

F8, F4, F2 = DTYPES["float64"], DTYPES["float32"], DTYPES["bfloat16"]
KINDS = [(F4, F4), (F2, F2), (F8, F8), (F4, F2)]
COUNTS = (0, 1, 7, 1000, 10**6, 10**8 + 3)


@pytest.mark.parametrize(("kind", "wire"), KINDS)
@pytest.mark.parametrize("size", [2, 3, 7, 1024])
@pytest.mark.parametrize("limit", [1, 7, 200, 2**28])
@pytest.mark.parametrize("cut", [pairwise_segments, ring_segments])
def test_segments_cover_a_block_once_and_rows_are_aligned(cut, limit, size, kind, wire):
    for each in COUNTS:
        found = cut(each, size, kind, wire, limit)
        if not each:
            assert found.nbytes == 0
            continue
        assert (found.count - 1) * found.width < each <= found.count * found.width
        sent = wire if cut is pairwise_segments else DTYPES["float64" if kind == F8 else "float32"]
        assert found.width * sent.itemsize <= max(min(limit, SEGMENT_BYTES), sent.itemsize)
        assert found.row >= found.width * sent.itemsize
        assert not {found.row % ALIGNMENT, found.rounded % ALIGNMENT, found.nbytes % ALIGNMENT} - {0}


@pytest.mark.parametrize(("kind", "wire"), KINDS)
@pytest.mark.parametrize("size", [2, 3, 7, 1024])
def test_rows_are_few_whatever_the_sizes(size, kind, wire):
    most = (2 * ROWS + 1 + 2) * SEGMENT_BYTES  # rows of both kinds, one's own, and a bracket's sum twice as wide
    for each in COUNTS:
        assert transport_scratch("mpi", size, algorithm="pairwise")(each * size, kind, wire) <= most
        assert transport_scratch("mpi", size, algorithm="ring")(each * size, kind, wire) <= 5 * SEGMENT_BYTES
        assert transport_scratch("mpi", size, algorithm="native")(each * size, kind, wire) < each * kind.itemsize + 64


@pytest.mark.parametrize(("kind", "wire"), KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 64])
def test_what_is_enough_for_either_is_taken_where_the_choice_is_open(size, kind, wire):
    rules = {name: transport_scratch("mpi", size, algorithm=name) for name in ALGORITHMS}
    for each in COUNTS:
        found = {name: rule(each * size, kind, wire) for name, rule in rules.items()}
        assert found["auto"] == max(found[name] for name in ORDERED if name != "auto")
        assert size > 1 or len(set(found.values())) == 1


def test_algorithms_are_of_mpi_on_the_host_and_children_have_them():
    pairwise = transport_scratch("mpi", 4, algorithm="pairwise")
    assert pairwise.of(2) == Scratch("mpi", 2, algorithm="pairwise")
    assert pairwise.in_pieces
    for transport, on_device in (("mpi", True), ("node", False), ("threads", False), ("staged", True)):
        plain = transport_scratch(transport, 4, on_device=on_device)
        other = transport_scratch(transport, 4, on_device=on_device, algorithm="ring")
        assert plain(10**6, F4, F4) == other(10**6, F4, F4)


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(
        ConfigError, match="algorithm 'star' is not known; choose one of auto, alltoall, pairwise, ring,"
    ):
        transport_scratch("mpi", 2, algorithm="star")


ROWS_OF = {2**16: {"alltoall": 1e-4, "pairwise": 2e-4}, 2**20: {"alltoall": 3e-3, "pairwise": 1e-3}}


@pytest.mark.parametrize(
    ("nbytes", "choice"),
    [
        (0, "alltoall"),
        (1, "alltoall"),
        (2**17, "alltoall"),
        (2**19, "pairwise"),
        (2**20, "pairwise"),
        (2**40, "pairwise"),
    ],
)
def test_the_nearest_size_decides(nbytes, choice):
    assert Tuning("MPI 1", 2, 1, ROWS_OF).choose(nbytes) == choice


def test_without_a_measurement_it_is_the_first():
    assert Tuning("MPI 1", 2, 1, {}).choose(5) == "alltoall"


def test_a_table_is_read_as_it_was_written():
    table = Tuning("MPICH 5.0.2", 4, 2, ROWS_OF)
    assert Tuning.load(table.dump()) == table
    found = json.loads(table.dump())
    assert [(row["bytes"], row["choice"]) for row in found["rows"]] == [(2**16, "alltoall"), (2**20, "pairwise")]
    assert table.fits(Tuning("MPICH 5.0.2", 4, 2, {}))
    for other in (("MPICH 5.0.3", 4, 2), ("MPICH 5.0.2", 3, 2), ("MPICH 5.0.2", 4, 1)):
        assert not table.fits(Tuning(*other, ROWS_OF))


@pytest.mark.parametrize("change", [("bytes", 0), ("seconds", {"alltoall": 1.0}), ("seconds", None), ("bytes", "x")])
def test_a_damaged_table_is_none(change):
    found = json.loads(Tuning("MPI 1", 2, 1, ROWS_OF).dump())
    found["rows"][1][change[0]] = change[1]
    assert Tuning.load(json.dumps(found)) is None
    found["rows"][1] = {"bytes": 5, "seconds": {"alltoall": 1.0, "pairwise": float("nan")}}
    assert Tuning.load(json.dumps(found)) is None
