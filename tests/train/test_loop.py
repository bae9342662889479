import errno
import itertools
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


SETTINGS = {
    "zero3": [],
    "zero2": ["shard.prefetch=0"],
    "zero1": ["shard.recompute=attention"],
    "ddp": ["shard.recompute=block", "shard.recompute_every=2"],
    "full_shard": ["shard.reshard_after_forward=false", "precision.reduce=fp32"],
}


@pytest.mark.parametrize("strategy", SETTINGS)
def test_every_strategy_gives_the_same_run(tmp_path, files, strategy):
    plain = train(tmp_path / "plain", files)[1]
    _, report = train(tmp_path / "run", files, f"shard.strategy={strategy}", *SETTINGS[strategy], ranks=2)
    assert report["checksum"] == plain["checksum"]
    assert report["heldout_loss"] == plain["heldout_loss"]


@pytest.mark.parametrize(
    "settings",
    [
        ["shard.strategy=hybrid_shard", "shard.group=2"],
        ["shard.strategy=hybrid_shard", "precision.compute=bf16"],
        ["shard.accumulate=no_sync", "train.micro_batch=1", "train.global_batch=8"],
        ["comm.sums=by_node"],
    ],
    ids=["groups of two", "groups of a node", "no_sync", "by_node"],
)
def test_sums_in_another_order_are_nearly_the_same_run(tmp_path, files, settings):
    same = [setting for setting in settings if setting.startswith(("train.", "precision."))]
    lines, _ = train(tmp_path / "plain", files, *same)
    others, _ = train(tmp_path / "run", files, *settings, ranks=4)
    relative = 1e-2 if "precision.compute=bf16" in settings else 1e-5
    assert [line["loss"] for line in others] == pytest.approx([line["loss"] for line in lines], rel=relative)


def test_the_first_line_says_what_shapes_the_run(tmp_path, files, capsys):
    train(
        tmp_path / "run", files, "shard.strategy=hybrid_shard", "shard.group=1", "shard.reshard_after_forward=false",
        "shard.recompute=block", "shard.recompute_every=2", "shard.accumulate=no_sync", "precision.compute=bf16",
        "precision.reduce=fp32", "model.frozen=wpe.*", ranks=2,
    )  # fmt: skip
    line = capsys.readouterr().out.splitlines()[0]
    assert line.endswith(
        "2 ranks (threads), hybrid_shard in groups of 1, prefetch 1, kept until backward, recompute block (1 in 2), "
        "no_sync, bf16, reduced in fp32, frozen wpe.*"
    )
    train(tmp_path / "other", files, "comm.sums=by_node")
    assert capsys.readouterr().out.splitlines()[0].endswith(", fp32, sums by node")


def test_a_loss_scale_comes_down_is_told_and_noted(tmp_path, files, capsys):
    options = ["precision.compute=fp16", "precision.scale=536870912", "precision.scale_every=2", "train.log_every=1"]
    lines, report = train(tmp_path / "run", files, *options, "train.steps=20")
    skipped = [line for line in lines if not line["updated"]]
    assert 1 < len(skipped) < 20
    assert lines[0]["loss_scale"] == 2.0**29
    good = 0
    for before, line in itertools.pairwise(lines):
        good = good + 1 if before["updated"] else 0
        factor = 0.5 if not before["updated"] else 2.0 if good == 2 else 1.0
        good %= 2
        assert line["loss_scale"] == factor * before["loss_scale"]
    assert report["updates"] == 20 - len(skipped)
    out = capsys.readouterr().out
    assert "scale 536870912 " in out
    assert "update skipped: the gradient is not finite (loss scale now 268435456)" in out
    assert f"{len(skipped)} updates were skipped for the loss scale, which is " in out
    assert "diverged" not in out
    again, other = train(tmp_path / "two", files, *options, "train.steps=20", ranks=2)
    assert other["checksum"] == report["checksum"]
    assert [line["loss_scale"] for line in again] == [line["loss_scale"] for line in lines]


def test_a_fixed_loss_scale_stays_and_its_remedy_is_told(tmp_path, files, capsys):
    options = ["precision.compute=fp16", "precision.loss_scale=fixed"]
    lines, _ = train(tmp_path / "run", files, *options, "precision.scale=1024")
    assert {(line["loss_scale"], line["updated"]) for line in lines} == {(1024.0, True)}
    lines, _ = train(tmp_path / "large", files, *options, "precision.scale=1099511627776")
    assert {(line["loss_scale"], line["updated"]) for line in lines} == {(2.0**40, False)}
    assert '6 updates were skipped for the loss scale, which is 2**40 now; try precision.loss_scale = "dynamic"' in (
        capsys.readouterr().out
    )


def test_without_fp16_there_is_no_loss_scale(tmp_path, files):
    lines, _ = train(tmp_path / "run", files, "precision.compute=bf16", "train.steps=1")
    assert "loss_scale" not in lines[0]
    lines, _ = train(tmp_path / "wire", files, "precision.reduce=fp16", "train.steps=1")
    assert lines[0]["loss_scale"] == 65536.0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_memory_report_is_made_at_the_end(tmp_path, files, capsys, ranks):
    told = []

    def reporter(folder, engine, forecast):
        assert [moment.name for moment in engine.ledger.moments] == [moment.name for moment in forecast.moments]
        told.append((engine.comm.rank, folder))
        return ["a report"]

    config = load(None, None, [*SMALL, *files])
    run_threads(ranks, lambda comm: start.run(config, tmp_path / "run", comm, reporter=reporter))
    assert sorted(told) == [(rank, None if rank else tmp_path / "run") for rank in range(ranks)]
    assert capsys.readouterr().out.count("a report\n") == 1


def test_a_run_has_its_report_where_that_on_memory_cannot_be_written(tmp_path, files, monkeypatch):
    def reporter(folder, engine, forecast):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "memory.json"))

    aborted = []
    monkeypatch.setattr(LocalCommunicator, "abort", lambda self, message, code: aborted.append((message, code)))
    config = load(None, None, [*SMALL, *files])
    start.run(config, tmp_path / "run", LocalCommunicator(NumpyOps()), reporter=reporter)
    assert aborted == [
        (
            f"mpishard: {tmp_path / 'run' / 'memory.json'}: cannot be written (No space left on device); make room, or "
            "choose another --run-dir",
            2,
        )
    ]
    assert (tmp_path / "run" / "report.json").is_file()


def test_offload_without_a_device_is_refused_on_all_ranks(tmp_path, files):
    with pytest.raises(ConfigError, match=r"shard\.offload is optimizer and the device is the CPU"):
        train(tmp_path / "run", files, "shard.offload=optimizer", ranks=2)
    assert not (tmp_path / "run").exists()


def test_a_group_that_does_not_divide_the_ranks_is_refused_on_all(tmp_path, files):
    with pytest.raises(ConfigError, match=r"shard\.group is 3 and does not divide 4 ranks; set shard\.group to 1, 2"):
        train(tmp_path / "run", files, "shard.strategy=hybrid_shard", "shard.group=3", ranks=4)


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
