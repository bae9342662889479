"""mpishard train --as-rank: one rank of a job that is not there, its memory and its time, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.processes import fresh, mpiexec
from tests.cli.small_runs import finished, snapshot, training


def as_rank(place: str, *arguments: str):
    return fresh("-m", "mpishard", *arguments, "--as-rank", place)


def record(folder: Path) -> dict:
    return json.loads((folder / "run" / "as-rank.json").read_text())


def refused(done, before: dict[str, bytes], folder: Path) -> str:
    """What one line says; nothing was printed beside it, and nothing changed."""
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("mpishard: ")]
    assert "Traceback" not in done.stderr
    assert snapshot(folder) == before
    return line


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["precision.compute=bf16", "shard.strategy=zero2", "precision.reduce=fp32"],
        ["precision.compute=fp16", "shard.strategy=hybrid_shard", "shard.group=8"],
    ],
    ids=["full_shard", "shard_grad_op", "hybrid_shard"],
)
def test_a_rank_of_many_holds_what_was_planned_and_is_timed(tmp_path, settings):
    done = as_rank("5/64", *training(tmp_path, "train.global_batch=128", "train.steps=9", *settings))
    assert done.returncode == 0, done.stderr
    assert "rank 5 of 64, alone" in done.stdout
    assert "losses mean nothing; no checkpoint is written" in " ".join(done.stdout.split())
    assert re.search(r"^[\d.]+ s a step, [\d.]+ s of them for answering collectives \(mean of 2\)$", done.stdout, re.M)
    assert re.search(r"this process held .* MB at its peak, .* more than before .*; .* were planned", done.stdout)
    assert len(re.findall(r"^step \d/3  [\d.]+ s$", done.stdout, flags=re.MULTILINE)) == 3
    assert not re.search(r"loss +[\d.]", done.stdout)  # which nobody should read
    found = record(tmp_path)
    assert (found["rank"], found["ranks"], len(found["seconds"])) == (5, 64, 3)
    assert found["bytes"] == found["bytes_planned"]
    assert found["resident_peak"] > found["resident_before"] > 0
    assert "losses mean nothing" in found["note"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["as-rank.json"]


def test_the_memory_is_that_of_a_rank_of_so_many(tmp_path):
    held = {}
    for ranks in (1, 2, 64):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        settings = ("train.global_batch=64", "model.width=64", "train.steps=1", "comm.transport=mpi")
        assert as_rank(f"0/{ranks}", *training(folder, *settings)).returncode == 0
        held[ranks] = record(folder)["bytes"]
    assert held[1]["optimizer"] > 1.8 * held[2]["optimizer"] > 30 * held[64]["optimizer"]
    assert held[2]["saved"] == held[64]["saved"]


# No id is "mpi": pytest-mpi would take it for its mark, and skip.
@pytest.mark.parametrize("transport", ["mpi", "node"], ids=["messages", "memory"])
def test_the_memory_is_that_of_a_real_rank(tmp_path, transport):
    """Rank 1 of 2 holds the same, to the byte."""
    (tmp_path / "real").mkdir()
    settings = ("precision.compute=bf16", "train.steps=1", f"comm.transport={transport}")
    done = mpiexec("-m", "mpishard", *training(tmp_path / "real", *settings))
    assert done.returncode == 0, done.stderr
    real = json.loads((tmp_path / "real" / "run" / "report.json").read_text())["bytes"][1]
    assert as_rank("1/2", *training(tmp_path, *settings)).returncode == 0
    assert record(tmp_path)["bytes"] == real


def test_a_run_is_not_written_over(tmp_path):
    run = finished(tmp_path)
    before = snapshot(tmp_path)
    line = refused(as_rank("0/4", *training(tmp_path)), before, tmp_path)
    assert f"{run} already holds a run" in line


def test_a_report_that_cannot_be_written_is_told_in_a_line(tmp_path):
    arguments = training(tmp_path, "train.global_batch=8")
    (tmp_path / "run" / "as-rank.json").mkdir(parents=True)
    done = as_rank("3/8", *arguments)
    assert done.returncode == 2
    told = f"{tmp_path / 'run' / 'as-rank.json'}: cannot be written (Is a directory); make room, or choose another"
    assert done.stderr.startswith(f"mpishard: {told} --run-dir")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["train.global_batch=12"], "12 micro-batches a step (train.global_batch 12 / train.micro_batch 1) cannot be "
         "dealt evenly to 8 ranks; use 1, 2, 3, 4, 6 or 12 ranks"),
        (["shard.strategy=hybrid_shard"], "shard.group is 0, the ranks of a node, and --as-rank knows no nodes;"),
        (["shard.strategy=hybrid_shard", "shard.group=3"], "shard.group is 3 and does not divide 8 ranks; set"),
        (["comm.transport=local"], "comm.transport is local, which is one rank alone"),
        (["comm.transport=nccl", "device.kind=cpu"], "transport 'nccl' carries arrays of a GPU"),
        (["model.width=100000002"], "at most 100000000"),
        (["model.width=60000", "model.vocabulary=300000"], "a rank needs "),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(tmp_path, settings, told):
    arguments = training(tmp_path, "train.global_batch=8", *settings)
    before = snapshot(tmp_path)
    assert told in refused(as_rank("3/8", *arguments), before, tmp_path)
    assert not (tmp_path / "run").exists()


def test_it_is_one_process(tmp_path):
    arguments = training(tmp_path)
    before = snapshot(tmp_path)
    line = refused(mpiexec("-m", "mpishard", *arguments, "--as-rank", "1/4"), before, tmp_path)
    assert "--as-rank is one process that plays a rank of 4, and the launcher started 2; start it without" in line


def test_it_neither_goes_on_nor_begins_with_weights(tmp_path):
    arguments = training(tmp_path)
    before = snapshot(tmp_path)
    for option in ("--resume", "--init-from"):
        done = as_rank("1/4", *arguments, option, str(tmp_path))
        assert f"--as-rank and {option} were given; a rank alone learns nothing" in refused(done, before, tmp_path)
