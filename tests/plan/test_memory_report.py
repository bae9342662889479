"""The memory report: predicted and measured of every rank, phases, and a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.table import Table

from mpishard.array.arena import CATEGORIES
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.alone import AloneCommunicator
from mpishard.comm.base import Communicator
from mpishard.comm.threads import run
from mpishard.errors import ConfigError
from mpishard.plan import memory_report
from mpishard.plan.memory_report import PHASES, check_drawing, phases, report_tables, reports, write_report
from mpishard.shard.forecast import Forecast, forecast
from mpishard.shard.memory import Moment
from tests.shard.training import Job

JOB = Job(micros=6).with_settings(recompute="block")


def prepared(comm: Communicator, job: Job = JOB, *, wrong: int = 0):
    engine = job.engine(comm, ledger=True, dtype_name="bfloat16")
    engine.step(job.feed(0), lr=0.01)
    plan = forecast(
        job.model, engine.states, engine.settings, engine.types, engine.world, micro_batch=job.micro_batch,
        ops_bytes=engine.ops.own_bytes,
    )  # fmt: skip
    if wrong:
        plan = Forecast(
            plan.steps, {**plan.reserved, "gradients": plan.reserved["gradients"] + wrong}, plan.peaks, plan.beside,
            plan.uses,
        )  # fmt: skip
    return engine, plan


def test_phases_are_the_fullest_moments() -> None:
    def moment(name: str, nbytes: int) -> Moment:
        return Moment(name, {"saved": nbytes})

    step = [
        moment("Gather(root)", 3),
        moment("Forward(embed)", 2),
        moment("Loss(head)", 7),
        moment("Release(root)", 9),
        moment("Backward(h.0)", 4),
        moment("Reduce(h.0)", 5),
        moment("Forward(embed, 1)", 8),
        moment("Agree", 1),
        moment("Update(root)", 2),
    ]
    assert {name: found.name for name, found in phases(step).items()} == {
        "forward": "Forward(embed, 1)",
        "loss": "Release(root)",
        "backward": "Reduce(h.0)",
        "update": "Update(root)",
    }


@pytest.mark.parametrize("ranks", [1, 3])
def test_predicted_is_measured_on_every_rank(ranks: int) -> None:
    found = run(ranks, lambda comm: reports(*prepared(comm)))[-1]
    assert len(found) == ranks
    for each in found:
        assert each.exact
        assert set(each.measured) == {"held", "peak", *PHASES}
        assert all(set(row) == set(CATEGORIES) for row in each.measured.values())
        total = {name: sum(row.values()) for name, row in each.measured.items()}
        assert 0 < max(total[name] for name in PHASES) == total["peak"] <= total["held"]


def test_a_rank_that_plays_alone_reports_itself() -> None:
    engine, plan = prepared(AloneCommunicator(3, 6, NumpyOps()))
    found = reports(engine, plan)
    assert [each.rank for each in found] == [3]
    *_, verdict = report_tables(found, engine)
    assert verdict == "predicted = measured, to the byte, in every category and phase, on rank 3"


def test_a_plan_that_is_wrong_is_told() -> None:
    def body(comm: Communicator) -> list[Table | str]:
        engine, plan = prepared(comm, wrong=64 if comm.rank == 1 else 0)
        return list(report_tables(reports(engine, plan), engine))

    assert run(2, body)[0][-1] == "predicted and measured differ on rank 1: see memory.json"


def test_what_is_written(tmp_path: Path) -> None:
    def body(comm: Communicator) -> list[Table | str]:
        return write_report(tmp_path if comm.rank == 0 else None, *prepared(comm))

    printed, nothing = run(2, body)
    assert nothing == []
    *tables, verdict, written = printed
    assert verdict == "predicted = measured, to the byte, in every category and phase, on 2 ranks"
    assert str(tmp_path / "memory.png") in written
    assert [table.columns[0].header for table in tables] == ["category", "phase"]
    assert (tmp_path / "memory.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    record = json.loads((tmp_path / "memory.json").read_text())
    assert record["model_state_bytes"]["total"] == 16 * JOB.model.parameters
    assert record["model_state_bytes"]["masters"] == 4 * JOB.model.parameters
    assert len(record["ranks"]) == 2
    most = max(sum(moment[name] for name in CATEGORIES) for moment in record["moments"])
    assert most == sum(record["ranks"][0]["measured"]["peak"].values())


def test_the_formula_as_sharded() -> None:
    def body(comm: Communicator, job: Job) -> list[str]:
        engine, plan = prepared(comm, job)
        table = next(iter(report_tables(reports(engine, plan), engine)))
        assert isinstance(table, Table)
        return [cell for cell in table.columns[2].cells if isinstance(cell, str)]

    whole = 16 * JOB.model.parameters
    kb = f"{whole / 1e3:.1f} kB"
    assert run(2, lambda comm: body(comm, JOB.with_settings(strategy="no_shard")))[0][-1] == kb
    share = f"{whole / 2 / 1e3:.1f} kB"
    assert run(2, lambda comm: body(comm, JOB))[0][-1] == share
    hybrid = replace(JOB, micros=4).with_settings(strategy="hybrid_shard", group=2)
    assert run(4, lambda comm: body(comm, hybrid))[0][-1] == share


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_report, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--memory-report needs matplotlib, which is not installed"):
        check_drawing()
