"""The measurement of collectives, over threads: what is run, what is checked, what a row says."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES
from mpishard.array.numpy_ops import NumpyOps
from mpishard.bench import data
from mpishard.bench.collectives import Ask, Meeting, Sweep
from mpishard.bench.rows import References, Row, document, fits
from mpishard.bench.statistics import OPS, Summary
from mpishard.bench.subjects import Message, Subject
from mpishard.bench.tables import collective_table, duration, fit_table, times
from mpishard.bench.variants import Variant
from mpishard.comm.threads import run
from mpishard.errors import ConfigError

ONE, OTHER = Variant("threads"), Variant("again")
#: of --json, by the issue; more may be there
KEYS = {
    "op", "transport", "algorithm", "dtype", "ranks", "bytes", "seconds", "p10", "p90", "algbw_GBps", "busbw_GBps",
    "vs_baseline", "vs_copy", "correct",
}  # fmt: skip


def ask(**changes) -> Ask:
    given = {
        "ops": OPS, "dtypes": ("fp32", "bf16"), "sizes": (24, 4000), "variants": (ONE, OTHER), "baseline": OTHER,
        "seconds": 1e-6, "least": 2,
    }  # fmt: skip
    return Ask(**(given | changes))


def measured(size: int, wanted: Ask, kind: type[Sweep] = Sweep) -> list[list[Row]]:
    """The rows of each rank."""

    def main(comm):
        comms = {ONE: comm, OTHER: comm.split([list(range(size))])}
        sweep = kind(wanted, comms, Meeting(comm))
        sweep.check_room(size)
        return sweep.run()

    return run(size, main)


@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_type_size_and_variant_has_a_row(size: int) -> None:
    first, *others = measured(size, ask())
    assert all(rows == first for rows in others)
    assert len(first) == 3 * 2 * 2 * 2
    assert all(row.correct for row in first)
    assert {row.ranks for row in first} == {size}
    for row in first:
        assert 0 < row.p10 <= row.seconds <= row.p90
        assert row.samples == 2
        assert row.bytes % (size * (4 if row.dtype == "fp32" else 2)) == 0
        assert row.algbw_GBps == pytest.approx(row.bytes / row.seconds / 1e9)
        if row.transport == "again":
            assert row.vs_baseline == 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("op", OPS)
def test_one_wrong_element_on_one_rank_is_wrong_on_all(op: str, dtype: str) -> None:
    class Corrupting(Sweep):
        def subject(self, op: str, variant: Variant, count: int, dtype: str) -> Subject:
            found = super().subject(op, variant, count, dtype)
            assert isinstance(found, Message)
            comm, out, real = self.comms[variant], found.out, found.run

            def spoiled() -> None:
                real()
                if variant == OTHER and comm.rank == 1:
                    out.view(f"u{out.itemsize}")[-1] ^= 1  # the last bit

            found.run = spoiled  # type: ignore[method-assign]
            return found

    for rows in measured(2, ask(ops=(op,), dtypes=(dtype,)), Corrupting):
        assert {row.transport for row in rows if row.correct} == {"threads"}
        assert {row.transport for row in rows if not row.correct} == {"again"}


def test_the_order_of_a_sum_is_seen() -> None:
    ops, kind = NumpyOps(), DTYPES["float32"]
    due = data.summed(3, kind)
    backwards = data.table(2, kind) + data.table(1, kind) + data.table(0, kind)
    assert data.same(ops, due.copy(), due)
    assert not data.same(ops, backwards, due)
    assert data.close(ops, backwards, 3, kind)
    assert not data.close(ops, backwards + np.float32(1e-3), 3, kind)
    pairs = data.summed(4, kind, 2)
    assert not data.same(ops, pairs, data.summed(4, kind))


@pytest.mark.parametrize("shift", [1, 64, 4096, 2**16])
def test_a_message_out_of_place_is_seen(shift: int) -> None:
    ops, kind = NumpyOps(), DTYPES["bfloat16"]
    sent = np.empty(300_000, kind)
    data.fill(ops, sent, data.table(0, kind))
    assert data.same(ops, sent[shift:], data.table(0, kind), shift)
    assert not data.same(ops, sent[shift:], data.table(0, kind))


def test_sums_of_16_bits_are_fp32_sums_of_what_was_sent() -> None:
    kind = DTYPES["bfloat16"]
    exact = sum(data.table(rank, kind).astype(np.float64) for rank in range(4))
    found = data.summed(4, kind)
    assert found.dtype == np.float32
    assert np.allclose(found, exact, rtol=1e-6, atol=1e-6)


def test_too_large_messages_are_refused_before_memory_is_taken(monkeypatch) -> None:
    monkeypatch.setattr("mpishard.bench.collectives.available", lambda: 1000)
    message = "a rank needs .* of buffers and 2 of them run on this machine, where 1000 B are free"
    with pytest.raises(ConfigError, match=message):
        measured(2, ask())


def row(**changes) -> Row:
    given = {"nbytes": 4000, "correct": True, "references": References(0.002, 0.0005, 0.001)} | changes
    return Row.of("all_reduce", ("mpi", "native"), "fp32", 4, given["nbytes"], Summary(0.001, 0.0009, 0.002, 7),
                  given["references"], correct=given["correct"])  # fmt: skip


def test_a_row_says_how_many_times_as_fast_as_its_references() -> None:
    found = row()
    assert (found.vs_baseline, found.vs_copy, found.vs_add) == (2, 0.5, 1)
    assert found.algbw_GBps == pytest.approx(0.004)
    assert found.busbw_GBps == pytest.approx(0.006)
    assert row(references=References(None, 1.0, 1.0)).vs_baseline is None


def test_the_document_has_the_schema() -> None:
    found = document({"ranks": 4}, [row(), row(nbytes=8000), row(nbytes=16000)], ["a note"])
    assert found["host"] == {"ranks": 4}
    assert all(set(each) >= KEYS for each in found["rows"])
    assert found["rows"][0]["algorithm"] == "native"
    assert [set(line) for line in found["fits"]] == [
        {"op", "transport", "algorithm", "dtype", "alpha", "GBps", "worst"}
    ]
    assert fits([row()]) == []


def texts(table) -> list[list[str]]:
    return [list(column.cells) for column in table.columns]


def test_a_wrong_row_says_so_in_the_table() -> None:
    found = texts(collective_table([row(), row(correct=False, nbytes=8192)], "mpi:native"))
    assert found[0] == ["3.9 KiB", "8 KiB"]
    assert found[1] == ["mpi:native", "mpi:native"]
    assert found[-1] == ["", "WRONG"]
    lines = texts(fit_table(document({}, [row(), row(nbytes=8000), row(nbytes=9000)])["fits"]))
    assert lines[2] == ["mpi:native"]


def test_figures_have_three_digits() -> None:
    assert [duration(t) for t in (1.234e-5, 0.0567, 1.5, 123.4)] == ["12.3 us", "56.7 ms", "1.50 s", "123 s"]
    assert [times(value) for value in (None, 2.25, 10.0)] == ["-", "2.25x", "10.00x"]


def test_the_librarys_own_sums_no_16_bits_and_an_all_gather_has_no_algorithms() -> None:
    native, ring = Variant("mpi", "native"), Variant("mpi", "ring")
    notes: list[str] = []
    calls = SimpleNamespace(can=lambda op, kind: op == "all_gather" or kind.itemsize > 2)
    sweep = SimpleNamespace(comms={native: None, ring: None, ONE: None}, calls=calls, notes=notes)
    left: Callable[[str, str], list[Variant]] = lambda op, dtype: list(Sweep._variants(sweep, op, dtype))  # type: ignore[arg-type]  # noqa: E731
    assert left("reduce_scatter", "fp32") == [native, ring, ONE]
    assert left("reduce_scatter", "bf16") == [ring, ONE]
    assert left("all_gather", "bf16") == [native, ONE]
    assert len(notes) == 2
