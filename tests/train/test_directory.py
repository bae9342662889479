"""The run directory: what it keeps, what it leaves alone, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.local import LocalCommunicator
from mpishard.errors import ConfigError
from mpishard.train import start
from mpishard.train.config import load
from mpishard.train.directory import RunDirectory, locked
from mpishard.train.resume import Resumed
from tests.cli.small_runs import tokens

SMALL = [
    "model.layers=1", "model.width=6", "model.heads=2", "model.sequence=9", "model.vocabulary=29",
    "train.global_batch=4", "train.micro_batch=1", "train.steps=6", "checkpoint.every=2", "checkpoint.keep=0",
]  # fmt: skip


@pytest.fixture
def finished(tmp_path):
    files = [f"data.{name}={tokens(tmp_path, name)}" for name in ("train", "heldout")]
    start.run(load(None, None, [*SMALL, *files]), tmp_path / "run", LocalCommunicator(NumpyOps()))
    return tmp_path / "run"


def go_on(source, *settings, where=None):
    resumed = Resumed.find(source)
    config = load(None, None, settings, resumed.settings)
    return start.run(config, where or resumed.run, LocalCommunicator(NumpyOps()), resumed=resumed)


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_what_somebody_has_named_is_neither_counted_nor_removed(finished):
    folder = finished / "checkpoints"
    for name in ("step-best", "step-00000002-keepme", "before"):
        shutil.copytree(folder / "step-00000002", folder / name)
    (folder / "step-00000099").symlink_to("step-00000006")
    go_on(finished, "train.steps=8", "checkpoint.every=1", "checkpoint.keep=1")
    assert names(finished) == ["before", "step-00000002-keepme", "step-00000008", "step-00000099", "step-best"]


def test_what_a_killed_removal_has_left_is_removed(finished):
    folder = finished / "checkpoints"
    (folder / "step-00000002").rename(folder / ".step-00000002.removed-0a0b0c0d")
    go_on(finished, "train.steps=7", "checkpoint.keep=2")
    assert names(finished) == ["step-00000006", "step-00000007"]


@pytest.mark.parametrize("name", ["latest", "."])
def test_a_checkpoint_under_another_name_is_the_same(finished, name, monkeypatch):
    folder = finished / "checkpoints"
    if name == "latest":
        (folder / "latest").symlink_to("step-00000006")
        go_on(folder / "latest", "train.steps=7")
    else:
        monkeypatch.chdir(folder / "step-00000006")
        go_on(type(folder)("."), "train.steps=7")
    assert json.loads((finished / "report.json").read_text())["steps"] == 7


def test_a_run_that_went_on_meanwhile_is_not_gone_back_on(finished):
    late = Resumed.find(finished)
    go_on(finished, "train.steps=9", "checkpoint.every=1")
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    config = load(None, None, ["train.steps=20"], late.settings)
    with pytest.raises(ConfigError, match="is older than step-00000009 in the same run"):
        start.run(config, finished, LocalCommunicator(NumpyOps()), resumed=late)
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_a_report_is_kept_under_its_own_steps(finished):
    shutil.rmtree(finished / "checkpoints" / "step-00000006")
    go_on(finished)
    go_on(finished, "train.steps=7")
    shutil.rmtree(finished / "checkpoints" / "step-00000007")
    (finished / "report-00000007.json").write_text("mine")
    go_on(finished, "train.steps=8")
    kept = {path.name for path in finished.glob("report-*.json")}
    assert kept == {f"report-0000000{n}.json" for n in ("6", "6-2", "7", "7-2")}
    assert json.loads((finished / "report-00000006.json").read_text())["steps"] == 6
    assert (finished / "report-00000007.json").read_text() == "mine"


@pytest.mark.parametrize(
    "line",
    [
        b"5",
        b"null",
        b"{}",
        b'{"step": 2}',
        b"\xff\xfe",
        b'{"step": "x", "loss": 1}',
        b'{"step": 1, "loss": "x"}',
        b'{"step": 1, "loss": 1, "heldout_loss": "x"}',
        b"[" * 100_000,
    ],
)
def test_a_line_of_metrics_that_is_none(finished, line):
    path = finished / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:2], line, *lines[2:], b""]))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="line 3 is no record of a step; mend that line or remove it"):
        go_on(finished, "train.steps=7")
    assert path.read_bytes() == before
    path.write_bytes(b"\n".join([*lines, line]))  # as the last one it was cut short
    go_on(finished, "train.steps=7")
    assert len(path.read_bytes().splitlines()) == 7


def test_a_checkpoint_is_no_place_for_a_run(finished):
    config = load(finished / "config.toml")
    with pytest.raises(ConfigError, match="is a checkpoint; choose another --run-dir"):
        start.run(config, finished / "checkpoints" / "step-00000006", LocalCommunicator(NumpyOps()))


def test_a_lock_that_is_a_pipe(finished):
    (finished / ".lock").unlink()
    os.mkfifo(finished / ".lock")
    with pytest.raises(ConfigError, match=r"\.lock: is no regular file"):
        go_on(finished, "train.steps=7")


def test_two_cannot_hold_one_directory(tmp_path):
    with locked(tmp_path), pytest.raises(ConfigError, match="is being used by another run"):
        RunDirectory(tmp_path, "")
    with RunDirectory(tmp_path, ""):
        pass


@pytest.mark.parametrize("setting", ["model.heads=3", "model.gelu=exact"])
def test_another_function_of_the_same_weights_is_refused(finished, setting):
    with pytest.raises(ConfigError, match="without which its weights are another model"):
        go_on(finished, "train.steps=7", setting)
