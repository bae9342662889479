"""Runs that stop and go on: on any number of ranks, the same numbers as the run that never stopped."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.threads import run as run_threads
from mpishard.data.tokens import write_tokens
from mpishard.errors import ConfigError
from mpishard.train import start
from mpishard.train.config import load
from mpishard.train.resume import Resumed

SMALL = [
    "model.layers=2",
    "model.width=12",
    "model.heads=3",
    "model.sequence=9",
    "model.vocabulary=29",
    "model.dropout=0.1",
    "train.global_batch=12",
    "train.micro_batch=1",
    "train.steps=9",
    "train.heldout_every=4",
    "train.heldout_batches=1",
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    rng = np.random.default_rng(5)
    for name, windows in (("train", 100), ("heldout", 13)):
        tokens = (np.cumsum(rng.integers(0, 3, windows * 9 + 1)) % 29).astype(np.uint8)
        write_tokens(folder / f"{name}.tokens", [tokens], 29)
    return [f"data.{name}={folder / name}.tokens" for name in ("train", "heldout")]


def begin(where, files, *more, ranks=1, stop_at=None, told=0):
    """Train on ``ranks`` threads; rank ``told`` is told to stop in step ``stop_at``."""
    config = load(None, None, [*SMALL, *files, *more])
    return _run(config, where, ranks, stop_at, told, None)


def go_on(source, *more, where=None, ranks=1, stop_at=None, told=0):
    resumed = Resumed.find(source)
    config = load(None, None, more, resumed.settings)
    return _run(config, where or resumed.run, ranks, stop_at, told, resumed)


def _run(config, where, ranks, stop_at, told, resumed):
    def main(comm):
        asked = itertools.count(0 if resumed is None else resumed.manifest.step)

        def stopper():
            step = next(asked)
            return "SIGUSR1" if comm.rank == told and stop_at is not None and step >= stop_at else ""

        return start.run(config, where, comm, resumed=resumed, stopper=stopper)

    if ranks == 1:
        assert main(LocalCommunicator(NumpyOps())) == 0
    else:
        assert run_threads(ranks, main) == [0] * ranks
    lines = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    report = where / "report.json"
    return lines, json.loads(report.read_text()) if report.exists() else None


def numbers(lines):
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"], r.get("heldout_loss")) for r in lines]


@pytest.fixture(scope="module")
def straight(tmp_path_factory, files):
    """The run that never stopped."""
    return begin(tmp_path_factory.mktemp("straight") / "run", files)


@pytest.mark.parametrize("then", [1, 2, 3, 4])
@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_stopped_on_some_ranks_and_resumed_on_others(tmp_path, files, straight, first, then):
    stop_at = int(np.random.default_rng([first, then]).integers(0, 8))
    lines, report = begin(tmp_path / "run", files, ranks=first, stop_at=stop_at, told=first - 1)
    assert len(lines) == stop_at + 1
    assert report is None
    text = (tmp_path / "run" / "stopped").read_text()
    assert f"stopped by SIGUSR1 (rank {first - 1}) after step {stop_at + 1} of 9" in text
    assert f"mpishard train --resume {tmp_path / 'run'}" in text
    lines, report = go_on(tmp_path / "run", ranks=then)
    assert numbers(lines) == numbers(straight[0])
    for key in ("checksum", "heldout_loss", "curve", "steps", "updates"):
        assert report[key] == straight[1][key], key
    assert not (tmp_path / "run" / "stopped").exists()


def test_a_run_that_stops_again_and_again_on_other_strategies(tmp_path, files, straight):
    begin(tmp_path / "run", files, ranks=2, stop_at=1)
    go_on(tmp_path / "run", "shard.strategy=no_shard", ranks=3, stop_at=4, told=2)
    go_on(tmp_path / "run", "shard.strategy=full_shard", "shard.prefetch=2", ranks=4, stop_at=6)
    lines, report = go_on(tmp_path / "run", "shard.recompute=block", "shard.strategy=no_shard")
    assert numbers(lines) == numbers(straight[0])
    assert report["checksum"] == straight[1]["checksum"]


def test_a_run_that_goes_on_elsewhere_leaves_the_first_alone(tmp_path, files, straight):
    begin(tmp_path / "run", files, "checkpoint.every=3", "checkpoint.keep=0")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    lines, report = go_on(tmp_path / "run" / "checkpoints" / "step-00000003", where=tmp_path / "other", ranks=2)
    assert numbers(lines) == numbers(straight[0])[3:]
    assert report["checksum"] == straight[1]["checksum"]
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    with pytest.raises(ConfigError, match=r"is older than step-00000009 in the same run"):
        go_on(tmp_path / "run" / "checkpoints" / "step-00000003")
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def test_a_run_that_was_killed_forgets_what_it_had_not_saved(tmp_path, files, straight, monkeypatch):
    """A crash three steps after the last checkpoint, in the middle of a line."""
    write = start.RunDirectory.write

    def crash(self, record):
        write(self, record)
        if record["step"] == 6:
            self._file.write('{"step": 7, "lo')
            self._file.flush()
            raise KeyError("crash")

    monkeypatch.setattr(start.RunDirectory, "write", crash)
    with pytest.raises(KeyError):
        begin(tmp_path / "run", files, "checkpoint.every=4")
    monkeypatch.undo()
    lines, report = go_on(tmp_path / "run", ranks=3)
    assert numbers(lines) == numbers(straight[0])
    assert report["checksum"] == straight[1]["checksum"]


def test_a_finished_run_is_prolonged_and_its_report_is_kept(tmp_path, files, capsys):
    begin(tmp_path / "run", files)
    lines, report = go_on(tmp_path / "run", "train.steps=11", ranks=2)
    out = capsys.readouterr().out
    assert "goes on after step 9, from " in out
    assert [line for line in out.splitlines() if line.startswith("changed")] == ["changed: train.steps = 11 (was 9)"]
    assert len(lines) == report["steps"] == 11
    assert json.loads((tmp_path / "run" / "report-00000009.json").read_text())["steps"] == 9
    assert load(tmp_path / "run" / "config.toml").train.steps == 11


@pytest.mark.parametrize(
    ("every", "keep", "final", "kept"),
    [
        (0, 2, "true", [9]),
        (2, 2, "true", [8, 9]),
        (2, 0, "true", [2, 4, 6, 8, 9]),
        (4, 1, "false", [8]),
        (0, 1, "false", []),
    ],
)
def test_which_checkpoints_are_kept(tmp_path, files, every, keep, final, kept):
    more = [f"checkpoint.every={every}", f"checkpoint.keep={keep}", f"checkpoint.final={final}"]
    _, report = begin(tmp_path / "run", files, *more, ranks=2)
    folder = tmp_path / "run" / "checkpoints"
    found = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    assert found == [f"step-{step:08d}" for step in kept]
    assert report["checkpoint"] == (str(folder / found[-1]) if found else None)


def test_told_to_stop_in_the_last_step_the_run_ends_as_it_would(tmp_path, files, straight):
    _, report = begin(tmp_path / "run", files, ranks=2, stop_at=8)
    assert report["checksum"] == straight[1]["checksum"]
    assert not (tmp_path / "run" / "stopped").exists()


def test_a_run_begins_with_given_weights(tmp_path, files, straight):
    """Its own: the loss goes on where they were, with fresh moments."""
    begin(tmp_path / "a", files)
    model = tmp_path / "a" / "checkpoints" / "step-00000009" / "model.safetensors"
    results = [
        begin(tmp_path / str(ranks), files, f"model.init_from={model}", "train.steps=2", ranks=ranks)
        for ranks in (1, 3)
    ]
    assert numbers(results[0][0]) == numbers(results[1][0])
    assert results[0][1]["checksum"] == results[1][1]["checksum"]
    assert results[0][0][0]["loss"] != straight[0][0]["loss"]


SCALED = ["precision.compute=fp16", "precision.scale=536870912", "precision.scale_every=2", "train.steps=12"]


def scales(lines):
    return [(record["loss_scale"], record["updated"]) for record in lines]


def test_the_loss_scale_goes_on_where_it_was(tmp_path, files):
    straight, expected = begin(tmp_path / "straight", files, *SCALED)
    assert len(set(scales(straight))) > 3
    for stop_at in (2, 7):
        run = tmp_path / str(stop_at)
        begin(run, files, *SCALED, ranks=2, stop_at=stop_at)
        lines, report = go_on(run, ranks=3)
        assert scales(lines) == scales(straight)
        assert report["checksum"] == expected["checksum"]


def test_a_loss_scale_that_is_given_anew_begins_anew(tmp_path, files, capsys):
    begin(tmp_path / "run", files, *SCALED, stop_at=5)
    capsys.readouterr()
    lines, _ = go_on(tmp_path / "run", "precision.scale=4")
    assert [scale for scale, _ in scales(lines)[6:9]] == [4.0, 4.0, 8.0]
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("changed")] == [
        "changed: precision.scale = 4.0 (was 536870912.0)"
    ]


def test_a_run_that_scales_from_now_on_begins_with_its_own_scale(tmp_path, files):
    begin(tmp_path / "run", files, stop_at=3)
    manifest = tmp_path / "run" / "checkpoints" / "step-00000004" / "manifest.json"
    assert "loss_scale" not in json.loads(manifest.read_text())
    lines, _ = go_on(tmp_path / "run", "precision.compute=fp16", "precision.scale=256", stop_at=5)
    assert [record.get("loss_scale") for record in lines] == [None] * 4 + [256.0] * 2
    manifest = tmp_path / "run" / "checkpoints" / "step-00000006" / "manifest.json"
    assert json.loads(manifest.read_text())["loss_scale"] == {"scale": 256.0, "good": 2}
    lines, _ = go_on(tmp_path / "run", "precision.compute=fp32", "precision.scale=65536.0")
    assert [record.get("loss_scale") for record in lines] == [None] * 4 + [256.0] * 2 + [None] * 3


def test_updates_that_an_earlier_scale_cost_are_no_divergence(tmp_path, files, capsys):
    lines, _ = begin(tmp_path / "run", files, *SCALED, stop_at=5)
    assert not all(updated for _, updated in scales(lines))
    capsys.readouterr()
    go_on(tmp_path / "run", "precision.compute=fp32", "precision.scale=65536.0", "precision.scale_every=2000")
    assert "diverged" not in capsys.readouterr().out


def test_settings_that_a_version_did_not_know_are_no_change(tmp_path, files, capsys):
    begin(tmp_path / "run", files, stop_at=3)
    resumed = Resumed.find(tmp_path / "run")
    older = {section: dict(entries) for section, entries in resumed.settings.items()}
    for section, key in (("shard", "group"), ("precision", "scale"), ("comm", "sums"), ("model", "frozen")):
        del older[section][key]
    resumed.settings = older
    assert resumed.changes(load(None, None, (), older)) == []


def test_on_other_strategies_and_in_groups(tmp_path, files, straight):
    begin(tmp_path / "run", files, "shard.strategy=zero2", ranks=2, stop_at=1)
    go_on(tmp_path / "run", "shard.strategy=zero1", "shard.recompute=attention", ranks=3, stop_at=4)
    go_on(tmp_path / "run", "shard.strategy=hybrid_shard", "shard.group=1", "shard.recompute=none", ranks=1, stop_at=6)
    lines, report = go_on(tmp_path / "run", "shard.strategy=ddp", "shard.group=0", ranks=2)
    assert numbers(lines) == numbers(straight[0])
    assert report["checksum"] == straight[1]["checksum"]


def test_frozen_parameters_stay_and_may_be_trained_later(tmp_path, files):
    from safetensors.numpy import load_file

    frozen = "model.frozen=wte.*, h.0.*"
    names = ("transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight")
    straight, expected = begin(tmp_path / "straight", files, frozen)
    begin(tmp_path / "run", files, frozen, ranks=2, stop_at=4)
    first = load_file(tmp_path / "run" / "checkpoints" / "step-00000005" / "model.safetensors")
    lines, report = go_on(tmp_path / "run", ranks=3)
    assert numbers(lines) == numbers(straight)
    assert report["checksum"] == expected["checksum"]
    folder = tmp_path / "run" / "checkpoints" / "step-00000009"
    model, moments = (load_file(folder / f"{name}.safetensors") for name in ("model", "exp_avg_sq"))
    for name in names:
        assert (model[name] == first[name]).all()
        assert name not in moments
    assert moments["transformer.h.1.mlp.c_fc.weight"].all()
    assert (model["transformer.h.1.mlp.c_fc.weight"] != first["transformer.h.1.mlp.c_fc.weight"]).any()
    go_on(tmp_path / "run", "model.frozen=", "train.steps=11", ranks=2, stop_at=9)
    later = load_file(tmp_path / "run" / "checkpoints" / "step-00000010" / "model.safetensors")
    assert all((model[name] != later[name]).any() for name in names)
    # and back: what was trained in between keeps its value, and its moments are not read
    lines, _ = go_on(tmp_path / "run", frozen, ranks=2)
    last = load_file(tmp_path / "run" / "checkpoints" / "step-00000011" / "model.safetensors")
    assert all((last[name] == later[name]).all() for name in names)
