"""Steps in turn, over threads; and the step without communication."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.bench.collectives import Meeting
from mpishard.bench.silent import SilentCommunicator
from mpishard.bench.statistics import Summary
from mpishard.bench.steps import KINDS, WARM_UPS, StepRow, Steps, document, hidden, tokens
from mpishard.bench.tables import step_table
from mpishard.comm.threads import run
from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.optim.adamw import AdamW
from mpishard.shard.engine import Engine
from mpishard.shard.schedule import Settings

SIZES = Gpt2(layers=2, width=16, heads=2, sequence=8, vocabulary=32)
STEPS = 3


def engine_of(comm, ops, strategy: str = "full_shard", dtype: str = "float32") -> Engine:
    settings = Settings(strategy=strategy)
    return Engine(
        gpt2(SIZES), comm, ops, AdamW(), settings, micro_batch=1, global_batch=4, seed=0, dtype_name=dtype
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_steps_in_turn_are_the_steps_of_a_run(strategy: str, dtype: str) -> None:
    def main(comm):
        others = comm.split([[0, 1]]), comm.split([[0, 1]])
        silent = engine_of(SilentCommunicator(comm, comm.ops), comm.ops, strategy, dtype)
        engines = {("threads", "auto"): comm, ("again", "auto"): others[0]}
        made = {name: engine_of(one, one.ops, strategy, dtype) for name, one in engines.items()}
        without, rows = Steps(made, silent, Meeting(comm), STEPS, seed=7, vocabulary=32).run()
        plain = engine_of(others[1], others[1].ops, strategy, dtype)
        steps = range(WARM_UPS + STEPS)
        losses = [plain.step(tokens(7, step, 32), lr=1e-3).loss for step in steps]
        return without, rows, losses, plain.checksum()

    for without, rows, losses, checksum in run(2, main):
        assert without.samples == STEPS
        assert [row.transport for row in rows] == ["threads", "again"]
        for row in rows:
            # communication alone, which runs in between, has changed nothing
            assert row.losses == losses
            assert row.checksum == checksum
            assert row.same_bits
            assert row.seconds > 0
            assert row.alone > 0
            assert set(row.busy) == set(row.waited) == set(KINDS)
            assert row.busy["reduce_scatter"] > 0


@pytest.mark.parametrize("where", ["losses", "checksum"])
def test_other_bits_are_told(where: str) -> None:
    def main(comm):
        other = comm.split([[0, 1]])
        silent = engine_of(SilentCommunicator(comm, comm.ops), comm.ops)
        made = {("threads", "auto"): engine_of(comm, comm.ops), ("again", "auto"): engine_of(other, other.ops)}
        second = made["again", "auto"]
        if where == "losses":
            step = second.step
            second.step = lambda *given, **more: replace(step(*given, **more), loss=1.0)
        else:
            second.checksum = lambda: "0" * 16
        return Steps(made, silent, Meeting(comm), 1, seed=7, vocabulary=32).run()[1]

    for rows in run(2, main):
        assert [row.same_bits for row in rows] == [True, False]


def test_a_silent_collective_works_once_and_exchanges_answer() -> None:
    def main(comm):
        silent = SilentCommunicator(comm, NumpyOps())
        assert (silent.rank, silent.size, silent.node) == (comm.rank, comm.size, comm.node)
        shard, out = np.full(4, comm.rank + 1, np.float32), np.zeros(8, np.float32)
        gather = silent.bind_all_gather(shard, out)
        gather.start().wait_inputs()
        assert out.tolist() == [comm.rank + 1] * 8
        out[:] = 0
        gather.start().wait_inputs()
        assert out.tolist() == [0] * 8
        assert silent.tallies["all_gather"].calls == 2
        assert silent.exchange(b"me") == [b"me", b"me"]
        return True

    assert run(2, main) == [True, True]


def test_the_hidden_share() -> None:
    without = np.array([1.0, 2.0, 3.0])
    assert hidden(without, without, 0.5) == 1  # no longer than without communication
    assert hidden(without + 0.5, without, 0.5) == pytest.approx(0)  # all of it is added
    assert hidden(without + 0.125, without, 0.5) == pytest.approx(0.75)
    assert hidden(without, without, 0.0) is None


def test_tokens_are_those_of_the_seed() -> None:
    found = []
    for seed in (1, 1, 2):
        inputs, targets = np.zeros((2, 8), np.int64), np.zeros((2, 8), np.int64)
        tokens(seed, 0, 32)(3, inputs, targets)
        assert inputs.min() >= 0
        assert targets.max() < 32
        found.append((inputs.tolist(), targets.tolist()))
    assert found[0] == found[1] != found[2]


def test_the_table_and_the_document_of_steps() -> None:
    each = dict.fromkeys(KINDS, 1e-3)
    rows = [
        StepRow(name, algorithm, 0.2, 0.1, 0.3, 0.05, share, each, each, [1.0], "00", same)
        for name, algorithm, share, same in (("mpi", "auto", 0.5, True), ("mpi", "ring", None, False))
    ]
    without = Summary(0.1, 0.1, 0.1, 5)
    cells = [list(column.cells) for column in step_table(rows, without, 2).columns]
    assert cells[0] == ["mpi", "mpi:ring", "none"]
    assert cells[4][:2] == ["50 %", "-"]
    assert cells[-1][:2] == ["the first", "OTHERS"]
    found = document({"ranks": 2}, ["a = 1"], without, rows)
    assert set(found) == {"host", "settings", "without_communication", "rows"}
    assert found["rows"][1]["same_bits"] is False
