import json
import math

import numpy as np
import pytest

from mpishard.array.arena import CATEGORIES
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.threads import run as run_threads
from mpishard.data.tokens import write_tokens
from mpishard.errors import ConfigError
from mpishard.train import start
from mpishard.train.config import load


@pytest.fixture
def files(tmp_path):
    """Two small token files: 40 windows of 9 tokens to train on, 13 held out."""
    rng = np.random.default_rng(5)
    for name, windows in (("train", 40), ("heldout", 13)):
        tokens = (np.cumsum(rng.integers(0, 3, windows * 9 + 1)) % 29).astype(np.uint8)
        write_tokens(tmp_path / f"{name}.tokens", [tokens], 29)
    return [f"data.{name}={tmp_path / name}.tokens" for name in ("train", "heldout")]


SMALL = [
    "model.layers=2",
    "model.width=12",
    "model.heads=3",
    "model.sequence=9",
    "model.vocabulary=29",
    "model.dropout=0.1",
    "train.global_batch=4",
    "train.micro_batch=1",
    "train.steps=6",
    "train.log_every=2",
]


def train(where, files, *more, ranks=1):
    """Train on ``ranks`` threads; return the lines of metrics and the report."""
    config = load(None, None, [*SMALL, *files, *more])
    if ranks == 1:
        assert start.run(config, where, LocalCommunicator(NumpyOps())) == 0
    else:
        assert run_threads(ranks, lambda comm: start.run(config, where, comm)) == [0] * ranks
    lines = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    return lines, json.loads((where / "report.json").read_text())


def test_a_run_leaves_its_configuration_metrics_and_report(tmp_path, files, capsys):
    lines, report = train(tmp_path / "run", files, "train.heldout_every=2")
    assert load(tmp_path / "run" / "config.toml") == load(None, None, [*SMALL, *files, "train.heldout_every=2"])
    assert [line["step"] for line in lines] == list(range(6))
    for line in lines:
        assert {"loss", "tokens", "tokens_per_s", "grad_norm", "lr", "bytes", "seconds"} <= line.keys()
        assert line["tokens"] == 4 * 9
        assert set(line["bytes"]) == set(CATEGORIES)
        assert {"computing", "communicating", "waiting", "total"} <= line["seconds"].keys()
        assert ("heldout_loss" in line) == (line["step"] in (1, 3, 5))
    assert report["heldout_loss"] == lines[-1]["heldout_loss"]
    assert math.isfinite(report["heldout_loss"])
    out = capsys.readouterr().out
    assert f"checksum {report['checksum']}" in out
    assert f"{report['heldout_loss']:.4f} nats" in out
    for word in ("tokens/s", "left", "held", "optimizer", "unsharded"):
        assert word in out


def test_runs_on_any_number_of_ranks_give_the_same_numbers(tmp_path, files):
    lines, report = train(tmp_path / "1", files, "train.heldout_every=3")
    for ranks in (2, 4):
        others, other = train(tmp_path / str(ranks), files, "train.heldout_every=3", ranks=ranks)
        for key in ("loss", "grad_norm", "lr", "tokens"):
            assert [line[key] for line in others] == [line[key] for line in lines]
        assert other["checksum"] == report["checksum"]
        assert other["heldout_loss"] == report["heldout_loss"]
        assert len(other["bytes"]) == ranks
        assert other["bytes"][0]["optimizer"] < report["bytes"][0]["optimizer"]


def test_another_seed_is_another_run(tmp_path, files):
    assert train(tmp_path / "a", files)[1]["checksum"] != train(tmp_path / "b", files, "train.seed=1")[1]["checksum"]


def test_the_end_of_the_data_ends_the_run(tmp_path, files, capsys):
    # 40 windows are 10 steps of 4 sequences
    lines, report = train(tmp_path / "run", files, "train.steps=99", "data.epochs=1", ranks=2)
    assert len(lines) == report["steps"] == 10
    assert "heldout_loss" in lines[-1]
    assert "the training data ended after 10 of 99 steps" in capsys.readouterr().out


def test_a_directory_that_holds_a_run_is_refused_and_left_alone(tmp_path, files):
    train(tmp_path / "run", files)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="already holds a run"):
        train(tmp_path / "run", files, ranks=2)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_run_that_cannot_start_writes_nothing(tmp_path, files):
    with pytest.raises(ConfigError, match=r"nope\.tokens"):
        train(tmp_path / "run", files, f"data.train={tmp_path}/nope.tokens", ranks=2)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_ranks_that_cannot_share_the_batch_are_refused(tmp_path, files):
    with pytest.raises(ConfigError, match="cannot be dealt evenly to 3 ranks"):
        train(tmp_path / "run", files, ranks=3)


def test_text_is_sampled_from_the_default_corpus_alike_on_all_ranks(tmp_path, capsys):
    options = ["model.vocabulary=256", "model.sequence=16", "train.sample=20", "train.steps=2"]
    texts = [train(tmp_path / str(ranks), [], *options, ranks=ranks)[1]["sample"] for ranks in (1, 2)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("\ndef ")
    assert len(texts[0].encode(errors="replace")) >= 20
    assert "sample" in capsys.readouterr().out


def test_sampling_needs_bytes():
    with pytest.raises(ConfigError, match=r"train\.sample"):
        load(None, None, ["model.vocabulary=300", "train.sample=5"])


def test_poison_changes_nothing(tmp_path, files):
    plain = train(tmp_path / "plain", files)[1]["checksum"]
    assert train(tmp_path / "poisoned", files, "debug.poison=true", ranks=2)[1]["checksum"] == plain


def test_a_diverged_run_says_so_and_keeps_its_report(tmp_path, capsys):
    options = ["model.vocabulary=256", "model.sequence=16", "train.sample=20", "optim.lr=1e30", "optim.warmup=0"]
    _, report = train(tmp_path / "run", [], *options)
    assert report["updates"] < report["steps"] == 6
    assert report["heldout_loss"] is None
    assert "the run diverged" in capsys.readouterr().out


def test_ranks_with_other_token_files_are_refused(tmp_path, files):
    write_tokens(tmp_path / "other.tokens", [np.zeros(361, np.uint8)], 29)

    def main(comm):
        own = [f"data.train={tmp_path}/other.tokens"] if comm.rank == 1 else []
        with pytest.raises(ConfigError, match=r"rank 1 has training file .*, rank 0 has training file"):
            start.run(load(None, None, [*SMALL, *files, *own]), tmp_path / "run", comm)

    run_threads(2, main)
    assert not (tmp_path / "run").exists()


def test_a_copy_of_a_token_file_is_the_same_file(tmp_path, files):
    copy = tmp_path / "copy.tokens"
    copy.write_bytes((tmp_path / "train.tokens").read_bytes())
    checksum = train(tmp_path / "a", files)[1]["checksum"]
    assert train(tmp_path / "b", [*files, f"data.train={copy}"])[1]["checksum"] == checksum


def test_more_than_the_machine_has_is_refused(tmp_path, files):
    with pytest.raises(ConfigError, match="a rank needs"):
        train(tmp_path / "run", files, "model.width=60000", "model.heads=1", ranks=2)
    assert not (tmp_path / "run").exists()


def test_a_disk_that_is_full_ends_the_run_with_a_line(tmp_path, files, monkeypatch):
    said = []

    def full(*arguments):
        raise OSError(28, "No space left on device", str(tmp_path / "metrics.jsonl"))

    monkeypatch.setattr(start.RunDirectory, "write", full)
    comm = LocalCommunicator(NumpyOps())
    monkeypatch.setattr(comm, "abort", lambda message, code: said.append((message, code)))
    start.run(load(None, None, [*SMALL, *files]), tmp_path / "run", comm)
    ((message, code),) = said
    assert code == 2
    assert "metrics.jsonl: cannot be written (No space left on device); make room" in message
